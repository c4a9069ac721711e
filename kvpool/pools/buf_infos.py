"""Pointer lists as engines' connectors take them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class BufInfos(NamedTuple):
    """Addresses, lengths and item lengths in bytes, and global layer ids, one of each a buffer."""

    data_ptrs: list[int]
    data_lens: list[int]
    item_lens: list[int]
    layer_ids: list[int]


class StateType(str, Enum):
    """Kinds of state beside the main cache."""

    SWA = "swa"
    NSA = "nsa"
    MAMBA = "mamba"
    DSV4 = "dsv4"


class StateBufInfos(NamedTuple):
    """One state component: as BufInfos, its kind, and the size of the sharded dimension of each
    tensor.
    """

    state_type: StateType
    data_ptrs: list[int]
    data_lens: list[int]
    item_lens: list[int]
    layer_ids: list[int]
    dim_per_tensor: list[int]
