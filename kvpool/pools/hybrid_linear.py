"""Layers of full attention beside layers of linear attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from typing_extensions import Unpack

from kvpool.layout import Space
from kvpool.pools.base import Common
from kvpool.pools.buf_infos import StateType
from kvpool.pools.composite import UnionPool
from kvpool.pools.kinds import MHA, MLA, At, IndexKey, Kind, LinearState


class HybridLinearPool(UnionPool):
    """`linear_layers` keep one convolution and one temporal state a request, all others what `full`
    says of every token, and with `index` the keys of a sparse indexer too (`index_layers` of them).
    """

    def __init__(
        self,
        *,
        full: MHA | MLA,
        linear: LinearState,
        linear_layers: Iterable[int],
        index: IndexKey | None = None,
        index_layers: Iterable[int] | None = None,
        index_packing: str = "fp8",
        conv_dtype: Any = None,
        **common: Unpack[Common],
    ) -> None:
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
            yield self.index, self.at(indexed, packing=self.index_packing, state=StateType.NSA)
        conv: Any = {"packing": self.conv_dtype or self.dtype, "state": StateType.MAMBA}
        yield self.linear, self.at(self.linear_layers, "state", 1, **conv)

    def spaces(self) -> Iterator[Space]:
        """Pages of tokens, and a slot a request."""
        yield from super().spaces()
        yield Space("state", "slot")

    def set_linear_state(
        self,
        layer: int,
        slots: Any,
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
            values["temporal"] = temporal.flatten(2)
        self.write(layer, slots, values)

    def get_linear_state(self, layer: int, slots: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads what `set_linear_state` wrote."""
        *conv, temporal = self.read_roles(self.linear.inputs, layer, slots)
        return self.linear.join(conv), temporal.reshape(
            *temporal.shape[:2], *self.linear.state_shape
        )
