"""MiniMax's models take no cache but their own class."""

from __future__ import annotations

import torch
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from kvpool.integrations.transformers import PoolCache


class MiniMaxPoolCache(PoolCache, MiniMaxCache):
    """A PoolCache whose lightning states are called as MiniMax's models do."""

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Lightning state `[B, head, D, D]`; None before the first token."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Writes the lightning state."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def __len__(self) -> int:
        return len(self.layers)
