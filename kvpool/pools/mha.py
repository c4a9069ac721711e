"""Multi-head and grouped-query attention: K and V apart, each `[page, entry, head, dim]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import Unpack

from kvpool.item import Cell, Repeat, Template
from kvpool.placement import Declared
from kvpool.pool import Common, KVPool

ORDERS = ("nhd", "hnd")


class MHAPool(KVPool):
    """`num_kv_heads` K and V heads in the model, of which this rank's shard is held.

    `order`: `nhd` puts the heads of a token side by side, `hnd` the tokens of a head.
    """

    def __init__(
        self,
        *,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        order: str = "nhd",
        **common: Unpack[Common],
    ) -> None:
        if order not in ORDERS:
            raise ValueError(f"order: one of {ORDERS}, got {order!r}.")
        self.num_kv_heads, self.head_dim, self.order = num_kv_heads, head_dim, order
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        super().__init__(**common)

    def declare(self) -> Iterator[Declared]:
        """All K, then all V."""
        yield Declared("k", self.layers, "kv", self._page(Cell("k", self.head_dim, self.dtype)))
        yield Declared("v", self.layers, "kv", self._page(Cell("v", self.v_head_dim, self.dtype)))

    def _page(self, cell: Cell) -> Template:
        start, size = self.shard.of(self.num_kv_heads)
        if self.order == "nhd":
            return Repeat(
                "entry", self.page_size, Repeat("head", size, cell, start, self.num_kv_heads)
            )
        return Repeat("head", size, Repeat("entry", self.page_size, cell), start, self.num_kv_heads)

    def set_kv_buffer(self, layer: int, locations: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes K `[N, head, head_dim]` and V `[N, head, v_head_dim]` to flat entry locations
        `[N]`.
        """
        self.store(layer, locations, {"k": k, "v": v})

    def get_kv_buffer(self, layer: int, locations: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads K `[N, head, head_dim]` and V `[N, head, v_head_dim]` from flat entry locations
        `[N]`.
        """
        return self.load("k", layer, locations), self.load("v", layer, locations)
