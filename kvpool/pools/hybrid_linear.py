"""Layers of full attention beside layers of linear attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from typing_extensions import Unpack

from kvpool.layout import Space
from kvpool.layout.dtypes import dtype_name
from kvpool.pools.access import DTypeLike
from kvpool.pools.base import Common
from kvpool.pools.buf_infos import StateType
from kvpool.pools.composite import UnionPool
from kvpool.pools.kinds import MHA, MLA, At, IndexKey, Kind, LinearState


class HybridLinearPool(UnionPool):
    """`linear_layers` hold the state `linear` per request, `full_layers` (default: the others) the
    attention `full`, and with `index` the keys of a sparse indexer (on `index_layers`, default: all
    of them). A layer may hold both. Without `full` the pool has slots only.

    `conv_dtype` (default: that of the pool) and `temporal_dtype` (default: that of `linear`,
    float32) are those of the states.
    """

    has_index_packing = True
    has_linear_states = True

    def __init__(
        self,
        *,
        full: MHA | MLA | None = None,
        full_layers: Iterable[int] | None = None,
        linear: LinearState,
        linear_layers: Iterable[int],
        index: IndexKey | None = None,
        index_layers: Iterable[int] | None = None,
        index_packing: str = "fp8",
        conv_dtype: DTypeLike | None = None,
        temporal_dtype: DTypeLike | None = None,
        **common: Unpack[Common],
    ) -> None:
        if temporal_dtype is not None:
            linear = replace(linear, temporal_dtype=dtype_name(temporal_dtype))
        self.full, self.linear, self.index = full, linear, index
        self.linear_layers, self.conv_dtype = frozenset(linear_layers), conv_dtype
        self.full_layers = None if full_layers is None else frozenset(full_layers)
        self.index_layers = None if index_layers is None else frozenset(index_layers)
        self.index_packing = index_packing
        super().__init__(**common)

    def parts(self) -> Iterator[tuple[Kind, At]]:
        """The full layers and their index keys, then the linear layers."""
        if self.full_layers is None:
            full = set(self.layers) - self.linear_layers
        else:
            full = set(self.full_layers)
        if self.full is not None:
            yield self.full, self.at(full)
        if self.index is not None:
            indexed = full if self.index_layers is None else full & self.index_layers
            yield self.index, self.at(indexed, packing=self.index_packing, state=StateType.DSA)
        conv = str(self.conv_dtype or self.dtype)
        yield (
            self.linear,
            self.at(self.linear_layers, "state", 1, packing=conv, state=StateType.MAMBA),
        )

    def spaces(self) -> Iterator[Space]:
        """Pages of tokens, and a slot per request."""
        yield from super().spaces()
        yield Space("state", "slot")
