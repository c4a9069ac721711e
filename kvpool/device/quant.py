"""Block-scaled fp8 and int8: values, and the scales that multiply them.

A region `x.scale` beside a region `x` makes `x` quantised: a cell of `x` has as many blocks as a
cell of `x.scale` has elements, one scale each. A scale is the block's largest magnitude over the
largest stored value (448 of e4m3, 127 of int8), in float32. It is stored as float32, as float16
(values are divided by the float32 scale), or as ue8m0, the next power of two above it (E8M0 of the
OCP Microscaling formats).
"""

from __future__ import annotations

import torch

LARGEST_CODE = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SCALE_DTYPES = (torch.float32, torch.float16, torch.float8_e8m0fnu)
SMALLEST_SCALE = 2.0**-126  # a scale below float32's normal range has no reciprocal
BIAS = 127


def quantise(
    values: torch.Tensor,
    scales: int,
    scale: torch.dtype,
    stored_as: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises floats `[..., D]` to `[..., D]` of dtype `stored_as` (e4m3 or int8), with
    `scales` scales of dtype `scale` for each row: `[..., scales]`.

    The error of e4m3 is at most 2**-4 of the value or 2**-10 of the scale, whichever is larger; of
    int8, half a scale. float16 scales add 2**-11 of the value, and more where the scale is below
    2**-14. A block with an infinity or a NaN, or with a scale beyond float16, becomes NaN.
    """
    blocks = values.detach().float().reshape(*values.shape[:-1], scales, values.shape[-1] // scales)
    largest = torch.linalg.vector_norm(blocks, torch.inf, dim=-1)
    factor = (largest / LARGEST_CODE[stored_as]).clamp_min(SMALLEST_SCALE)
    if scale is torch.float8_e8m0fnu:
        mantissa, exponent = torch.frexp(factor)  # factor = mantissa * 2**exponent, mantissa >= 1/2
        exponent = exponent - (mantissa == 0.5).int()
        factor = torch.ldexp(torch.ones_like(factor), exponent)
        stored = (exponent + BIAS).clamp(0, 2 * BIAS).to(torch.uint8)
        stored = stored.masked_fill(~largest.isfinite(), 255).view(scale)  # 255 is NaN
    else:
        stored = factor.to(scale)
        stored = stored.masked_fill(~stored.isfinite(), torch.nan)  # beyond float16
    factor = factor.masked_fill(~largest.isfinite(), torch.nan)
    # division may exceed the largest value slightly, but never rounds above it
    quotients = blocks / factor[..., None]
    if stored_as is torch.int8:  # has no NaN: the scale marks the block
        quotients = quotients.nan_to_num(0.0).round()
    return quotients.to(stored_as).reshape(values.shape), stored


def dequantise(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Floats `[..., D]` from e4m3 or int8 values `[..., D]` and scales `[..., S]`. Values that
    quantisation rounded beyond the range of `dtype` become its largest number, not an infinity.
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
