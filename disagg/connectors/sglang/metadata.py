"""What prefill tells of a request beside its state: the row of SGLang's `MetadataBuffers`, as
values by the names of the buffers.

SGLang pairs these buffers by position, and some are there only with an option.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from disagg.connectors.source import FIRST_TOKEN
from disagg.protocol.messages import Aux

ONE_SIDED = frozenset({"kv_checksum", "output_dsa_topk_indices"})
"""Buffers that one side may lack: SGLang then goes without what they hold."""


def rows(buffers: Any) -> dict[str, torch.Tensor]:
    """The buffers that a `MetadataBuffers` has, by name, each `[row, ...]`."""
    return {name: value for name, value in vars(buffers).items() if isinstance(value, torch.Tensor)}


def read_row(buffers: Any, row: int) -> Aux:
    """The values of a request's row: bytes by name, and the first token."""
    held = rows(buffers)
    values: Aux = {name: _bytes(held[name][row]).numpy().tobytes() for name in held}
    return values | {FIRST_TOKEN: int(held["output_ids"][row, 0])}


def write_row(buffers: Any, row: int, room: int, values: Mapping[str, Any]) -> None:
    """Writes the values of room `room` to a row, all or none. From another engine than SGLang comes
    the first token only.

    Raises ValueError for a buffer that only one side has, or that is of another size there.
    """
    held = rows(buffers)
    if "output_ids" not in values:
        for buffer in held.values():
            buffer[row].zero_()
        held["output_ids"][row, 0] = values[FIRST_TOKEN]
        held["bootstrap_room"][row, 0] = room
        return
    given = {name: value for name, value in values.items() if name != FIRST_TOKEN}
    for name in sorted((given.keys() ^ held.keys()) - ONE_SIDED):
        side, other = ("prefill", "decode") if name in given else ("decode", "prefill")
        raise ValueError(
            f"metadata buffer {name}: {side} has it, {other} has not. Start both engines with the "
            "same options and the same SGLang."
        )
    both = given.keys() & held.keys()
    for name in sorted(both):
        ours, theirs = _bytes(held[name][row]).numel(), given[name]
        if not isinstance(theirs, bytes) or len(theirs) != ours:
            found = f"{len(theirs)} bytes" if isinstance(theirs, bytes) else repr(theirs)
            raise ValueError(
                f"metadata buffer {name}: {found} on prefill, {ours} bytes on decode. Start both "
                "engines with the same model and options."
            )
    for name in both:
        target = held[name][row]
        data = torch.frombuffer(bytearray(given[name]), dtype=torch.uint8).view(target.dtype)
        target.copy_(data.view(target.shape))


def _bytes(row: torch.Tensor) -> torch.Tensor:
    """A row's bytes, on the host."""
    return row.contiguous().cpu().view(torch.uint8)
