"""Multi-head latent attention: one row a token, the compressed latent and then the rope key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import Unpack

from kvpool.item import Cell, Repeat, Seq
from kvpool.placement import Declared
from kvpool.pool import Common, KVPool


class MLAPool(KVPool):
    """Rows of `kv_lora_rank` latent and `qk_rope_head_dim` rope elements (DeepSeek-V3: 512 + 64).

    Nothing in a row belongs to a head: every rank of a tensor-parallel group holds all of it.
    """

    def __init__(
        self, *, kv_lora_rank: int = 512, qk_rope_head_dim: int = 64, **common: Unpack[Common]
    ) -> None:
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        super().__init__(**common)

    def declare(self) -> Iterator[Declared]:
        """One row a token."""
        row = Seq(
            Cell("latent", self.kv_lora_rank, self.dtype),
            Cell("rope", self.qk_rope_head_dim, self.dtype),
        )
        yield Declared("kv", self.layers, "kv", Repeat("entry", self.page_size, row))

    def set_kv_buffer(
        self, layer: int, locations: Any, latent: torch.Tensor, rope: torch.Tensor
    ) -> None:
        """Writes latent `[N, kv_lora_rank]` and rope `[N, qk_rope_head_dim]` to flat entry
        locations `[N]`.
        """
        self.store(layer, locations, {"latent": latent, "rope": rope})

    def get_kv_buffer(self, layer: int, locations: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads latent `[N, kv_lora_rank]` and rope `[N, qk_rope_head_dim]` from flat entry
        locations `[N]`.
        """
        return self.load("latent", layer, locations), self.load("rope", layer, locations)
