"""Host memory in sealed files, which other processes can map (Linux). Needs no torch."""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from typing import NamedTuple

import numpy as np

MADV_POPULATE_WRITE = 23


class SharedFile(NamedTuple):
    """Memory of this process that is all of an open file."""

    base: int
    nbytes: int
    handle: int


_files: dict[int, SharedFile] = {}


def allocate(nbytes: int) -> mmap.mmap:
    """Zeroed memory in a file of its own; both live as long as the mapping. Raises
    OSError, ValueError or OverflowError.
    """
    import fcntl

    handle = os.memfd_create("kvpool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(handle, nbytes)
        # the size is sealed, so that a reader cannot fault beyond the end
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, seals)
        memory = mmap.mmap(handle, nbytes, mmap.MAP_SHARED)
    except BaseException:
        os.close(handle)
        raise
    # large pages where the kernel gives them (`shmem_enabled`), and all of them now rather than one
    # by one in the first transfer; to older kernels (before 5.14) the last is unknown
    for advice in (mmap.MADV_HUGEPAGE, MADV_POPULATE_WRITE):
        with suppress(OSError):
            memory.madvise(advice)
    base = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    file = _files[base] = SharedFile(base, nbytes, handle)
    weakref.finalize(memory, _forget, file)
    return memory


def files_between(start: int, end: int) -> list[SharedFile]:
    """The files that have memory between two pointers, by pointer."""
    files = list(_files.values())  # other threads may allocate
    return sorted(file for file in files if file.base < end and file.base + file.nbytes > start)


def _forget(file: SharedFile) -> None:
    if _files.get(file.base) is file:  # unmapped already: another may lie there by now
        del _files[file.base]
    os.close(file.handle)
