"""A `transformers` Cache whose states live in a pool.

Row b of a batch is one request; the token in column t is its position t, padding included. What a
layer caches, and in what shape, is read from the pool's kinds of state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from kvpool.allocator import Allocator, Request
from kvpool.device.quant import PACKINGS
from kvpool.integrations.pool_layer import PoolLayer, unsupported
from kvpool.pools.base import KVPool
from kvpool.pools.composite import UnionPool


def pool_for(config: PreTrainedConfig, **common: Any) -> KVPool:
    """The pool that a model of this config caches into; `common` goes to the pool's constructor.

    Index keys are stored as exactly as all else: in the pool's dtype, or in fp8 if its packing is.
    """
    from kvpool.models import declare

    declared = declare(config.to_dict())
    keeps_keys = "index_packing" in signature(declared.pool).parameters
    if keeps_keys and common.get("packing") not in PACKINGS:
        common.setdefault("index_packing", common.get("dtype") or common.get("packing"))
    return declared.build(**common)


class PoolCache(Cache):
    """Row b of the batch is `requests[b]`; tokens that they already have count as cached.

    Raises ValueError if their numbers of tokens differ. Whoever made the requests frees them.
    """

    def __init__(self, pool: UnionPool, allocator: Allocator, requests: Sequence[Request]) -> None:
        self.pool, self.allocator, self.requests = pool, allocator, tuple(requests)
        if len({id(request) for request in requests}) != len(requests) or not requests:
            raise ValueError(f"requests: one or more, each once, got {len(requests)}.")
        if not isinstance(pool, UnionPool):
            name = type(pool).__name__
            raise ValueError(f"{name}: PoolCache reads the kinds of state of a UnionPool.")
        if pool not in allocator.pools:
            raise ValueError("allocator: it hands out other pools' items. Use Allocator(pool).")
        located = [allocator.locations(request) for request in requests]
        if any(pool.owner in request.unfinished for request in requests):
            raise ValueError("the last forward over a request ended half-way. Free it.")
        lengths = [r.given.get(pool.owner, r.num_tokens) for r in requests]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"requests: {lengths} tokens. Pad rows on the left, or make a batch of each length."
            )
        self.tokens = lengths[0]
        # flat locations [B, T] of all tokens, by space
        self.where = {
            name: self._stack([row[name][: self.tokens] for row in located]) for name in located[0]
        }
        self.pool_layers = [PoolLayer(self, layer) for layer in range(pool.end_layer)]
        # how many tokens each layer has been given of each state that it keeps
        self.given = {
            (layer.layer, name): self.tokens for layer in self.pool_layers for name in layer.states
        }
        self._behind = 0
        super().__init__(layers=list(self.pool_layers))

    @classmethod
    def new(cls, pool: UnionPool, allocator: Allocator, batch_size: int = 1) -> PoolCache:
        """Over fresh requests."""
        return cls(pool, allocator, [allocator.new_request() for _ in range(batch_size)])

    def advance(self, layer: int, state: str, tokens: int) -> int:
        """Counts `tokens` new tokens of a layer's state; returns the position of the first.

        The first state of a forward takes the items for all. Raises OutOfPages, and changes
        nothing, if they are too few.
        """
        start = self.given[layer, state]
        if start == self.tokens:
            self._extend(tokens)
        elif start + tokens != self.tokens:
            raise ValueError(
                f"layer {layer} {state}: {tokens} new tokens, others got {self.tokens - start}."
            )
        self.given[layer, state] = start + tokens
        self._behind -= 1
        if self._behind == 0:
            for request in self.requests:
                request.given[self.pool.owner] = self.tokens
                request.unfinished.discard(self.pool.owner)
        return start

    def _extend(self, tokens: int) -> None:
        behind = [key for key, given in self.given.items() if given != self.tokens]
        if behind:
            layer, state = behind[0]
            raise RuntimeError(
                f"layer {layer} {state}: {self.given[behind[0]]} tokens, others {self.tokens}. "
                "Either a forward failed half-way (free the requests), or the model keeps no such "
                "state."
            )
        room = [request.num_tokens - self.tokens for request in self.requests]
        others = {region.owner for region in self.allocator.layout.regions} - {self.pool.owner}
        fresh: Mapping[str, Any]
        if not any(room):
            fresh = self.allocator.extend_batch(self.requests, tokens)
            for request in self.requests:
                for owner in others:
                    request.given.setdefault(owner, self.tokens)
        elif others and set(room) == {tokens}:  # a draft's forward after its target's
            rows = [self.allocator.locations(request) for request in self.requests]
            fresh = {name: [row[name][self.tokens :] for row in rows] for name in rows[0]}
            gone = [s.name for s in self.allocator.spaces if not s.per_request]
            gone = [name for name in gone if any((row < 0).any() for row in fresh[name])]
            if gone:
                raise ValueError(
                    f"space {gone[0]}: tokens left the window before {self.pool.owner} was given "
                    "them. Run its forward after each of the target's."
                )
        else:
            row = next(row for row, more in enumerate(room) if more)
            raise ValueError(
                f"row {row}: {self.requests[row].num_tokens} tokens, not the {self.tokens} that "
                "this cache was given. Give it the same tokens, or requests of its own."
            )
        for request in self.requests:
            request.unfinished.add(self.pool.owner)
        for name, located in fresh.items():
            self.where[name] = torch.cat([self.where[name], self._stack(located)], dim=1)
        self.tokens += tokens
        self._behind = len(self.given)

    def _stack(self, rows: Any) -> torch.Tensor:
        located = [torch.from_numpy(row) for row in rows]
        return torch.stack(located).to(
            self.pool.item_bytes_view(self.pool.layout.buffers[0]).device
        )

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes `[B, H, T, D]` of a layer's new tokens; returns all that its next tokens attend
        to, `[B, H, T_total, D]`.

        Raises ValueError if the states are not what the pool holds.
        """
        first, second = self._layer(layer_idx).update(key_states, value_states)
        return first, second

    def update_indexer(self, indexer_key_states: Any, layer_idx: int) -> torch.Tensor:
        """Writes index keys `[B, T, D]`; returns those of all tokens."""
        return self._layer(layer_idx).update_indexer(indexer_key_states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of a convolution `[B, channel, tap]`; None before the first token."""
        return self._layer(layer_idx).conv_state(state_idx)

    def update_conv_state(
        self, conv_states: Any, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Writes the last of `[B, channel, T]`; returns them behind what was there."""
        return self._layer(layer_idx).update_conv_state(conv_states, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Temporal state `[B, head, Dk, Dv]`; None before the first token."""
        return self._layer(layer_idx).recurrent_state(state_idx)

    def update_recurrent_state(
        self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Writes the temporal state, and the convolution's if the model changed it in place."""
        return self._layer(layer_idx).update_recurrent_state(recurrent_states, state_idx)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether any token is cached."""
        return self.get_seq_length(0 if layer_idx is None else layer_idx) > 0

    @property
    def is_linear(self) -> list[bool]:
        """Whether a layer keeps nothing of single tokens."""
        return [layer.is_linear for layer in self.pool_layers]

    def _layer(self, layer: int) -> PoolLayer:
        if layer >= len(self.layers) or not self.pool_layers[layer].states:
            raise ValueError(
                f"{self.pool.owner} layer {layer}: the model caches it, the pool holds "
                f"{self.pool.layers}. Build the pool with all of the model's layers."
            )
        return self.pool_layers[layer]

    prefetch = unsupported("prefetch", "A pool stays on the device that it was built on.")
    __deepcopy__ = unsupported("deepcopy", "Prefill a new PoolCache with the same tokens.")
