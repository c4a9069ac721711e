# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Blocks of floats that share a scale: quantised into the entries of two views, and read back.

A program takes whole blocks, so that the largest of each is known before any is written. Offsets
are in elements.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
import triton
import triton.language as tl

from kvpool_cuda.floats import INF, KINDS, largest_of, load_floats, store_floats
from kvpool_cuda.geometry import WIDEST, Axis, divisor, fused, power_of_two
from kvpool_cuda.quantised import (
    CODES,
    SCALES,
    decode,
    encode_block,
    load_scales,
    poison,
    store_scales,
)
from kvpool_cuda.rows import Part
from kvpool_cuda.words import words_at

TILE = 2048
"""Elements that a program of four warps quantises at once: two accesses of 16 bytes a lane."""


def scaled(view: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> Part:
    """Floats `values` `[N, ..., D]` to or from e4m3 or int8 `view` `[item, entry, ..., D]` and its
    `scales` `[item, entry, ..., S]`. Raises ValueError for other dtypes and shapes.
    """
    if values.dtype not in KINDS or scales.dtype not in SCALES or view.dtype not in CODES:
        raise ValueError(
            f"{values.dtype} as {view.dtype} with scales of {scales.dtype}: kernels know floats of "
            "16 bits and more as float8_e4m3fn or int8, with scales of float32, float16 or "
            "float8_e8m0fnu."
        )
    blocks = scales.shape[-1]
    alike = scales.shape[1:-1] == view.shape[1:-1] and scales.device == view.device
    if not alike or view.shape[-1] % blocks:
        raise ValueError(
            f"values {list(view.shape)} on {view.device} with scales {list(scales.shape)} on "
            f"{scales.device}: both must lie on one device, and each last axis must be as many "
            "equal blocks as it has scales."
        )
    addresses = values.data_ptr(), view.data_ptr(), scales.data_ptr()
    constants, strides = _geometry(
        tuple(view.shape),
        blocks,
        (values.stride(), view.stride(), scales.stride()),
        (values.element_size(), KINDS[values.dtype], SCALES[scales.dtype], CODES[view.dtype]),
        (addresses[0] % WIDEST, addresses[1] % WIDEST),
    )
    programs = -(-values.shape[0] * constants[8] // constants[1])
    return Part(constants, addresses + strides, programs)


@lru_cache(maxsize=4096)
def _geometry(
    shape: tuple[int, ...],
    scales: int,
    all_strides: tuple[tuple[int, ...], ...],
    dtypes: tuple[int, int, int, int],
    low: tuple[int, int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    value, held, scale = all_strides
    itemsize, kind, factor, code = dtypes
    block = shape[-1] // scales
    outer = zip(shape[2:-1], zip(value[1:-1], held[2:-1], scale[2:-1]))
    steps = block * value[-1], block * held[-1], scale[-1]
    axes = fused([Axis(scales, steps), *(Axis(*each) for each in outer)]) or [Axis(1, steps)]
    value_unit = divisor((low[0], itemsize * value[0], *(itemsize * a.strides[0] for a in axes)))
    held_unit = divisor((low[1], held[0], held[1], *(axis.strides[1] for axis in axes)))
    padded = power_of_two(block)
    per_row = scales * prod(shape[2:-1])
    # PART of the kernels; the first, of CODES, says that it is one of blocks
    constants = (
        *(code, max(1, TILE // padded), block, padded, kind, factor, value_unit, held_unit),
        *(per_row, shape[1], itemsize, *(axis.size for axis in axes)),
    )
    # `at` of the kernels, behind the addresses: strides of rows, items and entries, of elements,
    # and of the axes in each tensor
    rows = value[0], held[0], held[1], scale[0], scale[1]
    columns = (axis.strides[tensor] for tensor in range(3) for axis in axes)
    return constants, (*rows, value[-1], held[-1], *columns)


@triton.jit
def scaled_programs(count, PART: tl.constexpr):
    """How many programs a part of `count` rows takes."""
    return tl.cdiv(count * PART[8], PART[1])


@triton.jit
def _places(program, at, locations, count, PART: tl.constexpr):
    """Offsets `[B, D]` of elements of values and view, `[B]` of scales; which `[B, D]`, `[B]` are
    there.
    """
    BLOCKS: tl.constexpr = PART[1]
    BLOCK: tl.constexpr = PART[2]
    PADDED: tl.constexpr = PART[3]
    PER_ROW: tl.constexpr = PART[8]
    ENTRIES: tl.constexpr = PART[9]
    AXES: tl.constexpr = len(PART) - 11
    VALUES_ALIGNED: tl.constexpr = PART[6] // PART[10]
    HELD_ALIGNED: tl.constexpr = PART[7]
    index = program.to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    row = index // PER_ROW
    there = row < count
    location = tl.load(words_at(locations, 8, 8) + row, mask=there, other=0)
    item = location // ENTRIES
    entry = location % ENTRIES
    value = row * at[3]
    held = item * at[4] + entry * at[5]
    scale = item * at[6] + entry * at[7]
    left = index % PER_ROW
    for axis in tl.static_range(AXES):
        step = left % PART[11 + axis]
        left = left // PART[11 + axis]
        value += step * at[10 + axis]
        held += step * at[10 + AXES + axis]
        scale += step * at[10 + 2 * AXES + axis]
    element = tl.arange(0, PADDED)
    value = tl.multiple_of(value, VALUES_ALIGNED)[:, None] + (element * at[8])[None, :]
    held = tl.multiple_of(held, HELD_ALIGNED)[:, None] + (element * at[9])[None, :]
    return value, held, scale, there[:, None] & (element < BLOCK)[None, :], there


@triton.jit
def quantise_part(program, at, locations, count, PART: tl.constexpr):
    """One program's blocks, into the view and its scales."""
    CODE: tl.constexpr = PART[0]
    value, held, scale, inside, there = _places(program, at, locations, count, PART)
    floats = load_floats(at[0], value, inside, PART[4], PART[6])
    codes, stored, largest = encode_block(floats, CODE, PART[5])
    if tl.max(largest, axis=0) >= INF:
        # seldom: they are loaded again, so that no register keeps them until here
        again = load_floats(at[0], value, inside, PART[4], PART[6])
        codes = poison(codes, again, largest, CODE)
    tl.store(words_at(at[1], 1, PART[7]) + held, codes.to(tl.uint8), mask=inside)
    store_scales(at[2], scale, stored, there, PART[5])


@triton.jit
def dequantise_part(program, at, locations, count, PART: tl.constexpr):
    """One program's blocks, out of the view and its scales; what is beyond the floats' range is
    their largest number.
    """
    value, held, scale, inside, there = _places(program, at, locations, count, PART)
    codes = tl.load(words_at(at[1], 1, PART[7]) + held, mask=inside, other=0).to(tl.int32)
    factors = load_scales(at[2], scale, there, PART[5])
    floats = decode(codes, PART[0]) * factors[:, None]
    # comparisons with NaN are false: it stays
    largest = largest_of(PART[4])
    floats = tl.where(floats > largest, largest, floats)
    floats = tl.where(floats < -largest, -largest, floats)
    store_floats(at[0], value, floats, inside, PART[4], PART[6])
