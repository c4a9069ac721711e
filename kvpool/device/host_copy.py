"""Copies of many runs of host memory: one compiled call (`kvpool._native`).

Where that was not compiled, a large run is one `memcpy`, and small runs are grouped by length; each
group is gathered into a buffer that fits the cache and scattered from there, the fastest way
measured without a compiled loop (docs/engines.md).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kvpool import _native
from kvpool.layout.grid import Ints

LARGE = 16 << 10
"""From this length on, one call per run is cheaper than a second pass through the cache."""
CACHE_BYTES = 256 << 10

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None


def copy_runs(src: Ints, dst: Ints, nbytes: Ints) -> None:
    """Copies `nbytes` bytes from each pointer `src` to each pointer `dst`, `[N]`."""
    if _native.copy(src, dst, nbytes):
        return
    large = nbytes >= LARGE
    if large.any():
        for run in zip(dst[large].tolist(), src[large].tolist(), nbytes[large].tolist()):
            _memcpy(*run)
    small = np.flatnonzero(~large & (nbytes > 0))
    if not small.size:
        return
    small = small[np.argsort(nbytes[small], kind="stable")]
    lengths = nbytes[small]
    edges = np.flatnonzero(np.diff(lengths)) + 1
    for group in np.split(small, edges):
        _copy_equal(src[group], dst[group], int(nbytes[group[0]]))


def _copy_equal(src: Ints, dst: Ints, width: int) -> None:
    """Copies runs of one length."""
    from_rows, from_index = _rows(src, width)
    to_rows, to_index = _rows(dst, width)
    step = max(1, CACHE_BYTES // width)
    for start in range(0, src.size, step):
        part = slice(start, start + step)
        to_rows[to_index[part]] = from_rows[from_index[part]]


def _rows(pointers: Ints, width: int) -> tuple[Any, Ints]:
    """Memory as overlapping rows of `width` bytes, and the indices of the rows at `pointers`."""
    base = int(pointers.min())
    offsets = pointers - base
    step = int(np.gcd.reduce(offsets)) or width
    count = int(offsets.max()) // step + 1
    memory: Any = (ctypes.c_ubyte * ((count - 1) * step + width)).from_address(base)
    rows: Any = np.ndarray((count,), dtype=f"V{width}", buffer=memory, strides=(step,))
    return rows, offsets // step
