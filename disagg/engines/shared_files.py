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
from kvpool.device.shared_memory import SharedFile, files_between
from kvpool.layout import Slab

PRIVATE = -1


class Segment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`nbytes` at `base` of the owner: from `offset` of passed file number `file`, or `PRIVATE`."""

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
            # bytes behind a file's end in its last page belong to no region
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
    status, sealed = os.fstat(handle), False
    if stat.S_ISREG(status.st_mode):
        with suppress(OSError):  # a kind of file that has no seals
            sealed = bool(fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    if not sealed:
        raise TransferError(
            "malformed offer: a file that is not a regular one, or is not sealed against shrinking."
        )
    return status.st_size


def map_files(segments: Sequence[Segment], files: Sequence[int]) -> tuple[list[int], list[object]]:
    """Maps the files that came with a peer's segments (untrusted); they may be closed then.

    Returns for each segment its `pointer here - pointer there` (0: PRIVATE), and the mappings.
    """
    if {segment.file for segment in segments} - {PRIVATE} != {*range(len(files))}:
        raise TransferError(f"malformed offer: {len(files)} files came, but segments name others.")
    sizes = [sealed_size(handle) for handle in files]
    for segment in segments:
        low, high = segment.offset, segment.offset + segment.nbytes
        if segment.file != PRIVATE and not 0 <= low <= high <= sizes[segment.file]:
            raise TransferError(
                f"malformed offer: bytes {low} to {high} of a file of {sizes[segment.file]} bytes."
            )
    try:
        mappings = [
            np.frombuffer(mmap.mmap(handle, size, mmap.MAP_SHARED, mmap.PROT_READ), dtype=np.uint8)
            for handle, size in zip(files, sizes)
        ]
    except (OSError, ValueError, OverflowError) as error:
        raise TransferError(f"the peer's shared memory cannot be mapped: {error}.") from None
    starts = [mapping.ctypes.data for mapping in mappings]
    shifts = [
        0 if segment.file == PRIVATE else starts[segment.file] + segment.offset - segment.base
        for segment in segments
    ]
    return shifts, [*mappings]


def this_host() -> str:
    """An identifier of this boot of this host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
