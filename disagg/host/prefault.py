"""Memory that a transfer would touch first is touched before, by a thread in the background: the
kernel otherwise finds, clears and maps each page of 4 KiB in the middle of the copy. Only advice:
contents stay as they are, and where the kernel does not know it nothing happens.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

MADV_HUGEPAGE, MADV_POPULATE_READ, MADV_POPULATE_WRITE = 14, 22, 23
"""The last two since Linux 5.14."""
CHUNK_BYTES = 16 << 20
"""Populated in one call."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Range(NamedTuple):
    """Whole pages of this process; `present`: only those that are in memory already."""

    start: int
    end: int
    present: bool


class Prefault:
    """Touches memory in a thread, which ends with its work."""

    def __init__(self) -> None:
        self._ranges: deque[_Range] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def own(self, base: int, nbytes: int) -> None:
        """Memory that reads will write to: its pages are allocated, large ones where the kernel
        gives them. Nothing happens if there is not as much memory left.
        """
        if nbytes <= _left():
            self._add(base, nbytes, present=False)

    def peers(self, base: int, nbytes: int) -> None:
        """A mapping of a peer's memory, to be read: maps what the peer has, adds no page to it."""
        self._add(base, nbytes, present=True)

    def close(self) -> None:
        """Leaves out what is not done yet."""
        with self._lock:
            self._ranges.clear()

    def _add(self, base: int, nbytes: int, *, present: bool) -> None:
        start, end = -(-base // mmap.PAGESIZE), (base + nbytes) // mmap.PAGESIZE
        if start >= end:
            return
        with self._lock:
            self._ranges.append(_Range(start * mmap.PAGESIZE, end * mmap.PAGESIZE, present))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="Prefault", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._ranges:
                    self._thread = None
                    return
                pages = self._ranges.popleft()
                stop = min(pages.end, pages.start + CHUNK_BYTES)
                if stop < pages.end:
                    self._ranges.appendleft(pages._replace(start=stop))
            # memory may have been given back meanwhile; advice about it is an error and no more
            if not _touch(pages.start, stop, pages.present):
                with self._lock:
                    if self._ranges and self._ranges[0].end == pages.end:
                        self._ranges.popleft()


def _touch(start: int, stop: int, present: bool) -> bool:
    """Populates some pages; whether the kernel does that there."""
    if not present:
        _advise(start, stop, MADV_HUGEPAGE)
        return _advise(start, stop, MADV_POPULATE_WRITE)
    pages = np.zeros((stop - start) // mmap.PAGESIZE, dtype=np.uint8)
    if _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), pages.ctypes):
        return False
    edges = np.flatnonzero(np.diff(pages & 1, prepend=0, append=0)).reshape(-1, 2)
    runs = (start + edges * mmap.PAGESIZE).tolist()
    return all(_advise(low, high, MADV_POPULATE_READ) for low, high in runs)


def _advise(start: int, stop: int, advice: int) -> bool:
    return not _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)


def _left() -> int:
    """Bytes that this process may still take."""
    limits = [0]
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        limits = [int(line.split()[1]) << 10]
    with suppress(OSError, ValueError):  # no limit of this group, or none that is seen from here
        group = Path("/sys/fs/cgroup")
        most = int((group / "memory.max").read_text())
        limits.append(most - int((group / "memory.current").read_text()))
    return min(limits)
