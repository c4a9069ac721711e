"""Rows of named tensors as aux values: what prefill tells of a request beside its state, where an
engine keeps that in tensors of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from disagg.protocol.messages import Aux


def read_values(rows: Mapping[str, torch.Tensor]) -> Aux:
    """The bytes of each row."""
    return {name: _bytes(row).numpy().tobytes() for name, row in rows.items()}


def write_values(
    rows: Mapping[str, torch.Tensor], values: Mapping[str, Any], one_sided: Collection[str] = ()
) -> None:
    """Writes to rows what `read_values` gave of rows of the same names, all or none. One side may
    lack rows in `one_sided`.

    Raises ValueError for a row that only one side has, or that is of another size there.
    """
    for name in sorted((values.keys() ^ rows.keys()) - {*one_sided}):
        side, other = ("prefill", "decode") if name in values else ("decode", "prefill")
        raise ValueError(
            f"metadata buffer {name}: {side} has it, {other} has not. Start both engines with the "
            "same options and the same version."
        )
    both = values.keys() & rows.keys()
    for name in sorted(both):
        ours, theirs = _bytes(rows[name]).numel(), values[name]
        if not isinstance(theirs, bytes) or len(theirs) != ours:
            found = f"{len(theirs)} bytes" if isinstance(theirs, bytes) else repr(theirs)
            raise ValueError(
                f"metadata buffer {name}: {found} on prefill, {ours} bytes on decode. Start both "
                "engines with the same model and options."
            )
    for name in both:
        row = rows[name]
        data = torch.frombuffer(bytearray(values[name]), dtype=torch.uint8).view(row.dtype)
        row.copy_(data.view(row.shape))


def _bytes(row: torch.Tensor) -> torch.Tensor:
    """A row's bytes, on the host."""
    return row.contiguous().cpu().view(torch.uint8)
