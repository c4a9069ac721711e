"""Pointer lists, as connectors of serving engines take them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kvpool.layout import Buffer
from kvpool.layout.grid import StateSection


class BufInfos(NamedTuple):
    """Pointers, lengths and item lengths in bytes, and global layer ids, of each buffer."""

    data_ptrs: list[int]
    data_lens: list[int]
    item_lens: list[int]
    layer_ids: list[int]


class StateType(str, Enum):
    """State components other than the main cache, by the names of SGLang 0.5.23.

    Names of older releases are accepted: `StateType("nsa")` and `StateType.NSA` are `DSA`,
    `StateType("dsv4")` and `StateType.DSV4` are `DSV4_REQUEST_STATE`.
    """

    SWA = "swa"
    """Pages of a window, and rings of those pages."""
    DSA = "dsa"
    """Index keys of sparse attention, in token pages."""
    MAMBA = "mamba"
    """Slots of linear attention."""
    DSV4_REQUEST_STATE = "c128_state"
    """DeepSeek-V4's rings, one a request."""
    NSA = DSA
    DSV4 = DSV4_REQUEST_STATE

    @classmethod
    def _missing_(cls, value: object) -> StateType | None:
        return {"nsa": cls.DSA, "dsv4": cls.DSV4_REQUEST_STATE}.get(str(value))


class StateBufInfos(NamedTuple):
    """One state component, as BufInfos, and how each of its buffers is sharded.

    `dim_per_tensor`: steps of the sharded dimension here, heads or channels; 0 without one.
    `sections`: what they consist of, in order. `outer_counts`: how many times an item repeats them
    (taps before channels, entries before heads).
    """

    state_type: StateType
    data_ptrs: list[int]
    data_lens: list[int]
    item_lens: list[int]
    layer_ids: list[int]
    dim_per_tensor: list[int]
    sections: list[list[StateSection]]
    outer_counts: list[int]


def buf_infos(rows: list[tuple[Buffer, int]]) -> BufInfos:
    """The lists of (buffer, layer)."""
    return BufInfos(
        [b.base for b, _ in rows],
        [b.end - b.base for b, _ in rows],
        [b.item_bytes for b, _ in rows],
        [layer for _, layer in rows],
    )
