"""Block-scaled fp8: values and the scales that they are to be multiplied with.

A region `x.scale` beside a region `x` is the whole statement: a cell of `x` is cut into as many
blocks as a cell of `x.scale` has elements, and each block has one scale. float32 scales are exact
(largest magnitude over 448); ue8m0 scales are the next power of two above that (the E8M0 of the OCP
Microscaling formats).
"""

from __future__ import annotations

from typing import Any

import torch

from kvpool.dtypes import dtype_name
from kvpool.item import Cell

PACKINGS = ("fp8", "mxfp8")
READ_AS = ("bfloat16", "float16", "float32", "float64")
LARGEST = 448.0  # of float8_e4m3fn
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


def quantise(values: torch.Tensor, scales: int, scale: torch.dtype) -> tuple[torch.Tensor, ...]:
    """e4m3 values `[..., D]` and scales `[..., scales]` of floats `[..., D]`.

    Within a block the error is at most 2**-4 of a value, or 2**-10 of the scale where that is more.
    A block that holds an infinity or a NaN becomes NaN as a whole.
    """
    blocks = values.detach().float().reshape(*values.shape[:-1], scales, values.shape[-1] // scales)
    largest = torch.linalg.vector_norm(blocks, torch.inf, dim=-1)
    factor = (largest / LARGEST).clamp_min(SMALLEST_SCALE)
    if scale is torch.float8_e8m0fnu:
        mantissa, exponent = torch.frexp(factor)  # factor = mantissa * 2**exponent, mantissa >= 1/2
        exponent = exponent - (mantissa == 0.5).int()
        factor = torch.ldexp(torch.ones_like(factor), exponent)
        stored = (exponent + BIAS).clamp(0, 2 * BIAS).to(torch.uint8)
        stored = stored.masked_fill(~largest.isfinite(), 255).view(scale)  # 255 is NaN
    factor = factor.masked_fill(~largest.isfinite(), torch.nan)
    if scale is not torch.float8_e8m0fnu:
        stored = factor.to(scale)
    # what division leaves above the largest value is too little to round to the next
    held = (blocks / factor[..., None]).to(torch.float8_e4m3fn)
    return held.reshape(values.shape), stored


def dequantise(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Floats `[..., D]` of e4m3 values `[..., D]` and scales `[..., S]`.

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
