"""Rows that are stored and loaded outside Python: `rows.c`, one call for all roles."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from kvpool import _native

AS_STORED, BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = range(5)
E4M3, INT8 = range(2)
SCALE_FLOAT32, SCALE_FLOAT16, SCALE_E8M0 = range(3)
QUICK_BYTES = 64 << 10
"""Fewer bytes take microseconds, and the GIL is kept: a busy thread would give it back later."""


class Role(ctypes.Structure):
    """`role_t`: strides and widths in bytes, but the width of quantised cells, which is in
    elements. `cells` points to int64 `[count, 3]`: offsets in bytes of a cell in an entry and in a
    row of values, and of its scale in an entry of scales.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("held", "scales", "given", "cells")),
        *((name, ctypes.c_int64) for name in ("count", "width", "items", "entries")),
        *((name, ctypes.c_int64) for name in ("held_item", "held_entry")),
        *((name, ctypes.c_int64) for name in ("scale_item", "scale_entry", "given_row")),
        ("row_bytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("floats", "codes", "scale", "given_size")),
    )


def move(roles: Sequence[Role], locations: int, count: int, *, store: bool, threads: int) -> bool:
    """Stores or loads `roles` at the `count` int64 locations that pointer `locations` points to.
    False, and nothing is done, where that is not available or a location lies outside.
    """
    library = _native._library()
    if library is None:
        return False
    small = count * sum(role.row_bytes for role in roles) < QUICK_BYTES
    call = (library.quick if small else library.slow).kvpool_rows
    return bool(call((Role * len(roles))(*roles), len(roles), locations, count, store, threads))
