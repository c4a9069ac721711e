"""Stores and loads of rows in host memory: one compiled call for all roles
(`kvpool/_native/rows.c`), in as many threads as torch uses.

A row is a list of cells: bytes that are contiguous on both sides, or a block with its scale. Other
rows are done in plain torch (`torch_ops`), and all rows if nothing was compiled. Locations that
lie outside go to torch too, which refuses them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np
import torch

from kvpool import _native
from kvpool.device import torch_ops
from kvpool.device.torch_ops import ReadRow, WriteRow
from kvpool.layout.grid import Ints

# by the numbers that rows.c knows them by
FLOATS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3, torch.float64: 4}
CODES = {torch.float8_e4m3fn: 0, torch.int8: 1}
SCALES = {torch.float32: 0, torch.float16: 1, torch.float8_e8m0fnu: 2}
QUICK_BYTES = 64 << 10
"""Fewer bytes take microseconds, and the GIL is kept: a busy thread would give it back later."""
MOST_CELLS = 1024
"""Of a row; torch copies smaller ones faster."""


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


def store_rows(rows: Sequence[WriteRow], locations: torch.Tensor) -> None:
    """See Device.store_rows."""
    if not _move(rows, locations, store=True):
        torch_ops.store_rows(rows, locations)


def load_rows(rows: Sequence[ReadRow], locations: torch.Tensor) -> list[torch.Tensor]:
    """See Device.load_rows."""
    targets = []
    for view, scales, dtype in rows:
        shape = locations.numel(), *view.shape[2:]
        values = view.new_empty(shape, dtype=view.dtype if scales is None else dtype)
        targets.append(WriteRow(view, values, scales))
    if _move(targets, locations, store=False):
        return [row.values for row in targets]
    return torch_ops.load_rows(rows, locations)


def _move(rows: Sequence[WriteRow], locations: torch.Tensor, *, store: bool) -> bool:
    """Writes values to views, or views to values; False if C cannot: then nothing was done."""
    count = locations.numel()
    on_host = locations.dtype is torch.int64 and _on_host(locations)
    library = _native._library()
    if not count or not on_host or library is None:
        return False
    locations, roles, keep = locations.contiguous(), [], []
    for row in rows:
        if not _on_host(*row) or row.values.shape != (count, *row.view.shape[2:]):
            return False
        # values in the view's memory must be read before anything is written
        storages = {part.untyped_storage().data_ptr() for part in (row.view, row.values)}
        if len(storages) < 2 or not row.values.numel():
            return False
        values = row.values if row.values.stride(-1) == 1 else row.values.contiguous()
        scales = None if row.scales is None else _strided(row.scales)
        shape = shape_of(_strided(row.view), values.stride(), values.dtype, scales)
        if shape is None:
            return False
        role = Role.from_buffer_copy(shape[0])
        role.held, role.given = row.view.data_ptr(), values.data_ptr()
        role.scales = None if row.scales is None else row.scales.data_ptr()
        roles.append(role)
        keep.append((shape, values))
    small = count * sum(role.row_bytes for role in roles) < QUICK_BYTES
    call = (library.quick if small else library.slow).kvpool_rows
    pointer, threads = locations.data_ptr(), torch.get_num_threads()
    return bool(call((Role * len(roles))(*roles), len(roles), pointer, count, store, threads))


def _on_host(*tensors: torch.Tensor | None) -> bool:
    """Whether their bytes are at their pointers."""
    return all(
        tensor is None
        or (tensor.device.type == "cpu" and type(tensor) is torch.Tensor and not tensor.is_neg())
        for tensor in tensors
    )


Sizes = tuple[int, ...]
Strided = tuple[Sizes, Sizes, torch.dtype]


def _strided(tensor: torch.Tensor) -> Strided:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


@lru_cache(maxsize=4096)
def shape_of(
    view: Strided, strides_of_values: Sizes, floats: torch.dtype, scales: Strided | None
) -> tuple[Role, Ints] | None:
    """A role without the pointers of its tensors, by its view, the strides and dtype of its values,
    and its scales; and its cells, `[count, 3]`. None if the library has no such role.
    """
    sizes, strides_of_view, kind = view
    if len(sizes) < 3 or strides_of_view[-1] != 1:
        return None
    itemsize, step = kind.itemsize, floats.itemsize
    role = Role(
        items=sizes[0],
        entries=sizes[1],
        held_item=itemsize * strides_of_view[0],
        held_entry=itemsize * strides_of_view[1],
        given_row=step * strides_of_values[0],
        row_bytes=(itemsize + step) * prod(sizes[2:]),
    )
    inner = slice(2, -1)
    # steps of each axis in bytes: in an entry, in a row of values, in an entry of scales
    if scales is None:
        if kind is not floats:
            return None
        role.given_size, role.width = 1, itemsize * sizes[-1]
        by = zip(strides_of_view[inner], strides_of_values[1:-1])
        axes = [(size, itemsize * a, step * b, 0) for size, (a, b) in zip(sizes[inner], by)]
        while axes and axes[-1][1] == axes[-1][2] == role.width:  # contiguous on both sides
            role.width *= axes.pop()[0]
    else:
        counts, strides, scale = scales
        blocks, size = counts[-1], scale.itemsize
        alike = counts[:-1] == sizes[:-1] and blocks and sizes[-1] % blocks == 0
        if not alike or floats not in FLOATS or kind not in CODES or scale not in SCALES:
            return None
        role.given_size, role.width = step, sizes[-1] // blocks
        role.floats, role.codes, role.scale = FLOATS[floats], CODES[kind], SCALES[scale]
        role.scale_item, role.scale_entry = size * strides[0], size * strides[1]
        steps = zip(sizes[inner], strides_of_view[inner], strides_of_values[1:-1], strides[inner])
        axes = [(count, a, step * b, size * c) for count, a, b, c in steps]
        axes.append((blocks, role.width, step * role.width, size * strides[-1]))
    if prod(axis[0] for axis in axes) > MOST_CELLS:
        return None
    cells = np.zeros((1, 3), dtype=np.int64)
    for count, *step_bytes in axes:
        cells = (cells[:, None] + np.arange(count)[:, None] * np.array(step_bytes)).reshape(-1, 3)
    role.cells, role.count = cells.ctypes.data, len(cells)
    return role, cells
