"""Layers of full attention beside layers of linear attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from typing_extensions import Unpack

from kvpool.layout import Space
from kvpool.layout.dtypes import dtype_name
from kvpool.pools.access import ArrayLike, DTypeLike
from kvpool.pools.base import Common
from kvpool.pools.buf_infos import StateType
from kvpool.pools.composite import UnionPool
from kvpool.pools.kinds import MHA, MLA, At, IndexKey, Kind, LinearState


class HybridLinearPool(UnionPool):
    """`linear_layers` hold a conv and a temporal state per request; other layers the attention
    `full`, and with `index` the keys of a sparse indexer (on `index_layers`, default: all of them).

    `conv_dtype` (default: that of the pool) and `temporal_dtype` (default: that of `linear`,
    float32) are those of the states.
    """

    has_index_packing = True
    has_linear_states = True

    def __init__(
        self,
        *,
        full: MHA | MLA,
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
        self.index_layers = None if index_layers is None else frozenset(index_layers)
        self.index_packing = index_packing
        super().__init__(**common)

    def parts(self) -> Iterator[tuple[Kind, At]]:
        """The full layers and their index keys, then the linear layers."""
        full = set(self.layers) - self.linear_layers
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

    def set_linear_state(
        self,
        layer: int,
        slots: ArrayLike,
        conv: torch.Tensor | None = None,
        temporal: torch.Tensor | None = None,
    ) -> None:
        """Writes conv `[N, channel, tap]` (sections one after the other) and temporal
        `[N, head, Dk, Dv]`, or one of them, to slots `[N]`.
        """
        values = {} if conv is None else self.linear.split(conv, self.shard)
        if temporal is not None:
            if temporal.shape[2:] != self.linear.state_shape:
                raise ValueError(
                    f"temporal: {list(temporal.shape)}, a state is "
                    f"[N, head, {', '.join(map(str, self.linear.state_shape))}]."
                )
            values["temporal"] = temporal if self.linear.state_axis else temporal.flatten(2)
        self.write(layer, slots, values)

    def get_linear_state(self, layer: int, slots: ArrayLike) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads conv `[N, channel, tap]` and temporal `[N, head, Dk, Dv]`."""
        *conv, temporal = self.read_roles(self.linear.inputs, layer, slots)
        return self.linear.join(conv), temporal.reshape(
            *temporal.shape[:2], *self.linear.state_shape
        )
