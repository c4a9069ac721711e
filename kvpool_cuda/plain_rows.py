# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Rows that move unchanged between a tensor `[N, ...]` and the entries of a view.

A program moves a tile of rows by units of a row, so that a row's location and item are computed
once for all of its units.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvpool_cuda.geometry import WIDEST, Dim, access_pattern, columns
from kvpool_cuda.memory import words_at

TILE_WORDS = 1024
"""Words that a program of four warps moves at once: four accesses of 16 bytes a lane."""


class LaunchPart(NamedTuple):
    """One row of a launch: the kernel's constants and arguments, and how many programs it takes."""

    constants: tuple[int, ...]
    arguments: tuple[int, ...]
    programs: int


def plain(view: torch.Tensor, values: torch.Tensor) -> LaunchPart:
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
def plain_programs(count, PART: tl.constexpr):
    """How many programs `count` rows take."""
    return tl.cdiv(count, PART[1]) * PART[3]


@triton.jit
def move_part(program, arguments, locations, count, PART: tl.constexpr, LOADS: tl.constexpr):
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
