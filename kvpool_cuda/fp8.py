# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Block-scaled e4m3 in kernels, bit for bit as `kvpool.quant` defines it.

Floats become e4m3 by one addition and arithmetic on bits, so that hardware and Triton's interpreter
do the same: the interpreter's own conversion is wrong where rounding carries into the exponent
(7.75 becomes 4.0).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KINDS = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
"""Floats that are quantised, as kernels' constants name them."""
INF = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def load_floats(address, offsets, mask, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """float32 of what lies at element `offsets`, 0 where masked."""
    if KIND == 0:
        at = tl.multiple_of(address.to(tl.pointer_type(tl.float64)), ALIGNED) + offsets
        values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    elif KIND == 1:
        at = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), ALIGNED) + offsets
        values = tl.load(at, mask=mask, other=0.0)
    elif KIND == 2:
        at = tl.multiple_of(address.to(tl.pointer_type(tl.float16)), ALIGNED) + offsets
        values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    else:
        at = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), ALIGNED) + offsets
        high = tl.load(at, mask=mask, other=0).to(tl.int32) << 16
        values = high.to(tl.float32, bitcast=True)
    return values


@triton.jit
def store_floats(address, offsets, values, mask, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Writes float32 as the nearest of another kind, ties to even; NaN stays NaN."""
    if KIND == 0:
        at = tl.multiple_of(address.to(tl.pointer_type(tl.float64)), ALIGNED) + offsets
        tl.store(at, values.to(tl.float64), mask=mask)
    elif KIND == 1:
        at = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), ALIGNED) + offsets
        tl.store(at, values, mask=mask)
    elif KIND == 2:
        at = tl.multiple_of(address.to(tl.pointer_type(tl.float16)), ALIGNED) + offsets
        tl.store(at, values.to(tl.float16), mask=mask)
    else:
        at = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), ALIGNED) + offsets
        bits = values.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nearest = tl.where((bits & MAGNITUDE) > INF, 0x7FC0, nearest)
        tl.store(at, nearest.to(tl.int16), mask=mask)


@triton.jit
def encode(values):
    """e4m3 bytes, int32 from 0 to 255, of float32 values of less than 464."""
    bits = values.to(tl.int32, bitcast=True)
    power = tl.maximum(bits & INF, 121 << 23)  # of two, from 2**-6 on: below it steps are the same
    # three bits of the fraction are left where 2**20 times the power is added, rounded to even
    large = power + (20 << 23)
    rounded = tl.abs(values) + large.to(tl.float32, bitcast=True)
    steps = rounded.to(tl.int32, bitcast=True) - large
    return (steps + (power >> 20) - (121 << 3)) | ((bits >> 24) & 0x80)


@triton.jit
def decode(held):
    """float32 values of e4m3 bytes, int32 from 0 to 255."""
    size = held & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    bits = value.to(tl.int32, bitcast=True) | ((held & 0x80) << 24)
    bits = tl.where(size == 0x7F, NAN, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_block(blocks, UE8M0: tl.constexpr):
    """e4m3 bytes `[B, D]`, the bits of scales `[B]` (float32's, or ue8m0's) and of the largest
    magnitudes `[B]` of float32 `[B, D]`. Where that is no number, bytes are still to be poisoned.
    """
    bits = blocks.to(tl.int32, bitcast=True)
    # ordered as integers, magnitudes are ordered as numbers, then infinity, then NaN
    largest = tl.max(bits & MAGNITUDE, axis=1)
    most = tl.full(largest.shape, 448.0, tl.float32)
    factor = tl.div_rn(largest.to(tl.float32, bitcast=True), most)
    # 2**-126, the least scale, has the bits 1 << 23
    scale = tl.maximum(factor.to(tl.int32, bitcast=True), 1 << 23)
    if UE8M0:
        power = (scale >> 23) + ((scale & 0x7FFFFF) != 0).to(tl.int32)
        power = tl.minimum(power, 254)
        reciprocal = ((254 - power) << 23).to(tl.float32, bitcast=True)
        held = encode(blocks * reciprocal[:, None])
        stored = tl.where(largest < INF, power, 255)
    else:
        by = scale.to(tl.float32, bitcast=True)
        held = encode(tl.div_rn(blocks, tl.broadcast_to(by[:, None], blocks.shape)))
        stored = tl.where(largest < INF, scale, NAN)
    return held, stored, largest


@triton.jit
def poison(held, blocks, largest):
    """Bytes of which all are NaN in blocks that hold an infinity or a NaN, which keeps its sign."""
    bits = blocks.to(tl.int32, bitcast=True)
    sign = tl.where((bits & MAGNITUDE) > INF, (bits >> 24) & 0x80, 0)
    return tl.where(largest[:, None] < INF, held, 0x7F | sign)


@triton.jit
def factor_of(stored, UE8M0: tl.constexpr):
    """float32 factors of what `encode_block` gave as the bits of scales, int32."""
    if UE8M0:
        # the least one, 2**-127, is below the normal range
        bits = tl.where(stored == 0, 1 << 22, stored << 23)
        bits = tl.where(stored == 255, NAN, bits)
    else:
        bits = stored
    return bits.to(tl.float32, bitcast=True)
