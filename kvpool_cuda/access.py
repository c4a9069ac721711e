# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""All rows of a write, or of a read, in one launch: each row is a part of it with its own
programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvpool.device.torch_ops import ReadRow, WriteRow
from kvpool_cuda.launch import checked, constants, on
from kvpool_cuda.plain_rows import LaunchPart, move_part, plain, plain_programs
from kvpool_cuda.quantised_rows import dequantise_part, quantise_part, scaled, scaled_programs


def store_rows(rows: Sequence[WriteRow], locations: torch.Tensor) -> None:
    """See Device.store_rows."""
    count = locations.numel()
    for view, values, scales in rows:
        dtype = view.dtype if scales is None else None
        checked("values", view, values, (count, *view.shape[2:]), dtype)
    _launch(rows, locations, loads=False)


def load_rows(rows: Sequence[ReadRow], locations: torch.Tensor) -> list[torch.Tensor]:
    """See Device.load_rows."""
    outputs = []
    for view, scales, dtype in rows:
        kind = view.dtype if scales is None else dtype
        shape = locations.numel(), *view.shape[2:]
        outputs.append(torch.empty(shape, dtype=kind, device=view.device))
    into = [WriteRow(view, out, scales) for (view, scales, _), out in zip(rows, outputs)]
    _launch(into, locations, loads=True)
    return outputs


def _launch(rows: Sequence[WriteRow], locations: torch.Tensor, loads: bool) -> None:
    for row in rows:
        checked("locations", row.view, locations, (locations.numel(),), torch.int64)
    parts = [_part(*row) for row in rows]
    if not parts or not locations.numel():
        return
    locations = locations.contiguous()
    with on(locations.device):
        _rows[(sum(part.programs for part in parts),)](
            tuple(part.arguments for part in parts),
            locations.data_ptr(),
            locations.numel(),
            constants(*(part.constants for part in parts)),
            loads,
        )


def _part(view: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None) -> LaunchPart:
    return plain(view, values) if scales is None else scaled(view, scales, values)


@triton.jit
def _programs(count, PART: tl.constexpr):
    if PART[0]:
        programs = scaled_programs(count, PART)
    else:
        programs = plain_programs(count, PART)
    return programs


@triton.jit(do_not_specialize=["count"])
def _rows(arguments, locations, count, PARTS: tl.constexpr, LOADS: tl.constexpr):
    program = tl.program_id(0)
    first = 0
    for part in tl.static_range(len(PARTS)):
        end = first + _programs(count, PARTS[part])
        if (program >= first) & (program < end):
            if not PARTS[part][0]:
                move_part(program - first, arguments[part], locations, count, PARTS[part], LOADS)
            elif LOADS:
                dequantise_part(program - first, arguments[part], locations, count, PARTS[part])
            else:
                quantise_part(program - first, arguments[part], locations, count, PARTS[part])
        first = end
