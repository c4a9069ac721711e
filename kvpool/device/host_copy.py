"""Copies of many runs of host memory: by one compiled call (`kvpool._native`), else one a run."""

from __future__ import annotations

import ctypes

from kvpool import _native
from kvpool.layout.grid import Ints


def copy_runs(src: Ints, dst: Ints, nbytes: Ints) -> None:
    """Copies `nbytes` bytes from each pointer `src` to each pointer `dst`, `[N]`."""
    if _native.copy(src, dst, nbytes):
        return
    for source, dest, size in zip(src.tolist(), dst.tolist(), nbytes.tolist()):
        ctypes.memmove(dest, source, size)
