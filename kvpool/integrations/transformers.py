"""A `transformers` Cache whose states live in a pool.

Row b of a batch is one request; the token in column t is its position t, padding included. The
pool's kinds of state say what each layer caches, and in what shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from kvpool.allocator import Allocator, Request
from kvpool.integrations.pool_layer import PoolLayer, unsupported
from kvpool.layout.dtypes import PACKINGS
from kvpool.pools.base import KVPool
from kvpool.pools.composite import UnionPool


def pool_for(config: PreTrainedConfig, **common: Any) -> KVPool:
    """The pool that a model of this config caches into; `common` goes to the pool's constructor.

    Index keys are not rounded either: they have the pool's dtype, or fp8 if its packing is one.
    """
    from kvpool.models import declare

    declared = declare(config.to_dict())
    if declared.pool.has_index_packing and common.get("packing") not in PACKINGS:
        common.setdefault("index_packing", common.get("dtype") or common.get("packing"))
    return declared.build(**common)


@dataclass
class Progress:
    """What the caches of each owner (target, draft) have written of one request.

    `written`: tokens, where fewer than the request has; `unfinished`: owners of whose last forward
    some layers were not written.
    """

    written: dict[str, int] = field(default_factory=dict)
    unfinished: set[str] = field(default_factory=set)

    def truncate(self, pool: UnionPool, tokens: int) -> None:
        """Forgets what was written after `tokens` tokens. Raises ValueError if they end inside a
        window that a compressor of `pool` has closed: it keeps the window's gates no more.
        """
        for space in pool.layout.spaces if self.written.get(pool.owner, 0) > tokens else ():
            step, end = space.window_step, self.written[pool.owner]
            if space.window and step > 1 and tokens % step and tokens // step < end // step:
                raise ValueError(
                    f"space {space.name}: {tokens} tokens end inside a window of {step} that was "
                    f"compressed. Keep {tokens // step * step} tokens."
                )
        self.written = {owner: min(count, tokens) for owner, count in self.written.items()}


_PROGRESS: WeakKeyDictionary[Request, Progress] = WeakKeyDictionary()


def _copy_progress(request: Request, child: Request, tokens: int) -> None:
    """Called when a request is forked."""
    if progress := _PROGRESS.get(request):
        if progress.unfinished:
            raise ValueError("the last forward over this request did not finish. Free it.")
        written = {owner: min(count, tokens) for owner, count in progress.written.items()}
        _PROGRESS[child] = Progress(written)


class PoolCache(Cache):
    """Row b of the batch is `requests[b]`; the tokens that requests already have count as cached.

    Raises ValueError if their numbers of tokens differ. The caller frees the requests.
    """

    def __init__(self, pool: UnionPool, allocator: Allocator, requests: Sequence[Request]) -> None:
        self.pool, self.allocator, self.requests = pool, allocator, tuple(requests)
        if len({id(request) for request in requests}) != len(requests) or not requests:
            raise ValueError(f"requests: one or more, each once, got {len(requests)}.")
        if not isinstance(pool, UnionPool):
            name = type(pool).__name__
            raise ValueError(f"{name}: PoolCache needs a UnionPool, which has kinds of state.")
        if pool not in allocator.pools:
            raise ValueError("allocator: it allocates another pool's items. Use Allocator(pool).")
        located = [allocator.locations(request) for request in requests]
        self.progress = [_PROGRESS.setdefault(request, Progress()) for request in requests]
        for request, progress in zip(requests, self.progress):
            progress.truncate(pool, request.num_tokens)
        if _copy_progress not in allocator.on_fork:
            allocator.on_fork.append(_copy_progress)
        if any(pool.owner in progress.unfinished for progress in self.progress):
            raise ValueError("the last forward over a request did not finish. Free it.")
        lengths = [
            max(progress.written.get(pool.owner, request.num_tokens), request.received_tokens)
            for request, progress in zip(requests, self.progress)
        ]
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
        # tokens written, by layer and state
        self.written = {
            (layer.layer, name): self.tokens for layer in self.pool_layers for name in layer.states
        }
        self._behind = 0  # states that lack the tokens of this forward
        super().__init__(layers=list(self.pool_layers))

    @classmethod
    def new(cls, pool: UnionPool, allocator: Allocator, batch_size: int = 1) -> PoolCache:
        """Over fresh requests."""
        return cls(pool, allocator, [allocator.new_request() for _ in range(batch_size)])

    def advance(self, layer: int, state: str, tokens: int) -> int:
        """Counts `tokens` new tokens of a layer's state; returns the position of the first.

        The first state of a forward allocates for all. If too few items are free, raises
        OutOfPages, and RequestPinned where a room needs a state that would be overwritten; both
        change nothing.
        """
        start = self.written[layer, state]
        if start == self.tokens:
            self._extend(tokens)
        elif start + tokens != self.tokens:
            raise ValueError(
                f"layer {layer} {state}: {tokens} new tokens, other states {self.tokens - start}."
            )
        self.written[layer, state] = start + tokens
        self._behind -= 1
        if self._behind == 0:
            for progress in self.progress:
                progress.written[self.pool.owner] = self.tokens
                progress.unfinished.discard(self.pool.owner)
        return start

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens of every row, a negative number: drafts
        that were rejected. See Allocator.truncate, which refuses where state was overwritten; then
        nothing was changed.
        """
        length = self.tokens + tokens_to_remove
        if not 0 <= length <= self.tokens:
            raise ValueError(
                f"crop: {-self.tokens} to 0, minus the tokens to remove, got {tokens_to_remove}."
            )
        if length == self.tokens:
            return
        if any(count != self.tokens for count in self.written.values()):
            raise ValueError("the last forward over a request did not finish. Free it.")
        left = [min(length, request.num_tokens) for request in self.requests]
        for progress in self.progress:
            replace(progress).truncate(self.pool, length)  # raises before anything is changed
        self.allocator.truncate_batch(self.requests, left)
        for progress in self.progress:
            progress.truncate(self.pool, length)
        self.where = {name: where[:, :length] for name, where in self.where.items()}
        self.written = dict.fromkeys(self.written, length)
        self.tokens = length

    def _extend(self, tokens: int) -> None:
        behind = [key for key, count in self.written.items() if count != self.tokens]
        if behind:
            layer, state = behind[0]
            raise RuntimeError(
                f"layer {layer} {state}: {self.written[behind[0]]} tokens, others {self.tokens}. "
                "Either a forward did not finish (free the requests), or the model has no such "
                "state."
            )
        room = [request.num_tokens - self.tokens for request in self.requests]
        others = {region.owner for region in self.allocator.layout.regions} - {self.pool.owner}
        fresh: Mapping[str, Any]
        if not any(room):
            fresh = self.allocator.extend_batch(self.requests, tokens)
            for progress in self.progress:
                for owner in others:
                    progress.written.setdefault(owner, self.tokens)
        elif others and set(room) == {tokens}:  # a draft's forward after its target's
            rows = [self.allocator.locations(request) for request in self.requests]
            fresh = {name: [row[name][self.tokens :] for row in rows] for name in rows[0]}
            gone = [s.name for s in self.allocator.spaces if not s.per_request]
            gone = [name for name in gone if any((row < 0).any() for row in fresh[name])]
            if gone:
                raise ValueError(
                    f"space {gone[0]}: tokens left the window before {self.pool.owner} wrote "
                    "them. Run its forward after each of the target's."
                )
        else:
            row = next(row for row, more in enumerate(room) if more)
            raise ValueError(
                f"row {row}: the request has {self.requests[row].num_tokens} tokens, this cache "
                f"wrote {self.tokens}. Give it the same tokens, or requests of its own."
            )
        for progress in self.progress:
            progress.unfinished.add(self.pool.owner)
        for name, located in fresh.items():
            self.where[name] = torch.cat([self.where[name], self._stack(located)], dim=1)
        self.tokens += tokens
        self._behind = len(self.written)

    def _stack(self, rows: Any) -> torch.Tensor:
        located = [torch.from_numpy(row) for row in rows]
        return torch.stack(located).to(
            self.pool.item_bytes_view(self.pool.layout.buffers[0]).device
        )

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes `[B, H, T, D]` of a layer's new tokens; returns what these attend to,
        `[B, H, T_total, D]`. Raises ValueError if the states do not fit the pool.
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
        """Writes the last of `[B, channel, T]`; returns all of them after the previous state."""
        return self._layer(layer_idx).update_conv_state(conv_states, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Temporal state `[B, head, Dk, Dv]`; None before the first token."""
        return self._layer(layer_idx).recurrent_state(state_idx)

    def update_recurrent_state(
        self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Writes the temporal state, and the conv state if the model changed it in place."""
        return self._layer(layer_idx).update_recurrent_state(recurrent_states, state_idx)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether any token is cached."""
        return self.get_seq_length(0 if layer_idx is None else layer_idx) > 0

    @property
    def is_linear(self) -> list[bool]:
        """Whether a layer has linear attention only."""
        return [layer.is_linear for layer in self.pool_layers]

    def _layer(self, layer: int) -> PoolLayer:
        if layer >= len(self.layers) or not self.pool_layers[layer].states:
            raise ValueError(
                f"{self.pool.owner} layer {layer}: the model caches this layer, the pool holds "
                f"{self.pool.layers}. Build the pool with all layers of the model."
            )
        return self.pool_layers[layer]

    prefetch = unsupported("prefetch", "A pool stays on its device.")
    __deepcopy__ = unsupported("deepcopy", "Prefill a new PoolCache with the same tokens.")
