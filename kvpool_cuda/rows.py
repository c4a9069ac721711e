# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""All rows of a write, or of a read, in one launch: each is a part with programs of its own.

Of rows that move unchanged, a program moves a tile by units of a row, so that a row's location and
item are computed once for all of its units. Of rows of floats that are quantised into two views,
values and scales, or read back, it takes whole blocks, because a block's largest magnitude decides
its scale; offsets are in elements there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, prod

import torch
import triton
import triton.language as tl

from kvpool.device.torch_ops import ReadRow, WriteRow
from kvpool_cuda import formats
from kvpool_cuda.formats import CODE_IDS, FLOAT_IDS, SCALE_IDS
from kvpool_cuda.launch import (
    WIDEST,
    Dim,
    LaunchPart,
    access_pattern,
    checked,
    columns,
    constants,
    fused,
    on,
    power_of_two,
    words_at,
)

TILE_WORDS = 1024
"""Words that a program of four warps moves at once: four accesses of 16 bytes a lane."""
TILE_FLOATS = 2048
"""Elements that a program of four warps quantises at once: two accesses of 16 bytes a lane."""


def store_rows(rows: Sequence[WriteRow], locations: torch.Tensor) -> None:
    """See Device.store_rows."""
    count = locations.numel()
    for view, values, scales in rows:
        dtype = view.dtype if scales is None else None
        checked("values", view, values, (count, *view.shape[2:]), dtype)
    _launch(rows, locations, loads=False)


def load_rows(rows: Sequence[ReadRow], locations: torch.Tensor) -> list[torch.Tensor]:
    """See Device.load_rows."""
    targets = []
    for view, scales, dtype in rows:
        kind = view.dtype if scales is None else dtype
        values = torch.empty(locations.numel(), *view.shape[2:], dtype=kind, device=view.device)
        targets.append(WriteRow(view, values, scales))
    _launch(targets, locations, loads=True)
    return [row.values for row in targets]


def _launch(rows: Sequence[WriteRow], locations: torch.Tensor, loads: bool) -> None:
    for row in rows:
        checked("locations", row.view, locations, (locations.numel(),), torch.int64)
    parts = [
        _plain(view, values) if scales is None else _scaled(view, scales, values)
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
    constants, strides = _plain_geometry(
        tuple(view.shape),
        values.stride(),
        view.stride(),
        view.element_size(),
        (pointers[0] | pointers[1]) % WIDEST,
    )
    rows, pieces = constants[1], constants[3]
    return LaunchPart(constants, pointers + strides, -(-values.shape[0] // rows) * pieces)


@lru_cache(maxsize=4096)
def _plain_geometry(
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


def _scaled(view: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> LaunchPart:
    """Quantises floats `values` `[N, ..., D]` to e4m3 or int8 `view` `[item, entry, ..., D]` and
    `scales` `[.., S]`, or reads them back. Raises ValueError for other dtypes and shapes.
    """
    supported = values.dtype in FLOAT_IDS, scales.dtype in SCALE_IDS, view.dtype in CODE_IDS
    if not all(supported):
        raise ValueError(
            f"{values.dtype} as {view.dtype} with scales of {scales.dtype}: kernels quantise "
            "floats of 16 bits and more to float8_e4m3fn or int8, with scales of float32, float16 "
            "or float8_e8m0fnu."
        )
    blocks = scales.shape[-1]
    alike = scales.shape[1:-1] == view.shape[1:-1] and scales.device == view.device
    if not alike or view.shape[-1] % blocks:
        raise ValueError(
            f"values {list(view.shape)} on {view.device} with scales {list(scales.shape)} on "
            f"{scales.device}: both must be on one device, and the last axis must be a multiple of "
            "the number of scales."
        )
    pointers = values.data_ptr(), view.data_ptr(), scales.data_ptr()
    constants, strides = _scaled_geometry(
        tuple(view.shape),
        blocks,
        (values.stride(), view.stride(), scales.stride()),
        values.element_size(),
        (FLOAT_IDS[values.dtype], SCALE_IDS[scales.dtype], CODE_IDS[view.dtype]),
        (pointers[0] % WIDEST, pointers[1] % WIDEST),
    )
    programs = -(-values.shape[0] * constants[8] // constants[1])
    return LaunchPart(constants, pointers + strides, programs)


@lru_cache(maxsize=4096)
def _scaled_geometry(
    shape: tuple[int, ...],
    scales: int,
    all_strides: tuple[tuple[int, ...], ...],
    itemsize: int,
    ids: tuple[int, int, int],
    low: tuple[int, int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    value, cell, scale = all_strides
    kind, factor, code = ids
    block = shape[-1] // scales
    outer = zip(shape[2:-1], zip(value[1:-1], cell[2:-1], scale[2:-1]))
    steps = block * value[-1], block * cell[-1], scale[-1]
    dims = [Dim(scales, steps), *(Dim(size, strides) for size, strides in outer)]
    axes = fused(dims) or [Dim(1, steps)]
    value_unit = gcd(WIDEST, low[0], itemsize * value[0], *(itemsize * a.strides[0] for a in axes))
    code_unit = gcd(WIDEST, low[1], cell[0], cell[1], *(axis.strides[1] for axis in axes))
    padded = power_of_two(block)
    per_row = scales * prod(shape[2:-1])
    # the kernels' PART; its first number, of CODE_IDS, marks quantised rows
    tile = max(1, TILE_FLOATS // padded)
    constants = (
        *(code, tile, block, padded, kind, factor, value_unit, code_unit),
        *(per_row, shape[1], itemsize, *(axis.size for axis in axes)),
    )
    # the kernels' arguments after the pointers: strides of rows, items and entries, of elements,
    # and of the axes in each tensor
    rows = value[0], cell[0], cell[1], scale[0], scale[1]
    columns = (axis.strides[tensor] for tensor in range(3) for axis in axes)
    return constants, (*rows, value[-1], cell[-1], *columns)


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
def _places(program, arguments, locations, count, PART: tl.constexpr):
    """Offsets of elements in values and view `[B, D]`, of scales `[B]`, and the masks of both."""
    BLOCKS: tl.constexpr = PART[1]
    BLOCK: tl.constexpr = PART[2]
    PADDED: tl.constexpr = PART[3]
    PER_ROW: tl.constexpr = PART[8]
    ENTRIES: tl.constexpr = PART[9]
    AXES: tl.constexpr = len(PART) - 11
    VALUES_ALIGNED: tl.constexpr = PART[6] // PART[10]
    CODES_ALIGNED: tl.constexpr = PART[7]
    index = program.to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    row = index // PER_ROW
    valid = row < count
    location = tl.load(words_at(locations, 8, 8) + row, mask=valid, other=0)
    item = location // ENTRIES
    entry = location % ENTRIES
    value = row * arguments[3]
    cell = item * arguments[4] + entry * arguments[5]
    scale = item * arguments[6] + entry * arguments[7]
    left = index % PER_ROW
    for axis in tl.static_range(AXES):
        step = left % PART[11 + axis]
        left = left // PART[11 + axis]
        value += step * arguments[10 + axis]
        cell += step * arguments[10 + AXES + axis]
        scale += step * arguments[10 + 2 * AXES + axis]
    element = tl.arange(0, PADDED)
    value = tl.multiple_of(value, VALUES_ALIGNED)[:, None] + (element * arguments[8])[None, :]
    cell = tl.multiple_of(cell, CODES_ALIGNED)[:, None] + (element * arguments[9])[None, :]
    return value, cell, scale, valid[:, None] & (element < BLOCK)[None, :], valid


@triton.jit
def _quantise_part(program, arguments, locations, count, PART: tl.constexpr):
    """Quantises one program's blocks into the view and its scales."""
    CODE: tl.constexpr = PART[0]
    value, cell, scale, inside, valid = _places(program, arguments, locations, count, PART)
    floats = formats.load_floats(arguments[0], value, inside, PART[4], PART[6])
    codes, stored, largest = formats.encode_block(floats, CODE, PART[5])
    if tl.max(largest, axis=0) >= formats.INF:
        # rare: load them again rather than keep them in registers until here
        again = formats.load_floats(arguments[0], value, inside, PART[4], PART[6])
        codes = formats.poison(codes, again, largest, CODE)
    tl.store(words_at(arguments[1], 1, PART[7]) + cell, codes.to(tl.uint8), mask=inside)
    formats.store_scales(arguments[2], scale, stored, valid, PART[5])


@triton.jit
def _dequantise_part(program, arguments, locations, count, PART: tl.constexpr):
    """Dequantises one program's blocks; values beyond the floats become their largest number."""
    value, cell, scale, inside, valid = _places(program, arguments, locations, count, PART)
    codes = tl.load(words_at(arguments[1], 1, PART[7]) + cell, mask=inside, other=0).to(tl.int32)
    factors = formats.load_scales(arguments[2], scale, valid, PART[5])
    floats = formats.decode(codes, PART[0]) * factors[:, None]
    # comparisons with NaN are false, so NaN stays
    largest = formats.largest_of(PART[4])
    floats = tl.where(floats > largest, largest, floats)
    floats = tl.where(floats < -largest, -largest, floats)
    formats.store_floats(arguments[0], value, floats, inside, PART[4], PART[6])


@triton.jit(do_not_specialize=["count"])
def _rows(arguments, locations, count, PARTS: tl.constexpr, LOADS: tl.constexpr):
    program = tl.program_id(0)
    first = 0
    for part in tl.static_range(len(PARTS)):
        # programs that `count` quantised rows take, or plain ones
        if PARTS[part][0]:
            end = first + tl.cdiv(count * PARTS[part][8], PARTS[part][1])
        else:
            end = first + tl.cdiv(count, PARTS[part][1]) * PARTS[part][3]
        if (program >= first) & (program < end):
            if not PARTS[part][0]:
                _move_part(program - first, arguments[part], locations, count, PARTS[part], LOADS)
            elif LOADS:
                _dequantise_part(program - first, arguments[part], locations, count, PARTS[part])
            else:
                _quantise_part(program - first, arguments[part], locations, count, PARTS[part])
        first = end
