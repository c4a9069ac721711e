# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Block-scaled e4m3 and int8 in kernels, bit for bit as `kvpool.device.quant` defines them.

Floats become codes by one addition and arithmetic on bits, so that hardware and Triton's
interpreter do the same: the interpreter's own conversion to e4m3 is wrong where rounding carries
into the exponent (7.75 becomes 4.0).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvpool_cuda.floats import INF, MAGNITUDE, NAN
from kvpool_cuda.words import words_at

CODES = {torch.float8_e4m3fn: 1, torch.int8: 2}
"""What floats become, as kernels' constants name it."""
SCALES = {torch.float32: 0, torch.float8_e8m0fnu: 1, torch.float16: 2}
"""What scales are stored as."""


@triton.jit
def encode_e4m3(values):
    """e4m3 bytes, int32 from 0 to 255, of float32 values of less than 464."""
    bits = values.to(tl.int32, bitcast=True)
    power = tl.maximum(bits & INF, 121 << 23)  # of two, from 2**-6 on: below it steps are the same
    # three bits of the fraction are left where 2**20 times the power is added, rounded to even
    large = power + (20 << 23)
    rounded = tl.abs(values) + large.to(tl.float32, bitcast=True)
    steps = rounded.to(tl.int32, bitcast=True) - large
    return (steps + (power >> 20) - (121 << 3)) | ((bits >> 24) & 0x80)


@triton.jit
def decode_e4m3(held):
    """float32 values of e4m3 bytes, int32 from 0 to 255."""
    size = held & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    bits = value.to(tl.int32, bitcast=True) | ((held & 0x80) << 24)
    bits = tl.where(size == 0x7F, NAN, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode(values, CODE: tl.constexpr):
    """Bytes, int32 from 0 to 255, of float32 values up to little more than the largest code."""
    if CODE == 1:
        codes = encode_e4m3(values)
    else:
        # beside 3 * 2**22 no fraction is left, and the low byte is the number
        codes = (values + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
    return codes


@triton.jit
def decode(held, CODE: tl.constexpr):
    """float32 values of bytes, int32 from 0 to 255."""
    if CODE == 1:
        values = decode_e4m3(held)
    else:
        values = ((held ^ 0x80) - 0x80).to(tl.float32)
    return values


@triton.jit
def encode_block(blocks, CODE: tl.constexpr, SCALE: tl.constexpr):
    """Bytes of float32 `[B, D]`, int32; the bits of scales `[B]`, as they are stored, and of the
    largest magnitudes `[B]`. Where that is no number, bytes are still to be poisoned.
    """
    bits = blocks.to(tl.int32, bitcast=True)
    # ordered as integers, magnitudes are ordered as numbers, then infinity, then NaN
    largest = tl.max(bits & MAGNITUDE, axis=1)
    MOST: tl.constexpr = 448.0 if CODE == 1 else 127.0
    most = tl.full(largest.shape, MOST, tl.float32)
    factor = tl.div_rn(largest.to(tl.float32, bitcast=True), most)
    # 2**-126, the least scale, has the bits 1 << 23
    scale = tl.maximum(factor.to(tl.int32, bitcast=True), 1 << 23)
    if SCALE == 1:
        power = (scale >> 23) + ((scale & 0x7FFFFF) != 0).to(tl.int32)
        power = tl.minimum(power, 254)
        reciprocal = ((254 - power) << 23).to(tl.float32, bitcast=True)
        held = encode(blocks * reciprocal[:, None], CODE)
        stored = tl.where(largest < INF, power, 255)
    else:
        by = scale.to(tl.float32, bitcast=True)
        held = encode(tl.div_rn(blocks, tl.broadcast_to(by[:, None], blocks.shape)), CODE)
        if SCALE == 0:
            stored = tl.where(largest < INF, scale, NAN)
        else:
            half = by.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
            stored = tl.where((largest < INF) & (half < 0x7C00), half, 0x7E00)
    return held, stored, largest


@triton.jit
def poison(held, blocks, largest, CODE: tl.constexpr):
    """Bytes of blocks that hold an infinity or a NaN: NaN, which keeps its sign; of int8 0."""
    if CODE == 1:
        bits = blocks.to(tl.int32, bitcast=True)
        lost = 0x7F | tl.where((bits & MAGNITUDE) > INF, (bits >> 24) & 0x80, 0)
    else:
        lost = tl.zeros_like(held)
    return tl.where(largest[:, None] < INF, held, lost)


@triton.jit
def store_scales(address, offsets, stored, mask, SCALE: tl.constexpr):
    """Writes what `encode_block` gave as the bits of scales."""
    if SCALE == 0:
        tl.store(words_at(address, 4, 4) + offsets, stored, mask=mask)
    elif SCALE == 1:
        tl.store(words_at(address, 1, 1) + offsets, stored.to(tl.uint8), mask=mask)
    else:
        tl.store(words_at(address, 2, 2) + offsets, stored.to(tl.int16), mask=mask)


@triton.jit
def load_scales(address, offsets, mask, SCALE: tl.constexpr):
    """float32 of scales."""
    if SCALE == 0:
        bits = tl.load(words_at(address, 4, 4) + offsets, mask=mask, other=0)
        scales = bits.to(tl.float32, bitcast=True)
    elif SCALE == 1:
        power = tl.load(words_at(address, 1, 1) + offsets, mask=mask, other=0).to(tl.int32)
        # the least one, 2**-127, is below the normal range
        bits = tl.where(power == 0, 1 << 22, power << 23)
        scales = tl.where(power == 255, NAN, bits).to(tl.float32, bitcast=True)
    else:
        half = tl.load(words_at(address, 2, 2) + offsets, mask=mask, other=0)
        scales = half.to(tl.float16, bitcast=True).to(tl.float32)
    return scales
