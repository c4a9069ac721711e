"""A `transformers` Cache whose states live in a pool.

Row b of a batch is one request (kvpool.integrations.batch). The pool's kinds of state say what each
layer caches, and in what shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy.typing as npt
import torch
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from kvpool.allocation.allocator import Allocator, Request
from kvpool.integrations.batch import Batch
from kvpool.integrations.pool_layer import PoolLayer, unsupported
from kvpool.layout.dtypes import PACKINGS
from kvpool.layout.formats import IndexKey, LinearState
from kvpool.models import declare
from kvpool.pools.states import UnionPool


def pool_for(config: PreTrainedConfig, **common: Any) -> UnionPool:
    """The pool that a model of this config caches into; `common` goes to the pool's constructor.

    Index keys are not rounded either: they have the pool's dtype, or fp8 if its packing is one.
    """
    declared = declare(config.to_dict())
    if IndexKey in declared.kinds and common.get("packing") not in PACKINGS:
        common.setdefault("index_packing", common.get("dtype") or common.get("packing"))
    return declared.build(**common)


class PoolCache(Cache):
    """Row b of the batch is `requests[b]`; the tokens that requests already have count as cached.

    `padding`, `[B]`, are the columns before each row's first token: those of a prompt that is
    padded on the left, and those that requests with fewer cached tokens than others begin later.
    Nothing of them is written to the pool or read from it. The model must be given the mask and the
    positions of such a batch: `model(ids, past_key_values=cache, **cache.inputs(ids.shape[1]))`;
    `generate` makes them of a prompt's mask.

    Raises ValueError where cached tokens do not end in one column. The caller frees the requests.
    """

    def __new__(cls, pool: UnionPool, *_: Any, **__: Any) -> PoolCache:
        """A cache of the class that the models of such pools take."""
        kinds = pool.kinds if isinstance(pool, UnionPool) else ()
        if cls is PoolCache and any(isinstance(k, LinearState) and not k.taps for k, _ in kinds):
            cls = _minimax_cache()
        return super().__new__(cls)

    def __init__(
        self,
        pool: UnionPool,
        allocator: Allocator,
        requests: Sequence[Request],
        padding: npt.ArrayLike = 0,
    ) -> None:
        self.batch = Batch(pool, allocator, requests, padding)
        self.pool, self.allocator, self.requests = pool, allocator, self.batch.requests
        self.padding = self.batch.padding
        self.pool_layers = [PoolLayer(self.batch, layer) for layer in range(pool.end_layer)]
        states = [(layer.layer, name) for layer in self.pool_layers for name in layer.states]
        self.batch.written = dict.fromkeys(states, self.batch.columns)
        Cache.__init__(self, layers=list(self.pool_layers))  # its subclasses make other layers

    @classmethod
    def new(
        cls, pool: UnionPool, allocator: Allocator, batch_size: int = 1, padding: npt.ArrayLike = 0
    ) -> PoolCache:
        """Over fresh requests."""
        requests = [allocator.new_request() for _ in range(batch_size)]
        return cls(pool, allocator, requests, padding)

    def inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        """What a model must be told of the next forward over `tokens` columns: `attention_mask`
        `[B, columns so far and these]`, 0 where a column is padding, and `position_ids` `[B, T]`.
        Models without attention take a mask of these columns only.
        """
        columns, device = self.batch.columns, self.batch.device
        before = torch.tensor(self.padding.before, device=device)[:, None]
        positions = torch.arange(columns + tokens, device=device) - before  # negative in padding
        seen = columns if all(self.is_linear) else 0
        return {
            "attention_mask": (positions[:, seen:] >= 0).long(),
            "position_ids": positions[:, columns:].clamp(min=0),
        }

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` columns of every row, a negative number: drafts
        that were rejected. See Allocator.truncate, which refuses where state was overwritten; then
        nothing was changed.
        """
        self.batch.crop(tokens_to_remove)

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes `[B, H, T, D]` of a layer's new tokens; returns what these attend to,
        `[B, H, T_total, D]`. Raises ValueError if the states do not fit the pool.
        """
        return self._layer(layer_idx).update(key_states, value_states)

    def update_indexer(self, indexer_key_states: Any, layer_idx: int) -> torch.Tensor:
        """Writes index keys `[B, T, D]`; returns those of all tokens."""
        return self._layer(layer_idx).update_indexer(indexer_key_states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of a convolution `[B, channel, tap]`; None before the first token. What
        the model changes in place is written when it has let go of the tensor.
        """
        return self._layer(layer_idx).linear_states(state_idx).conv()

    def update_conv_state(
        self, conv_states: Any, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Writes the last of `[B, channel, T]`; returns all of them after the previous state."""
        return self._layer(layer_idx).linear_states(state_idx).update_conv(conv_states)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Temporal state `[B, head, ...]`, as get_conv_state."""
        return self._layer(layer_idx).linear_states(state_idx).temporal()

    def update_recurrent_state(
        self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Writes the temporal state, and the conv state if the model changed it in place."""
        states = self._layer(layer_idx).linear_states(state_idx)
        return states.update_temporal(recurrent_states)

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Lightning state `[B, head, D, D]`, as MiniMax's models ask for it."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, *_: Any, **__: Any) -> bool:
        """Whether any token is cached."""
        return self.get_seq_length(0 if layer_idx is None else layer_idx) > 0

    @property
    def is_linear(self) -> list[bool]:
        """Whether a layer has linear attention only."""
        return [layer.is_linear for layer in self.pool_layers]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(tokens that the next forward attends to, tokens dropped before them)."""
        self.batch.query_length = query_length
        return super().get_mask_sizes(query_length, layer_idx)

    def _layer(self, layer: int) -> PoolLayer:
        self.batch.raise_failure()
        if layer >= len(self.layers) or not self.pool_layers[layer].states:
            raise ValueError(
                f"{self.pool.owner} layer {layer}: the model caches this layer, the pool holds "
                f"{self.pool.layers}. Build the pool with all layers of the model."
            )
        return self.pool_layers[layer]

    prefetch = unsupported("prefetch", "A pool stays on its device.")
    __deepcopy__ = unsupported("deepcopy", "Prefill a new PoolCache with the same tokens.")


@cache
def _minimax_cache() -> type[PoolCache]:
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    class MiniMaxPoolCache(PoolCache, MiniMaxCache):
        """MiniMax's models take no cache but their own class."""

        def __len__(self) -> int:
            return len(self.layers)

    return MiniMaxPoolCache
