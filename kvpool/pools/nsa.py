"""MLA with a sparse indexer: rows of latent and rope, and index keys on some of the layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from typing_extensions import Unpack

from kvpool.pools.base import Common
from kvpool.pools.buf_infos import StateType
from kvpool.pools.composite import UnionPool
from kvpool.pools.kinds import MLA, At, IndexKey, Kind


class NSAPool(UnionPool):
    """An MLA pool with keys of `index_head_dim` elements on `index_layers` (default: all).

    `index_packing`: `fp8` (132 bytes for a key of 128) or a float dtype, independent of `packing`.
    """

    has_index_packing = True

    def __init__(
        self,
        *,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
        index_head_dim: int = 128,
        index_layers: Iterable[int] | None = None,
        index_packing: str = "fp8",
        **common: Unpack[Common],
    ) -> None:
        self.attention = MLA(kv_lora_rank, qk_rope_head_dim)
        self.index = IndexKey(index_head_dim)
        self.index_layers = None if index_layers is None else tuple(index_layers)
        self.index_packing = index_packing
        super().__init__(**common)

    def parts(self) -> Iterator[tuple[Kind, At]]:
        """One row and one key per token."""
        yield self.attention, self.at()
        yield (
            self.index,
            self.at(self.index_layers, packing=self.index_packing, state=StateType.DSA),
        )
