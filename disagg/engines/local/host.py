"""Host memory that processes of this host share: what backs it, and mappings of a peer's."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from disagg.engines.base import TransferError
from kvpool.layout import Slab

F_GET_SEALS = 1034
F_SEAL_SHRINK = 0x2
PRIVATE = -1


class Segment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`nbytes` at `base` of the owner: bytes from `offset` of a file that is passed with it, by its
    index, or `PRIVATE`.
    """

    base: int
    nbytes: int
    file: int
    offset: int


class Files:
    """The files behind this process's shared mappings, open for peers, which may only read them."""

    def __init__(self) -> None:
        self.handles: list[int] = []
        self._indices: dict[tuple[int, int], int] = {}

    def find(self, slab: Slab) -> list[Segment]:
        """The segments of a slab, each in one mapping of this process."""
        segments: list[Segment] = []
        reached = slab.base
        for low, high, shared, offset, device, inode in _mappings():
            if high <= reached or low >= slab.end:
                continue
            if low > reached:
                break
            stop = min(high, slab.end)
            file = self._index(device, inode) if shared else PRIVATE
            start = 0 if file == PRIVATE else offset + reached - low
            nbytes = stop - reached
            if file != PRIVATE:  # what is mapped of a file's last page may lie beyond its end
                nbytes = min(nbytes, os.fstat(self.handles[file]).st_size - start)
            segment = Segment(reached, nbytes, file, start)
            if segments and _continues(segments[-1], segment):
                whole = segments[-1].nbytes + nbytes
                segments[-1] = msgspec.structs.replace(segments[-1], nbytes=whole)
            elif nbytes > 0:
                segments.append(segment)
            reached = stop
        if reached < slab.end:
            raise TransferError(
                f"{slab.nbytes} bytes at {slab.base:#x} are not mapped here (only up to "
                f"{reached:#x})."
            )
        return segments

    def _index(self, device: int, inode: int) -> int:
        """The index of a mapping's file. PRIVATE if this process has no descriptor of it, or if it
        could shrink while a peer reads it.
        """
        if (device, inode) not in self._indices:
            handle = _reopened(device, inode)
            if handle is not None:
                self.handles.append(handle)
            self._indices[device, inode] = PRIVATE if handle is None else len(self.handles) - 1
        return self._indices[device, inode]

    def close(self) -> None:
        """Closes all files."""
        self._indices.clear()
        while self.handles:
            os.close(self.handles.pop())


def _reopened(device: int, inode: int) -> int | None:
    """A descriptor for reading of a file that can be mapped by others and that is open here."""
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since it was listed
            if not _is_file(os.fstat(int(entry)), device, inode):
                continue
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            handle = os.open(f"/proc/self/fd/{entry}", flags)
            if _is_file(os.fstat(handle), device, inode) and _is_sealed(handle):
                return handle
            os.close(handle)
    return None


def _is_file(status: os.stat_result, device: int, inode: int) -> bool:
    return (status.st_dev, status.st_ino) == (device, inode) and stat.S_ISREG(status.st_mode)


def _is_sealed(handle: int) -> bool:
    """Whether a file cannot shrink: to read a mapping beyond its end raises SIGBUS."""
    try:
        return bool(fcntl.fcntl(handle, F_GET_SEALS) & F_SEAL_SHRINK)
    except OSError:  # this kind of file has no seals
        return False


def _continues(segment: Segment, following: Segment) -> bool:
    """Whether two segments are one mapping that the kernel split, so that a run may cross."""
    if segment.file == following.file == PRIVATE:
        return True
    end = segment.offset + segment.nbytes
    return segment.file == following.file and end == following.offset


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


def map_files(segments: Sequence[Segment], files: Sequence[int]) -> tuple[list[int], list[object]]:
    """Maps the files that came with a peer's segments (untrusted); they may be closed then.

    Returns for each segment its `pointer here - pointer there` (0: PRIVATE), and the mappings.
    """
    of: dict[int, list[int]] = {}
    for number, segment in enumerate(segments):
        of.setdefault(segment.file, []).append(number)
    if of.keys() - {PRIVATE} != {*range(len(files))}:
        raise TransferError(
            f"malformed offer: {len(files)} files came, and the segments name others."
        )
    shifts, mappings = [0] * len(segments), []
    for file, handle in enumerate(files):
        first, mapping = _map(handle, [segments[number] for number in of[file]])
        mappings.append(mapping)
        for number in of[file]:
            shifts[number] = first + segments[number].offset - segments[number].base
    return shifts, mappings


def _map(handle: int, parts: Sequence[Segment]) -> tuple[int, object]:
    """Maps what the segments need of a file: where the file's first byte would lie, and the
    mapping.
    """
    low = min(part.offset for part in parts)
    high = max(part.offset + part.nbytes for part in parts)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or not _is_sealed(handle):
        raise TransferError(
            "malformed offer: a file that is not a regular one, or is not sealed against shrinking."
        )
    if low < 0 or high > status.st_size:
        raise TransferError(
            f"malformed offer: bytes {low} to {high} of a file of {status.st_size} bytes."
        )
    start = low // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        mapping = mmap.mmap(handle, high - start, mmap.MAP_SHARED, mmap.PROT_READ, offset=start)
    except (OSError, ValueError, OverflowError) as error:
        raise TransferError(f"the peer's shared memory cannot be mapped: {error}.") from None
    memory = np.frombuffer(mapping, dtype=np.uint8)
    return memory.ctypes.data - start, memory


def this_host() -> str:
    """An identifier of this boot of this host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
