"""Rows of one format that are stored in another, both in host memory: one compiled call
(`kvpool/_native/convert.c`), in as many threads as torch uses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch

from kvpool import _native
from kvpool.device.host_rows import FLOATS, QUICK_BYTES, Role, Sizes, Strided, shape_of
from kvpool.device.rows_at import ScaledRowsAt
from kvpool.layout.grid import Ints

PLAIN = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3, torch.float8_e4m3fn: 5}
"""Types without scales, by the numbers that convert.c knows them by."""


class ConvertedRole(ctypes.Structure):
    """`conversion_t`: rows as they are and as they will be, the elements of one, and the floats in
    between.
    """

    _fields_ = (
        *(("source", Role), ("dest", Role), ("elements", ctypes.c_int64)),
        *(("loaded", ctypes.c_int32), ("stored", ctypes.c_int32)),
    )


def convert_rows(
    pairs: Sequence[tuple[ScaledRowsAt, ScaledRowsAt]], read: Ints, write: Ints
) -> bool:
    """See Converting.convert_rows."""
    library = _native._library()
    if library is None:
        return False
    conversions = []
    for source, dest in pairs:
        shape = _shape(
            *(None if rows is None else rows[:1] + rows[2:] for rows in (*source, *dest))
        )
        if shape is None:
            return False
        conversion = ConvertedRole.from_buffer_copy(shape[0])
        for role, (rows, scales) in ((conversion.source, source), (conversion.dest, dest)):
            role.held, role.scales = rows.base, scales.base if scales else None
        conversions.append(conversion)
    row_bytes = sum(part.source.row_bytes + part.dest.row_bytes for part in conversions)
    call = (library.quick if read.size * row_bytes < QUICK_BYTES else library.slow).kvpool_convert
    locations = [np.ascontiguousarray(numbers, dtype=np.int64) for numbers in (read, write)]
    array = (ConvertedRole * len(conversions))(*conversions)
    pointers = (numbers.ctypes.data for numbers in locations)
    return bool(call(array, len(conversions), *pointers, read.size, torch.get_num_threads()))


Shape = tuple[str, Sizes, Sizes]
"""Rows without their pointer."""


@lru_cache(maxsize=4096)
def _shape(
    source: Shape, source_scales: Shape | None, dest: Shape, dest_scales: Shape | None
) -> tuple[ConvertedRole, Any] | None:
    """A conversion without pointers, and what must be kept as long; None if the library has none
    of the kind.
    """
    loaded = torch.float32 if source_scales else getattr(torch, source[0])
    stored = getattr(torch, dest[0])
    if dest_scales:
        stored = loaded if loaded in FLOATS else torch.float32
    from_role, to_role = _role(source, source_scales, loaded), _role(dest, dest_scales, stored)
    if from_role is None or to_role is None or not {loaded, stored} <= PLAIN.keys():
        return None
    conversion = ConvertedRole(
        source=from_role[0],
        dest=to_role[0],
        elements=prod(source[1][2:]),
        loaded=PLAIN[loaded],
        stored=PLAIN[stored],
    )
    return conversion, (from_role, to_role)


def _role(rows: Shape, scales: Shape | None, floats: torch.dtype) -> tuple[Role, Any] | None:
    """The role of rows that are loaded or stored as `floats`, one after the other."""
    sizes = rows[1][1:]
    dense = tuple(prod(sizes[axis:]) for axis in range(1, len(sizes) + 1))
    return shape_of(_strided(rows), dense, floats, None if scales is None else _strided(scales))


def _strided(rows: Shape) -> Strided:
    dtype, sizes, strides = rows
    kind = getattr(torch, dtype)
    if any(stride % kind.itemsize for stride in strides):
        raise ValueError(f"rows of {dtype} that do not lie at multiples of {kind.itemsize} bytes.")
    return sizes, tuple(stride // kind.itemsize for stride in strides), kind
