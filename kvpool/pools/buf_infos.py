"""Pointer lists, as connectors of serving engines take them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kvpool.layout import Buffer


class BufInfos(NamedTuple):
    """Pointers, lengths and item lengths in bytes, and global layer ids, of each buffer."""

    data_ptrs: list[int]
    data_lens: list[int]
    item_lens: list[int]
    layer_ids: list[int]


class StateType(str, Enum):
    """State components other than the main cache."""

    SWA = "swa"
    NSA = "nsa"
    MAMBA = "mamba"
    DSV4 = "dsv4"


class StateBufInfos(NamedTuple):
    """One state component, as BufInfos; `dim_per_tensor`: sizes of the sharded dimension."""

    state_type: StateType
    data_ptrs: list[int]
    data_lens: list[int]
    item_lens: list[int]
    layer_ids: list[int]
    dim_per_tensor: list[int]


def buf_infos(rows: list[tuple[Buffer, int]]) -> BufInfos:
    """The lists of (buffer, layer)."""
    return BufInfos(
        [b.base for b, _ in rows],
        [b.end - b.base for b, _ in rows],
        [b.item_bytes for b, _ in rows],
        [layer for _, layer in rows],
    )
