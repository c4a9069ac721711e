"""Host memory of another process of this host: mapped if it is shared, else read by the kernel."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from disagg.engines.base import TransferError
from kvpool.layout import Slab
from kvpool.layout.grid import Ints

IOV_MAX = 1024
F_GET_SEALS = 1034
F_SEAL_SHRINK = 0x2
PRIVATE = -1

_VECTOR = (ctypes.c_void_p, ctypes.c_ulong)
_libc = ctypes.CDLL(None, use_errno=True)


class Segment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`nbytes` at `base` of the owner: bytes from `offset` of its open file `fd`, or `PRIVATE`."""

    base: int
    nbytes: int
    fd: int
    offset: int
    device: int
    inode: int


class Files:
    """The files behind this process's shared mappings, kept open for peers."""

    def __init__(self) -> None:
        self._handles: dict[tuple[int, int], int] = {}

    def find(self, slab: Slab) -> list[Segment]:
        """The segments of a slab, each in one mapping of this process."""
        found: list[Segment] = []
        reached = slab.base
        for low, high, shared, offset, device, inode in _mappings():
            if high <= reached or low >= slab.end:
                continue
            if low > reached:
                break
            stop = min(high, slab.end)
            handle = self._open(device, inode) if shared else PRIVATE
            part = Segment(reached, stop - reached, handle, offset + reached - low, device, inode)
            if found and _continues(found[-1], part):
                whole = found[-1].nbytes + part.nbytes
                found[-1] = msgspec.structs.replace(found[-1], nbytes=whole)
            else:
                found.append(part)
            reached = stop
        if reached < slab.end:
            raise TransferError(
                f"{slab.nbytes} bytes at {slab.base:#x} are not mapped here (only up to "
                f"{reached:#x})."
            )
        return found

    def _open(self, device: int, inode: int) -> int:
        """A duplicate descriptor of a mapping's file, kept for peers; PRIVATE if there is none."""
        if (device, inode) in self._handles:
            return self._handles[device, inode]
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed since it was listed
                status = os.fstat(int(entry))
                if (status.st_dev, status.st_ino) == (device, inode):
                    return self._handles.setdefault((device, inode), os.dup(int(entry)))
        return PRIVATE

    def close(self) -> None:
        """Closes all files."""
        while self._handles:
            os.close(self._handles.popitem()[1])


def _continues(one: Segment, other: Segment) -> bool:
    """Whether two segments are one mapping that the kernel split, so that a run may cross."""
    if one.fd == other.fd == PRIVATE:
        return True
    same = (one.device, one.inode) == (other.device, other.inode)
    return same and one.offset + one.nbytes == other.offset


def _mappings() -> list[tuple[int, int, bool, int, int, int]]:
    """(start, end, shared, file offset, device, inode) of this process's mappings, ascending."""
    rows = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, offset, device, inode = line.split(maxsplit=5)[:5]
        low, high = span.split("-")
        major, minor = device.split(":")
        number = os.makedev(int(major, 16), int(minor, 16))
        rows.append(
            (int(low, 16), int(high, 16), access[3] == "s", int(offset, 16), number, int(inode))
        )
    return rows


def map_segment(pid: int, segment: Segment) -> tuple[int, bool, object]:
    """A segment's shift here, whether the kernel must read it, and its mapping."""
    if segment.fd == PRIVATE:
        return 0, True, None
    path = f"/proc/{pid}/fd/{segment.fd}"
    try:
        # checked before it is opened: opening a pipe waits for its other end
        status = os.stat(path)
        if (status.st_dev, status.st_ino) != (segment.device, segment.inode):
            raise TransferError(f"the peer's file {segment.fd} is not the registered one.")
        if not stat.S_ISREG(status.st_mode):
            raise TransferError(f"the peer's file {segment.fd} is not a regular file.")
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TransferError(
            f"the peer's shared memory cannot be opened ({error.strerror}): both processes must "
            "run as the same user. Use engine nixl otherwise."
        ) from None
    try:
        if not _sealed(handle):
            return 0, True, None  # it could shrink, and reading beyond its end raises SIGBUS
        size = os.fstat(handle).st_size
        if segment.offset < 0 or segment.offset + segment.nbytes > size:
            raise TransferError(f"{segment} lies outside a file of {size} bytes.")
        start = segment.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = segment.offset - start + segment.nbytes
        mapping = mmap.mmap(handle, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=start)
    except OSError as error:
        raise TransferError(f"the peer's shared memory cannot be mapped: {error}.") from None
    finally:
        os.close(handle)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    return memory.ctypes.data + segment.offset - start - segment.base, False, memory


def _sealed(handle: int) -> bool:
    try:
        return bool(fcntl.fcntl(handle, F_GET_SEALS) & F_SEAL_SHRINK)
    except OSError:  # this kind of file has no seals
        return False


def read_process(pid: int, src: Ints, dst: Ints, nbytes: Ints) -> None:
    """`process_vm_readv` in calls of at most IOV_MAX runs."""
    readv = _libc.process_vm_readv
    readv.restype = ctypes.c_ssize_t
    readv.argtypes = (ctypes.c_int, *_VECTOR, *_VECTOR, ctypes.c_ulong)
    here = np.stack([dst, nbytes], axis=1)
    there = np.stack([src, nbytes], axis=1)
    for start in range(0, src.size, IOV_MAX):
        count = min(IOV_MAX, src.size - start)
        wanted = int(nbytes[start : start + count].sum())
        got = readv(pid, here[start:].ctypes.data, count, there[start:].ctypes.data, count, 0)
        if got != wanted:
            reason = os.strerror(ctypes.get_errno()) if got < 0 else f"{got} of {wanted} bytes"
            raise TransferError(
                f"the memory of process {pid} cannot be read ({reason}). Allocate the peer's pool "
                "on kvpool's CPU device, which shares its memory, or use engine nixl."
            )


def this_host() -> str:
    """An identifier of this boot of this host and its process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def started(pid: int) -> str:
    """Start time of a process in clock ticks since boot; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
