"""Pools in the layout of engines on Ascend: one tensor per role, stacked over layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from typing_extensions import Unpack

from kvpool.layout.formats import MHA, At, Kind
from kvpool.pools.base import Common
from kvpool.pools.states import UnionPool
from kvpool_npu.kinds import NPUMLA, NPUIndexKey

if TYPE_CHECKING:
    import torch


class NPUMHAPool(UnionPool):
    """`k` and `v` `[layer, item, entry, head, dim]`. `num_kv_heads` counts the model's heads; the
    pool holds this rank's shard.
    """

    def __init__(
        self,
        *,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        **common: Unpack[Common],
    ) -> None:
        self.attention = MHA(num_kv_heads, head_dim, v_head_dim)
        common.setdefault("placement", "stack")
        super().__init__(**common)

    def states(self) -> Iterator[tuple[Kind, At]]:
        """All K, then all V."""
        yield self.attention, self.at()


class NPUMLAPool(UnionPool):
    """`latent` and `rope`, and with `index_head_dim` the keys of a sparse indexer on `index_layers`
    (default: all), each `[layer, item, entry, dim]`: 2 kinds of buffers, or 3, or 4 with scales.

    `index_packing`: a float dtype (default: the pool's), `fp8` or `int8` (see NPUIndexKey).
    """

    def __init__(
        self,
        *,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
        index_head_dim: int | None = None,
        index_layers: Iterable[int] | None = None,
        index_packing: torch.dtype | str | None = None,
        **common: Unpack[Common],
    ) -> None:
        self.attention = NPUMLA(kv_lora_rank, qk_rope_head_dim)
        self.index = None if index_head_dim is None else NPUIndexKey(index_head_dim)
        self.index_layers = None if index_layers is None else tuple(index_layers)
        self.index_packing = index_packing
        common.setdefault("placement", "stack")
        super().__init__(**common)

    def states(self) -> Iterator[tuple[Kind, At]]:
        """Latents and rope keys, then index keys, all listed with the main cache."""
        yield self.attention, self.at()
        if self.index is not None:
            packing = self.index_packing or self.packing
            yield self.index, self.at(self.index_layers, packing=packing)
