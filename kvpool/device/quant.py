"""Block-scaled fp8 and int8: values and the scales that they are to be multiplied with.

A region `x.scale` beside a region `x` is the whole statement: a cell of `x` is cut into as many
blocks as a cell of `x.scale` has elements, and each block has one scale. It is the largest
magnitude over the largest stored value (448 of e4m3, 127 of int8) in float32: stored as that, or
rounded to float16 after the values were divided by it; or the next power of two above it, as ue8m0
(the E8M0 of the OCP Microscaling formats).
"""

from __future__ import annotations

from typing import Any

import torch

from kvpool.layout.dtypes import PACKINGS, dtype_name
from kvpool.layout.template import Cell

READ_AS = ("bfloat16", "float16", "float32", "float64")
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SCALES = (torch.float32, torch.float16, torch.float8_e8m0fnu)
SMALLEST_SCALE = 2.0**-126  # a scale below float32's normal range has no reciprocal
BIAS = 127


def storage(dtype: Any, packing: Any, owner: str) -> tuple[str, str]:
    """The dtype of a pool's values and its packing, as names; raises ValueError where both are
    float dtypes and not one.
    """
    if packing in PACKINGS:
        read = dtype_name("bf16" if dtype is None else dtype)
        if read not in READ_AS:
            raise ValueError(
                f"{owner}: dtype {read}, packing {packing!r}. What is quantised is written and "
                f"read as one of {', '.join(READ_AS)}."
            )
        return read, packing
    if packing is None and dtype is None:
        raise ValueError(f"{owner}: a dtype or a packing must be given.")
    stored = dtype_name(dtype if packing is None else packing)
    if dtype is not None and dtype_name(dtype) != stored:
        raise ValueError(
            f"{owner}: dtype {dtype_name(dtype)}, packing {stored}. Nothing is rounded: name one."
        )
    return stored, stored


def scale_role(role: str) -> str:
    """The role of the scales of `role`."""
    return f"{role}.scale"


def scaled(role: str, count: int, block: int, scale: str = "f32") -> tuple[Cell, Cell]:
    """The cells of `count` e4m3 values and of their scales, one a block.

    Fewer values than a block are one block. Raises ValueError if blocks do not fill the cell.
    """
    block = min(block, count)
    if count % block:
        raise ValueError(
            f"{role}: {count} elements are no whole blocks of {block}. Use a packing without "
            "scales."
        )
    return Cell(role, count, "e4m3"), Cell(scale_role(role), count // block, scale)


def quantise(
    values: torch.Tensor,
    scales: int,
    scale: torch.dtype,
    held: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values `[..., D]` of dtype `held`, e4m3 or int8, and scales `[..., scales]` of floats
    `[..., D]`.

    Within a block the error is at most 2**-4 of a value, or 2**-10 of the scale where that is more;
    of int8 half a scale. float16 scales add 2**-11 of a value, and more below 2**-14, down to 0. A
    block is NaN as a whole where it holds an infinity or a NaN, or its scale is beyond float16.
    """
    blocks = values.detach().float().reshape(*values.shape[:-1], scales, values.shape[-1] // scales)
    largest = torch.linalg.vector_norm(blocks, torch.inf, dim=-1)
    factor = (largest / LARGEST[held]).clamp_min(SMALLEST_SCALE)
    if scale is torch.float8_e8m0fnu:
        mantissa, exponent = torch.frexp(factor)  # factor = mantissa * 2**exponent, mantissa >= 1/2
        exponent = exponent - (mantissa == 0.5).int()
        factor = torch.ldexp(torch.ones_like(factor), exponent)
        stored = (exponent + BIAS).clamp(0, 2 * BIAS).to(torch.uint8)
        stored = stored.masked_fill(~largest.isfinite(), 255).view(scale)  # 255 is NaN
    else:
        stored = stored_scales(factor, scale)
    factor = factor.masked_fill(~largest.isfinite(), torch.nan)
    # what division leaves above the largest value is too little to round to the next
    quotients = blocks / factor[..., None]
    if held is torch.int8:  # which has no NaN: its scale is
        quotients = quotients.nan_to_num(0.0).round()
    return quotients.to(held).reshape(values.shape), stored


def stored_scales(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 scales as float32 or float16; those that it cannot hold are NaN."""
    stored = scales.to(dtype)
    return stored.masked_fill(~stored.isfinite(), torch.nan)


def dequantise(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Floats `[..., D]` of e4m3 or int8 values `[..., D]` and scales `[..., S]`.

    What was rounded up beyond the range of `dtype` is its largest number, not an infinity.
    """
    if scales.dtype is torch.float8_e8m0fnu:
        bits = scales.view(torch.uint8).int()
        factor = torch.ldexp(torch.ones(bits.shape, device=bits.device), bits - BIAS)
        factor = factor.masked_fill(bits == 255, torch.nan)
    else:
        factor = scales.float()
    blocks = values.float().reshape(*scales.shape, values.shape[-1] // scales.shape[-1])
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return (blocks * factor[..., None]).clamp(-most, most).reshape(values.shape).to(dtype)
