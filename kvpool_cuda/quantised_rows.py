# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Rows of floats that are quantised into the entries of two views, values and scales, and read
back.

A program takes whole blocks, because a block's largest magnitude decides its scale. Offsets are in
elements.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
import triton
import triton.language as tl

from kvpool_cuda.formats import (
    CODE_IDS,
    FLOAT_IDS,
    INF,
    SCALE_IDS,
    decode,
    encode_block,
    largest_of,
    load_floats,
    load_scales,
    poison,
    store_floats,
    store_scales,
)
from kvpool_cuda.geometry import WIDEST, Dim, divisor, fused, power_of_two
from kvpool_cuda.launch import LaunchPart, words_at

TILE_FLOATS = 2048
"""Elements that a program of four warps quantises at once: two accesses of 16 bytes a lane."""


def scaled(view: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> LaunchPart:
    """Quantises floats `values` `[N, ..., D]` to e4m3 or int8 `view` `[item, entry, ..., D]` and
    its `scales` `[item, entry, ..., S]`, or reads them back. Raises ValueError for other dtypes and
    shapes.
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
    constants, strides = _geometry(
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
def _geometry(
    shape: tuple[int, ...],
    scales: int,
    all_strides: tuple[tuple[int, ...], ...],
    itemsize: int,
    formats: tuple[int, int, int],
    low: tuple[int, int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    value, cell, scale = all_strides
    kind, factor, code = formats
    block = shape[-1] // scales
    outer = zip(shape[2:-1], zip(value[1:-1], cell[2:-1], scale[2:-1]))
    steps = block * value[-1], block * cell[-1], scale[-1]
    dims = [Dim(scales, steps), *(Dim(size, strides) for size, strides in outer)]
    axes = fused(dims) or [Dim(1, steps)]
    value_unit = divisor((low[0], itemsize * value[0], *(itemsize * a.strides[0] for a in axes)))
    code_unit = divisor((low[1], cell[0], cell[1], *(axis.strides[1] for axis in axes)))
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
def scaled_programs(count, PART: tl.constexpr):
    """How many programs `count` rows take."""
    return tl.cdiv(count * PART[8], PART[1])


@triton.jit
def _places(program, arguments, locations, count, PART: tl.constexpr):
    """Offsets of elements in values and view `[B, D]` and of scales `[B]`, and the masks of
    both.
    """
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
def quantise_part(program, arguments, locations, count, PART: tl.constexpr):
    """Quantises one program's blocks into the view and its scales."""
    CODE: tl.constexpr = PART[0]
    value, cell, scale, inside, valid = _places(program, arguments, locations, count, PART)
    floats = load_floats(arguments[0], value, inside, PART[4], PART[6])
    codes, stored, largest = encode_block(floats, CODE, PART[5])
    if tl.max(largest, axis=0) >= INF:
        # rare: load them again rather than keep them in registers until here
        again = load_floats(arguments[0], value, inside, PART[4], PART[6])
        codes = poison(codes, again, largest, CODE)
    tl.store(words_at(arguments[1], 1, PART[7]) + cell, codes.to(tl.uint8), mask=inside)
    store_scales(arguments[2], scale, stored, valid, PART[5])


@triton.jit
def dequantise_part(program, arguments, locations, count, PART: tl.constexpr):
    """Dequantises one program's blocks; values beyond the range of the floats become their largest
    number.
    """
    value, cell, scale, inside, valid = _places(program, arguments, locations, count, PART)
    codes = tl.load(words_at(arguments[1], 1, PART[7]) + cell, mask=inside, other=0).to(tl.int32)
    factors = load_scales(arguments[2], scale, valid, PART[5])
    floats = decode(codes, PART[0]) * factors[:, None]
    # comparisons with NaN are false, so NaN stays
    largest = largest_of(PART[4])
    floats = tl.where(floats > largest, largest, floats)
    floats = tl.where(floats < -largest, -largest, floats)
    store_floats(arguments[0], value, floats, inside, PART[4], PART[6])
