"""What prefill tells of a request beside its state: the row of SGLang's `MetadataBuffers`, as
values by the names of the buffers.

SGLang pairs these buffers by position, and some are there only with an option.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from disagg.connectors.source import FIRST_TOKEN
from disagg.connectors.values import read_values, write_values
from disagg.protocol.messages import Aux

ONE_SIDED = ("kv_checksum", "output_dsa_topk_indices")
"""Buffers that one side may lack: SGLang then goes without what they hold."""


def rows(buffers: Any, row: int) -> dict[str, torch.Tensor]:
    """A request's row of each buffer that a `MetadataBuffers` has, by name."""
    held = {name: each for name, each in vars(buffers).items() if isinstance(each, torch.Tensor)}
    return {name: buffer[row] for name, buffer in held.items()}


def read_row(buffers: Any, row: int) -> Aux:
    """The values of a request's row: bytes by name, and the first token."""
    held = rows(buffers, row)
    return read_values(held) | {FIRST_TOKEN: int(held["output_ids"][0])}


def write_row(buffers: Any, row: int, room: int, values: Mapping[str, Any]) -> None:
    """Writes the values of room `room` to a row, all or none. From another engine than SGLang comes
    the first token only.

    Raises ValueError for a buffer that only one side has, or that is of another size there.
    """
    held = rows(buffers, row)
    if "output_ids" not in values:
        for each in held.values():
            each.zero_()
        held["output_ids"][0] = values[FIRST_TOKEN]
        held["bootstrap_room"][0] = room
        return
    given = {name: value for name, value in values.items() if name != FIRST_TOKEN}
    write_values(held, given, ONE_SIDED)
