# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Floats of any size in kernels, as float32."""

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
def largest_of(KIND: tl.constexpr):
    """The largest number of a kind of floats that float32 holds too, as float32."""
    if KIND == 2:
        bits = tl.full([], 0x477FE000, tl.int32)  # 65504
    elif KIND == 3:
        bits = tl.full([], 0x7F7F0000, tl.int32)
    else:
        bits = tl.full([], 0x7F7FFFFF, tl.int32)
    return bits.to(tl.float32, bitcast=True)
