# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""All that one write gives, in one launch: each row is a part of it, with programs of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvpool.torch_ops import Row
from kvpool_cuda.blocks import quantise_part, scaled, scaled_programs
from kvpool_cuda.launch import checked, constants, on
from kvpool_cuda.rows import move_part, plain, plain_programs


def store_rows(rows: Sequence[Row], locations: torch.Tensor) -> None:
    """See Device.store_rows."""
    count = locations.numel()
    for view, values, scales in rows:
        dtype = view.dtype if scales is None else None
        checked("values", view, values, (count, *view.shape[2:]), dtype)
        checked("locations", view, locations, (count,), torch.int64)
    if not rows or not count:
        return
    locations = locations.contiguous()
    parts = [
        plain(view, values) if scales is None else scaled(view, scales, values)
        for view, values, scales in rows
    ]
    with on(locations.device):
        _store[(sum(part.programs for part in parts),)](
            tuple(part.arguments for part in parts),
            locations.data_ptr(),
            count,
            constants(*(part.constants for part in parts)),
        )


@triton.jit
def _programs(count, PART: tl.constexpr):
    if PART[0]:
        programs = scaled_programs(count, PART)
    else:
        programs = plain_programs(count, PART)
    return programs


@triton.jit(do_not_specialize=["count"])
def _store(at, locations, count, PARTS: tl.constexpr):
    program = tl.program_id(0)
    first = 0
    for part in tl.static_range(len(PARTS)):
        end = first + _programs(count, PARTS[part])
        if (program >= first) & (program < end):
            if PARTS[part][0]:
                quantise_part(program - first, at[part], locations, count, PARTS[part])
            else:
                move_part(program - first, at[part], locations, count, PARTS[part], False)
        first = end
