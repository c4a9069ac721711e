"""A `transformers` Cache whose states live in a pool.

Row b of a batch is one request. Columns are what a model counts its positions by; the token of row
b in column c is its position c - padding[b], and no column before is in the pool. The pool's kinds
of state say what each layer caches, and in what shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from kvpool.allocation.allocator import Allocator, Request
from kvpool.integrations.padding import PADDING, Padding, right_aligned
from kvpool.integrations.pool_layer import PoolLayer, unsupported
from kvpool.integrations.progress import PROGRESS, Progress, copy_progress
from kvpool.layout.dtypes import PACKINGS, dtype_name
from kvpool.layout.formats import IndexKey, LinearState
from kvpool.pools.base import KVPool
from kvpool.pools.states import UnionPool


def pool_for(config: PreTrainedConfig, **common: Any) -> KVPool:
    """The pool that a model of this config caches into; `common` goes to the pool's constructor.

    Index keys are not rounded either: they have the pool's dtype, or fp8 if its packing is one.
    """
    from kvpool.models import declare

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
            from kvpool.integrations.minimax import MiniMaxPoolCache

            cls = MiniMaxPoolCache
        return super().__new__(cls)

    def __init__(
        self,
        pool: UnionPool,
        allocator: Allocator,
        requests: Sequence[Request],
        padding: npt.ArrayLike = 0,
    ) -> None:
        self.pool, self.allocator, self.requests = pool, allocator, tuple(requests)
        if len({id(request) for request in requests}) != len(requests) or not requests:
            raise ValueError(f"requests: one or more, each once, got {len(requests)}.")
        if not isinstance(pool, UnionPool):
            name = type(pool).__name__
            raise ValueError(f"{name}: PoolCache needs a UnionPool, which has kinds of state.")
        if pool not in allocator.pools:
            raise ValueError("allocator: it allocates another pool's items. Use Allocator(pool).")
        located = [allocator.locations(request) for request in requests]
        self.progress = [PROGRESS.setdefault(request, Progress()) for request in requests]
        for request, progress in zip(requests, self.progress):
            progress.truncate(pool, request.num_tokens)
        if copy_progress not in allocator.on_fork:
            allocator.on_fork.append(copy_progress)
        if any(pool.owner in progress.unfinished for progress in self.progress):
            raise ValueError("the last forward over a request did not finish. Free it.")
        lengths = [
            max(progress.written.get(pool.owner, request.num_tokens), request.received_tokens)
            for request, progress in zip(requests, self.progress)
        ]
        self.padding = Padding.of(padding, lengths, pool.layout.spaces)
        self.columns = self.padding.columns
        # flat locations [B, columns] by space; PADDING where there is no token
        self.where = {
            name: self._stack([row[name][:n] for row, n in zip(located, lengths)], self.columns)
            for name in located[0]
        }
        self.pool_layers = [PoolLayer(self, layer) for layer in range(pool.end_layer)]
        blocks = [each.layer for each in self.pool_layers if each.selects_blocks]
        if blocks and any(self.padding.before):
            raise ValueError(
                f"{pool.owner} layer {blocks[0]} index_key: padding {list(self.padding.before)}, "
                "but the model selects blocks of columns. Make a batch of each length."
            )
        # columns written, by layer and state
        self.written = {
            (layer.layer, name): self.columns for layer in self.pool_layers for name in layer.states
        }
        self._behind = 0  # states that lack the tokens of this forward
        self.query_length = 0  # of the forward whose mask was made last
        self.failed: Exception | None = None
        Cache.__init__(self, layers=list(self.pool_layers))  # its subclasses make other layers

    @classmethod
    def new(
        cls,
        pool: UnionPool,
        allocator: Allocator,
        batch_size: int = 1,
        padding: npt.ArrayLike = 0,
    ) -> PoolCache:
        """Over fresh requests."""
        requests = [allocator.new_request() for _ in range(batch_size)]
        return cls(pool, allocator, requests, padding)

    def inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        """What a model must be told of the next forward over `tokens` columns: `attention_mask`
        `[B, columns so far and these]`, 0 where a column is padding, and `position_ids` `[B, T]`.
        Models without attention take a mask of these columns only.
        """
        columns = torch.arange(self.columns + tokens, device=self._device)
        positions = columns - torch.tensor(self.padding.before, device=self._device)[:, None]
        seen = self.columns if all(self.is_linear) else 0
        return {
            "attention_mask": (positions[:, seen:] >= 0).long(),
            "position_ids": positions[:, self.columns :].clamp(min=0),
        }

    def advance(self, layer: int, state: str, tokens: int) -> int:
        """Counts `tokens` new columns of a layer's state; returns the first.

        The first state of a forward allocates for all. If too few items are free, raises
        OutOfPages, and RequestPinned where a room needs a state that would be overwritten; both
        change nothing.
        """
        start = self.written[layer, state]
        if start == self.columns:
            self._extend(tokens)
        elif start + tokens != self.columns:
            raise ValueError(
                f"layer {layer} {state}: {tokens} new tokens, other states {self.columns - start}."
            )
        self.written[layer, state] = start + tokens
        self._behind -= 1
        if self._behind == 0:
            for progress, held in zip(self.progress, self.padding.tokens(self.columns)):
                progress.written[self.pool.owner] = held
                progress.unfinished.discard(self.pool.owner)
        return start

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` columns of every row, a negative number: drafts
        that were rejected. See Allocator.truncate, which refuses where state was overwritten; then
        nothing was changed.
        """
        length = self.columns + tokens_to_remove
        if not 0 <= length <= self.columns:
            raise ValueError(
                f"crop: {-self.columns} to 0, minus the tokens to remove, got {tokens_to_remove}."
            )
        if length == self.columns:
            return
        if any(count != self.columns for count in self.written.values()):
            raise ValueError("the last forward over a request did not finish. Free it.")
        held = self.padding.tokens(length)
        left = [min(n, request.num_tokens) for n, request in zip(held, self.requests)]
        for progress, n in zip(self.progress, held):
            replace(progress).truncate(self.pool, n)  # raises before anything is changed
        self.allocator.truncate_batch(self.requests, left)
        for progress, n in zip(self.progress, held):
            progress.truncate(self.pool, n)
        self.where = {name: where[:, :length] for name, where in self.where.items()}
        self.written = dict.fromkeys(self.written, length)
        self.columns = length

    def tokens_only(self, where: torch.Tensor, *states: torch.Tensor) -> list[torch.Tensor]:
        """The locations `[B, T]` of new columns that are tokens, flat, and their states, each
        `[B * T, ...]`.
        """
        flat = [where.flatten(), *states]
        if self.columns - where.shape[1] >= max(self.padding.before):
            return flat
        kept = flat[0] != PADDING
        return [each[kept] for each in flat]

    def read(self, where: torch.Tensor, load: Callable[[torch.Tensor], Any]) -> Any:
        """What `load` reads at locations `[N]`, each `[N, ...]` or None, with zeros where there is
        no token.
        """
        if not any(self.padding.before):
            return load(where)
        empty = where == PADDING
        return [
            x if x is None else x.masked_fill(empty.view(-1, *[1] * (x.dim() - 1)), 0)
            for x in load(where.masked_fill(empty, 0))  # the reserved item
        ]

    def fail(self, error: Exception) -> None:
        """Keeps why a state changed in place was not written, for the next call to raise."""
        self.failed = error
        if len(self.written) == 1:  # no other state of this forward is there to raise it
            for progress in self.progress:
                progress.unfinished.add(self.pool.owner)

    def check(
        self,
        layer: int,
        role: str,
        given: torch.Tensor,
        shape: tuple[int, ...],
        dtype: str,
        widen: bool = False,
    ) -> None:
        """Raises ValueError unless a state has all rows, `shape` and `dtype` (with `widen`, or a
        narrower dtype).
        """
        held = getattr(torch, dtype_name(dtype))
        memory = self.pool.layout.buffers[0].memory
        wide = torch.promote_types(given.dtype, held) if widen else given.dtype
        found = tuple(given.shape), wide, str(given.device)
        if found != ((len(self.requests), *shape), held, memory):
            taken = [len(self.requests), *shape]
            raise ValueError(
                f"{self.pool.owner} layer {layer} {role}: the model gives {list(given.shape)} "
                f"{given.dtype} on {given.device}, the pool and its requests take {taken} {held} "
                f"on {memory}. Build the pool unsharded, with the model's dims, dtype and device, "
                "and the cache with a request for every row."
            )
        if given.requires_grad:
            raise ValueError(
                f"{self.pool.owner} layer {layer} {role}: gradients are not supported. Run the "
                "model in torch.no_grad()."
            )

    def _extend(self, columns: int) -> None:
        behind = [key for key, count in self.written.items() if count != self.columns]
        if behind:
            layer, state = behind[0]
            raise RuntimeError(
                f"layer {layer} {state}: {self.written[behind[0]]} tokens, others {self.columns}. "
                "Either a forward did not finish (free the requests), or it changed the state in "
                "place and something still holds the tensor (let go of it), or the model has no "
                "such state (build the pool for this model)."
            )
        held, after = self.padding.tokens(self.columns), self.padding.tokens(self.columns + columns)
        more = [b - a for a, b in zip(held, after)]
        room = [request.num_tokens - n for request, n in zip(self.requests, held)]
        others = {region.owner for region in self.allocator.layout.regions} - {self.pool.owner}
        fresh: Mapping[str, Any]
        if not any(room):
            found = self.allocator.extend_batch(self.requests, more)
            fresh = {name: [row[:n] for row, n in zip(x, more)] for name, x in found.items()}
            for progress, n in zip(self.progress, held):
                for owner in others:
                    progress.written.setdefault(owner, n)
        elif others and room == more:  # a draft's forward after its target's
            rows = [self.allocator.locations(request) for request in self.requests]
            fresh = {name: [row[name][n:] for row, n in zip(rows, held)] for name in rows[0]}
            gone = [s.name for s in self.allocator.spaces if not s.per_request]
            gone = [name for name in gone if any((row < 0).any() for row in fresh[name])]
            if gone:
                raise ValueError(
                    f"space {gone[0]}: tokens left the window before {self.pool.owner} wrote "
                    "them. Run its forward after each of the target's."
                )
        else:
            row = next(row for row, n in enumerate(room) if n)
            raise ValueError(
                f"row {row}: the request has {self.requests[row].num_tokens} tokens, this cache "
                f"wrote {held[row]}. Give it the same tokens, or requests of its own."
            )
        for progress in self.progress:
            progress.unfinished.add(self.pool.owner)
        for name, located in fresh.items():
            self.where[name] = torch.cat([self.where[name], self._stack(located, columns)], dim=1)
        self.columns += columns
        self._behind = len(self.written)
        self.query_length = 0

    def _stack(self, rows: Sequence[npt.NDArray[np.int64]], columns: int) -> torch.Tensor:
        return torch.from_numpy(right_aligned(rows, columns)).to(self._device)

    @property
    def _device(self) -> torch.device:
        return self.pool.item_bytes_view(self.pool.layout.buffers[0]).device

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

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether any token is cached."""
        return self.get_seq_length(0 if layer_idx is None else layer_idx) > 0

    @property
    def is_linear(self) -> list[bool]:
        """Whether a layer has linear attention only."""
        return [layer.is_linear for layer in self.pool_layers]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(tokens that the next forward attends to, tokens dropped before them)."""
        self.query_length = query_length
        return super().get_mask_sizes(query_length, layer_idx)

    def _layer(self, layer: int) -> PoolLayer:
        if self.failed is not None:
            failed = self.failed
            if len(self.written) > 1:
                self.failed = None
            raise failed
        if layer >= len(self.layers) or not self.pool_layers[layer].states:
            raise ValueError(
                f"{self.pool.owner} layer {layer}: the model caches this layer, the pool holds "
                f"{self.pool.layers}. Build the pool with all layers of the model."
            )
        return self.pool_layers[layer]

    prefetch = unsupported("prefetch", "A pool stays on its device.")
    __deepcopy__ = unsupported("deepcopy", "Prefill a new PoolCache with the same tokens.")
