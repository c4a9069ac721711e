# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""All rows of a write, or of a read, in one launch: each row is a part of it with its own
programs. Here are rows that move unchanged; a program moves a tile of them by units of a row, so
that a row's location and item are computed once for all of its units.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from kvpool.device.torch_ops import ReadRow, WriteRow
from kvpool_cuda.geometry import WIDEST, Dim, access_pattern, columns
from kvpool_cuda.launch import LaunchPart, checked, constants, on, words_at
from kvpool_cuda.quantised_rows import dequantise_part, quantise_part, scaled, scaled_programs

TILE_WORDS = 1024
"""Words that a program of four warps moves at once: four accesses of 16 bytes a lane."""


def store_rows(rows: Sequence[WriteRow], locations: torch.Tensor) -> None:
    """See Device.store_rows."""
    count = locations.numel()
    for view, values, scales in rows:
        dtype = view.dtype if scales is None else None
        checked("values", view, values, (count, *view.shape[2:]), dtype)
    _launch(rows, locations, loads=False)


def load_rows(rows: Sequence[ReadRow], locations: torch.Tensor) -> list[torch.Tensor]:
    """See Device.load_rows."""
    outputs = []
    for view, scales, dtype in rows:
        kind = view.dtype if scales is None else dtype
        shape = locations.numel(), *view.shape[2:]
        outputs.append(torch.empty(shape, dtype=kind, device=view.device))
    into = [WriteRow(view, out, scales) for (view, scales, _), out in zip(rows, outputs)]
    _launch(into, locations, loads=True)
    return outputs


def _launch(rows: Sequence[WriteRow], locations: torch.Tensor, loads: bool) -> None:
    for row in rows:
        checked("locations", row.view, locations, (locations.numel(),), torch.int64)
    parts = [
        _plain(view, values) if scales is None else scaled(view, scales, values)
        for view, values, scales in rows
    ]
    if not parts or not locations.numel():
        return
    locations = locations.contiguous()
    with on(locations.device):
        _rows[(sum(part.programs for part in parts),)](
            tuple(part.arguments for part in parts),
            locations.data_ptr(),
            locations.numel(),
            constants(*(part.constants for part in parts)),
            loads,
        )


def _plain(view: torch.Tensor, values: torch.Tensor) -> LaunchPart:
    """Moves `values` `[N, ...]` to or from `view` `[item, entry, ...]` of the same dtype."""
    pointers = values.data_ptr(), view.data_ptr()
    constants, strides = _geometry(
        tuple(view.shape),
        values.stride(),
        view.stride(),
        view.element_size(),
        (pointers[0] | pointers[1]) % WIDEST,
    )
    rows, pieces = constants[1], constants[3]
    return LaunchPart(constants, pointers + strides, -(-values.shape[0] // rows) * pieces)


@lru_cache(maxsize=4096)
def _geometry(
    shape: tuple[int, ...],
    value_strides: tuple[int, ...],
    view_strides: tuple[int, ...],
    itemsize: int,
    low: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    value, view = ([s * itemsize for s in strides] for strides in (value_strides, view_strides))
    axes = [Dim(size, strides) for size, strides in zip(shape[2:], zip(value[1:], view[2:]))]
    axes = axes or [Dim(1, (itemsize, itemsize))]  # an entry is one element
    path = access_pattern(axes, itemsize, (low, value[0], view[0], view[1]))
    word = min(path.unit, 8)
    lanes = path.unit // word
    cols = columns(path.units, TILE_WORDS // lanes)
    rows = TILE_WORDS // (cols * lanes)
    pieces = -(-path.units // cols)
    # the kernel's arguments after the pointers: strides of rows, items and entries, then of the
    # axes in each tensor; and PART, whose first number 0 marks plain rows
    strides = (value[0] // path.unit, view[0] // path.unit, view[1] // path.unit)
    constants = (0, rows, cols, pieces, path.unit, word, shape[1], path.units, *path.sizes)
    return constants, (*strides, *path.strides[0], *path.strides[1])


@triton.jit
def _plain_programs(count, PART: tl.constexpr):
    """How many programs `count` rows take."""
    return tl.cdiv(count, PART[1]) * PART[3]


@triton.jit
def _move_part(program, arguments, locations, count, PART: tl.constexpr, LOADS: tl.constexpr):
    """Moves one program's rows to the view, or with `LOADS` from it."""
    ROWS: tl.constexpr = PART[1]
    COLS: tl.constexpr = PART[2]
    PIECES: tl.constexpr = PART[3]
    UNIT: tl.constexpr = PART[4]
    WORD: tl.constexpr = PART[5]
    ENTRIES: tl.constexpr = PART[6]
    UNITS: tl.constexpr = PART[7]
    AXES: tl.constexpr = len(PART) - 8
    LANES: tl.constexpr = UNIT // WORD
    row = (program // PIECES).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < count
    location = tl.load(words_at(locations, 8, 8) + row, mask=valid, other=0)
    word = tl.arange(0, COLS * LANES)
    unit = (program % PIECES) * COLS + word // LANES
    left = unit
    value_unit = tl.zeros_like(unit).to(tl.int64)
    view_unit = tl.zeros_like(unit).to(tl.int64)
    for axis in tl.static_range(AXES):
        step = (left % PART[8 + axis]).to(tl.int64)
        left = left // PART[8 + axis]
        value_unit += step * arguments[5 + axis]
        view_unit += step * arguments[5 + AXES + axis]
    view_row = (location // ENTRIES) * arguments[3] + (location % ENTRIES) * arguments[4]
    lane = (word % LANES)[None, :]
    value = words_at(arguments[0], WORD, UNIT) + (
        (row * arguments[2] * LANES)[:, None] + (value_unit * LANES)[None, :] + lane
    )
    view = words_at(arguments[1], WORD, UNIT) + (
        (view_row * LANES)[:, None] + (view_unit * LANES)[None, :] + lane
    )
    mask = valid[:, None] & (unit < UNITS)[None, :]
    if LOADS:
        tl.store(value, tl.load(view, mask=mask), mask=mask)
    else:
        tl.store(view, tl.load(value, mask=mask), mask=mask)


@triton.jit
def _programs(count, PART: tl.constexpr):
    if PART[0]:
        programs = scaled_programs(count, PART)
    else:
        programs = _plain_programs(count, PART)
    return programs


@triton.jit(do_not_specialize=["count"])
def _rows(arguments, locations, count, PARTS: tl.constexpr, LOADS: tl.constexpr):
    program = tl.program_id(0)
    first = 0
    for part in tl.static_range(len(PARTS)):
        end = first + _programs(count, PARTS[part])
        if (program >= first) & (program < end):
            if not PARTS[part][0]:
                _move_part(program - first, arguments[part], locations, count, PARTS[part], LOADS)
            elif LOADS:
                dequantise_part(program - first, arguments[part], locations, count, PARTS[part])
            else:
                quantise_part(program - first, arguments[part], locations, count, PARTS[part])
        first = end
