"""What prefill tells of a request beside its state: the row of SGLang's `MetadataBuffers`, as
values by the names of the buffers.

SGLang pairs these buffers by position, and some are there only with an option.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from disagg.connectors.source import FIRST_TOKEN
from disagg.protocol.codec import Aux

NOTHING = {
    "kv_checksum": 0,
    "output_topk_p": 0,
    "output_topk_index": 0,
    "output_hidden_states": 0,
    "output_dsa_topk_indices": -1,
}
"""Buffers that one side may lack, and what SGLang takes for an empty row of them. A row that was
left as it is would have what another request told: its checksum, or what its draft began with.
"""
DRAFT = ("output_topk_p", "output_topk_index", "output_hidden_states")
"""Buffers that an engine has, of some size, also where it drafts nothing."""


def buffer_rows(buffers: Any, row: int, *, drafts: bool) -> dict[str, torch.Tensor]:
    """A request's row of each buffer that a `MetadataBuffers` has, by name. `drafts`: the engine
    has a draft model that reads the target's hidden states.
    """
    tensors = {name: t for name, t in vars(buffers).items() if isinstance(t, torch.Tensor)}
    return {name: t[row] for name, t in tensors.items() if drafts or name not in DRAFT}


def read_row(buffers: Any, row: int, *, drafts: bool) -> Aux:
    """The values of a request's row: bytes by name, and the first token."""
    rows = buffer_rows(buffers, row, drafts=drafts)
    values: Aux = {name: _bytes(tensor).numpy().tobytes() for name, tensor in rows.items()}
    return values | {FIRST_TOKEN: int(rows["output_ids"][0])}


def write_row(
    buffers: Any, row: int, room: int, values: Mapping[str, Any], *, drafts: bool
) -> None:
    """Writes the values of room `room` to a row, all or none. From another engine than SGLang comes
    the first token only.

    Raises ValueError for a buffer that only one side has, or that is of another size there.
    """
    rows = buffer_rows(buffers, row, drafts=drafts)
    sent = values.keys() - {FIRST_TOKEN} if "output_ids" in values else set()
    for name in sorted((sent ^ rows.keys()) - NOTHING.keys()) if sent else ():
        holder, lacking = ("prefill", "decode") if name in sent else ("decode", "prefill")
        raise ValueError(
            f"metadata buffer {name}: {holder} has it, {lacking} has not. Start both engines with "
            "the same options and the same version."
        )
    shared = sorted(sent & rows.keys())
    for name in shared:
        expected, value = _bytes(rows[name]).numel(), values[name]
        if not isinstance(value, bytes) or len(value) != expected:
            size = f"{len(value)} bytes" if isinstance(value, bytes) else repr(value)
            raise ValueError(
                f"metadata buffer {name}: {size} on prefill, {expected} bytes on decode. Start "
                "both engines with the same model and options."
            )
    for name in rows.keys() - sent:  # they hold what another request's were
        rows[name].fill_(NOTHING.get(name, 0))
    for name in shared:
        tensor = rows[name]
        data = torch.frombuffer(bytearray(values[name]), dtype=torch.uint8).view(tensor.dtype)
        tensor.copy_(data.view(tensor.shape))
    if not sent:
        rows["output_ids"][0] = values[FIRST_TOKEN]
        rows["bootstrap_room"][0] = room


def _bytes(row: torch.Tensor) -> torch.Tensor:
    return row.contiguous().cpu().view(torch.uint8)
