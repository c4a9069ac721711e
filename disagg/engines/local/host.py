"""Host memory that processes of this host share: what backs it, and mappings of a peer's."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from disagg.engines.base import TransferError
from kvpool.device.shared_memory import SharedFile, files_between
from kvpool.layout import Slab

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
    """The files of memory from kvpool's CPU device, open for peers, which may only read them."""

    def __init__(self) -> None:
        self.handles: list[int] = []
        self._indices: dict[SharedFile, int] = {}

    def find(self, slab: Slab) -> list[Segment]:
        """The segments of a slab: what no file backs is private."""
        segments: list[Segment] = []
        reached = slab.base
        for file in files_between(slab.base, slab.end):
            if reached < file.base:
                segments.append(Segment(reached, file.base - reached, PRIVATE, 0))
                reached = file.base
            # what lies behind a file's end in its last page is nobody's
            stop = min(file.base + file.nbytes, slab.end)
            index = self._index(file)
            segments.append(Segment(reached, stop - reached, index, reached - file.base))
            reached = file.base + -(-file.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if reached < slab.end:
            segments.append(Segment(reached, slab.end - reached, PRIVATE, 0))
        return segments

    def _index(self, file: SharedFile) -> int:
        if file not in self._indices:
            flags = os.O_RDONLY | os.O_CLOEXEC
            self.handles.append(os.open(f"/proc/self/fd/{file.handle}", flags))
            self._indices[file] = len(self.handles) - 1
        return self._indices[file]

    def close(self) -> None:
        """Closes all files."""
        self._indices.clear()
        while self.handles:
            os.close(self.handles.pop())


def sealed_size(handle: int) -> int:
    """Bytes of a file that a peer passed. Raises TransferError unless it is a regular file that
    cannot shrink: to read a mapping beyond its end raises SIGBUS.
    """
    status = os.fstat(handle)
    sealed = False
    if stat.S_ISREG(status.st_mode):
        try:
            sealed = bool(fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
        except OSError:  # this kind of file has no seals
            sealed = False
    if not sealed:
        raise TransferError(
            "malformed offer: a file that is not a regular one, or is not sealed against shrinking."
        )
    return status.st_size


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
    size = sealed_size(handle)
    if low < 0 or high > size:
        raise TransferError(f"malformed offer: bytes {low} to {high} of a file of {size} bytes.")
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
