# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Number formats in kernels: floats as float32, and block-scaled e4m3 and int8, bit for bit as
`kvpool.device.quant` defines them.

Floats are encoded by one addition and integer arithmetic, so that hardware and the interpreter
agree: its own conversion to e4m3 is wrong where rounding carries into the exponent (7.75: 4.0).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvpool_cuda.launch import words_at

FLOAT_IDS = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
"""Floats that can be quantised, by the constant that kernels know them by."""
CODE_IDS = {torch.float8_e4m3fn: 1, torch.int8: 2}
"""What they are quantised to."""
SCALE_IDS = {torch.float32: 0, torch.float8_e8m0fnu: 1, torch.float16: 2}
"""What scales are stored as."""
INF = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _floats_at(address, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to floats; to bfloat16 as int16, which is converted here."""
    address = address.to(tl.int64)  # as in words_at
    if KIND == 0:
        pointer = address.to(tl.pointer_type(tl.float64))
    elif KIND == 1:
        pointer = address.to(tl.pointer_type(tl.float32))
    elif KIND == 2:
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.int16))
    return tl.multiple_of(pointer, ALIGNED)


@triton.jit
def load_floats(address, offsets, mask, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """float32 values of the elements at `offsets`, 0 where masked."""
    values = tl.load(_floats_at(address, KIND, ALIGNED) + offsets, mask=mask, other=0)
    if KIND == 3:
        floats = (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        floats = values.to(tl.float32)
    return floats


@triton.jit
def store_floats(address, offsets, values, mask, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Stores float32 values as another float format, ties to even; NaN stays NaN."""
    pointers = _floats_at(address, KIND, ALIGNED) + offsets
    if KIND == 3:
        bits = values.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        floats = tl.where((bits & MAGNITUDE) > INF, 0x7FC0, nearest).to(tl.int16)
    else:
        floats = values.to(pointers.dtype.element_ty)
    tl.store(pointers, floats, mask=mask)


@triton.jit
def largest_of(KIND: tl.constexpr):
    """The largest finite number of a float format that float32 can hold, as float32."""
    # 65504 of float16, then bfloat16's
    BITS: tl.constexpr = 0x477FE000 if KIND == 2 else (0x7F7F0000 if KIND == 3 else 0x7F7FFFFF)
    return tl.full([], BITS, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def encode(values, CODE: tl.constexpr):
    """Bytes, as int32 from 0 to 255, of float32 values up to just above the largest code: those of
    e4m3 below 464.
    """
    if CODE == 1:
        bits = values.to(tl.int32, bitcast=True)
        # a power of two, at least 2**-6: below it steps are equal
        power = tl.maximum(bits & INF, 121 << 23)
        # adding 2**20 times the power leaves three bits of fraction, rounded to even
        large = power + (20 << 23)
        rounded = tl.abs(values) + large.to(tl.float32, bitcast=True)
        steps = rounded.to(tl.int32, bitcast=True) - large
        codes = (steps + (power >> 20) - (121 << 3)) | ((bits >> 24) & 0x80)
    else:
        # adding 3 * 2**22 leaves no fraction, and the low byte is the number
        codes = (values + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
    return codes


@triton.jit
def decode(codes, CODE: tl.constexpr):
    """float32 values of bytes, int32 from 0 to 255."""
    if CODE == 1:
        size = codes & 0x7F
        normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
        bits = value.to(tl.int32, bitcast=True) | ((codes & 0x80) << 24)
        values = tl.where(size == 0x7F, NAN, bits).to(tl.float32, bitcast=True)
    else:
        values = ((codes ^ 0x80) - 0x80).to(tl.float32)
    return values


@triton.jit
def encode_block(blocks, CODE: tl.constexpr, SCALE: tl.constexpr):
    """Quantises float32 blocks `[B, D]`: their bytes as int32, the bits of the scales `[B]` as they
    are stored, and the bits of the largest magnitudes `[B]`. A block whose largest magnitude is not
    finite must still go through `poison`.
    """
    bits = blocks.to(tl.int32, bitcast=True)
    # as integers, magnitudes sort as numbers, then infinity, then NaN
    largest = tl.max(bits & MAGNITUDE, axis=1)
    LARGEST: tl.constexpr = 448.0 if CODE == 1 else 127.0
    divisor = tl.full(largest.shape, LARGEST, tl.float32)
    factor = tl.div_rn(largest.to(tl.float32, bitcast=True), divisor)
    # the smallest scale, 2**-126, has the bits 1 << 23
    scale = tl.maximum(factor.to(tl.int32, bitcast=True), 1 << 23)
    if SCALE == 1:
        power = (scale >> 23) + ((scale & 0x7FFFFF) != 0).to(tl.int32)
        power = tl.minimum(power, 254)
        reciprocal = ((254 - power) << 23).to(tl.float32, bitcast=True)
        codes = encode(blocks * reciprocal[:, None], CODE)
        stored = tl.where(largest < INF, power, 255)
    else:
        by = scale.to(tl.float32, bitcast=True)
        codes = encode(tl.div_rn(blocks, tl.broadcast_to(by[:, None], blocks.shape)), CODE)
        if SCALE == 0:
            stored = tl.where(largest < INF, scale, NAN)
        else:
            half = by.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
            stored = tl.where((largest < INF) & (half < 0x7C00), half, 0x7E00)
    return codes, stored, largest


@triton.jit
def poison(codes, blocks, largest, CODE: tl.constexpr):
    """Sets the bytes of blocks with an infinity or a NaN to NaN (e4m3) or 0 (int8)."""
    if CODE == 1:
        bits = blocks.to(tl.int32, bitcast=True)
        lost = 0x7F | tl.where((bits & MAGNITUDE) > INF, (bits >> 24) & 0x80, 0)
    else:
        lost = tl.zeros_like(codes)
    return tl.where(largest[:, None] < INF, codes, lost)


@triton.jit
def _scales_at(address, SCALE: tl.constexpr):
    """A pointer to the bits of scales."""
    SIZE: tl.constexpr = 4 if SCALE == 0 else (1 if SCALE == 1 else 2)
    return words_at(address, SIZE, SIZE)


@triton.jit
def store_scales(address, offsets, stored, mask, SCALE: tl.constexpr):
    """Stores the scale bits from `encode_block`."""
    pointers = _scales_at(address, SCALE) + offsets
    tl.store(pointers, stored.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def load_scales(address, offsets, mask, SCALE: tl.constexpr):
    """Scales as float32."""
    bits = tl.load(_scales_at(address, SCALE) + offsets, mask=mask, other=0)
    if SCALE == 0:
        scales = bits.to(tl.float32, bitcast=True)
    elif SCALE == 1:
        power = bits.to(tl.int32)
        # the smallest, 2**-127, is below the normal range
        normal = tl.where(power == 0, 1 << 22, power << 23)
        scales = tl.where(power == 255, NAN, normal).to(tl.float32, bitcast=True)
    else:
        scales = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return scales
