# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Entries as new tensors: as they are stored, or as the floats that they stand for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvpool_cuda.blocks import dequantise_part, scaled
from kvpool_cuda.launch import checked, constants, on
from kvpool_cuda.rows import move_part, plain


def load(view: torch.Tensor, locations: torch.Tensor) -> torch.Tensor:
    """See Device.load."""
    out, where = _new(view, locations, view.dtype)
    if out.numel():
        part = plain(view, out)
        with on(view.device):
            _load[(part.programs,)](
                part.arguments, where.data_ptr(), where.numel(), constants(part.constants)
            )
    return out


def dequantize_load(
    view: torch.Tensor, scales: torch.Tensor, locations: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See Device.dequantize_load."""
    out, where = _new(view, locations, dtype)
    part = scaled(view, scales, out)
    if out.numel():
        largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        with on(view.device):
            _dequantise[(part.programs,)](
                part.arguments,
                where.data_ptr(),
                where.numel(),
                largest,
                constants(part.constants),
            )
    return out


def _new(
    view: torch.Tensor, locations: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    checked("locations", view, locations, (locations.numel(),), torch.int64)
    shape = (locations.numel(), *view.shape[2:])
    return torch.empty(shape, dtype=dtype, device=view.device), locations.contiguous()


@triton.jit(do_not_specialize=["count"])
def _load(at, locations, count, PARTS: tl.constexpr):
    move_part(tl.program_id(0), at, locations, count, PARTS[0], True)


@triton.jit(do_not_specialize=["count"])
def _dequantise(at, locations, count, largest, PARTS: tl.constexpr):
    dequantise_part(tl.program_id(0), at, locations, count, largest, PARTS[0])
