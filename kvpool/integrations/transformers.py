"""A `transformers` Cache whose keys and values live in a pool.

Row b of a batch is one request; the token in column t is its position t, padding included. What a
layer caches (K and V, or latent and rope) and in what shape is read from the pool's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.configuration_utils import PreTrainedConfig

from kvpool.allocator import Allocator, Request
from kvpool.layout import Region
from kvpool.pools.mha import MHAPool
from kvpool.pools.mla import MLAPool

Pool = MHAPool | MLAPool
FAMILIES = {"llama": MHAPool, "qwen3_moe": MHAPool, "deepseek_v3": MLAPool}


def pool_for(
    config: PreTrainedConfig, *, num_pages: int, page_size: int, dtype: Any, **common: Any
) -> Pool:
    """The pool that a model of this config caches into; `common` goes to the pool's constructor."""
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"model type {config.model_type!r}: known are {', '.join(FAMILIES)}. Build MHAPool or "
            "MLAPool by hand, with the heads and dims that the model caches."
        )
    layers = config.num_hidden_layers
    common = {"layers": range(layers), "total_kv_layers": layers, **common}
    common.update(num_pages=num_pages, page_size=page_size, dtype=dtype)
    if FAMILIES[config.model_type] is MLAPool:
        latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
        return MLAPool(kv_lora_rank=latent, qk_rope_head_dim=rope, **common)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return MHAPool(num_kv_heads=config.num_key_value_heads, head_dim=head_dim, **common)


def _unsupported(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"PoolCache: {name} is not supported. {instead}")

    return refuse


class PoolCache(Cache):
    """Row b of the batch is `requests[b]`; tokens that they already have count as cached.

    Raises ValueError if their numbers of tokens differ. Whoever made the requests frees them.
    """

    def __init__(self, pool: Pool, allocator: Allocator, requests: Sequence[Request]) -> None:
        self.pool, self.allocator, self.requests = pool, allocator, tuple(requests)
        if len({id(request) for request in requests}) != len(requests) or not requests:
            raise ValueError(f"requests: one or more, each once, got {len(requests)}.")
        space, pages = pool.layout.space_by_name["kv"], pool.num_pages
        if allocator.space != space or allocator.num_pages > pages:
            raise ValueError(
                f"allocator: {allocator.num_pages} pages of {allocator.space}, the pool has {pages}"
                f" of {space}. Build it as Allocator(pool)."
            )
        self._held = {n: [(r, pool.view(r.role, n)) for r in _pair(pool, n)] for n in pool.layers}
        located = [torch.from_numpy(allocator.locations(r)["kv"]) for r in requests]
        lengths = [row.numel() for row in located]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"requests: {lengths} tokens. Pad rows on the left, or make a batch of each length."
            )
        # flat entry locations [B, T] of all tokens, and how many of them each layer has been given
        self._locations = torch.stack(located).to(self._held[pool.start_layer][0][1].device)
        self._cached = dict.fromkeys(pool.layers, lengths[0])
        super().__init__(layers=[PoolLayer(self, layer) for layer in range(pool.end_layer)])

    @classmethod
    def new(cls, pool: Pool, allocator: Allocator, batch_size: int = 1) -> PoolCache:
        """Over fresh requests."""
        return cls(pool, allocator, [allocator.new_request() for _ in range(batch_size)])

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes `[B, H, T, D]` of a layer's new tokens; returns all tokens `[B, H, T_total, D]`.

        The first layer of a forward takes the pages for all layers. Raises OutOfPages, and changes
        nothing, if they are too few; ValueError if the states are not what the pool holds.
        """
        if layer_idx not in self._held:
            raise ValueError(
                f"{self.pool.owner} layer {layer_idx}: the model caches it, the pool holds "
                f"{self.pool.layers}. Build the pool with all of the model's layers."
            )
        held, both = self._held[layer_idx], (key_states, value_states)
        rows, _, tokens, _ = key_states.shape
        for (region, view), states in zip(held, both):
            self._check(region, view, states, tokens)
        start, end = self._cached[layer_idx], self._locations.shape[1]
        if start == end:
            self._extend(tokens)
        elif start + tokens != end:
            raise ValueError(f"layer {layer_idx}: {tokens} new tokens, others got {end - start}.")
        a, b = (x.transpose(1, 2).reshape(-1, *view.shape[2:]) for x, (_, view) in zip(both, held))
        self.pool.set_kv_buffer(layer_idx, self._locations[:, start:].flatten(), a, b)
        self._cached[layer_idx] = start + tokens
        loaded = self.pool.get_kv_buffer(layer_idx, self._locations.flatten())
        a, b = (x.reshape(rows, start + tokens, *y.shape[1::2]) for x, y in zip(loaded, both))
        return a.transpose(1, 2).contiguous(), b.transpose(1, 2).contiguous()

    def _extend(self, tokens: int) -> None:
        length = self._locations.shape[1]
        behind = [layer for layer, cached in self._cached.items() if cached != length]
        if behind:
            raise RuntimeError(
                f"layers {behind}: {self._cached[behind[0]]} tokens, others {length}. Either a "
                "forward failed half-way (free the requests), or the model has no such layers."
            )
        for row, request in enumerate(self.requests):
            held = request.address().num_tokens
            if held != length:
                raise ValueError(f"row {row}: {held} tokens, not {length}. Build a new PoolCache.")
        fresh = self.allocator.extend_batch(self.requests, tokens)["kv"]
        located = torch.from_numpy(fresh).to(self._locations.device)
        self._locations = torch.cat([self._locations, located], dim=1)

    def _check(self, region: Region, view: torch.Tensor, states: torch.Tensor, tokens: int) -> None:
        heads, dim = (1, *view.shape[2:])[-2:]
        given = f"{list(states.shape)} {states.dtype} on {states.device}"
        held = f"{[len(self.requests), heads, tokens, dim]} {view.dtype} on {view.device}"
        if given != held:
            head = region.axis("head")
            part = f" (heads {head.start}-{head.stop - 1} of {head.total})" if head else ""
            raise ValueError(
                f"{region}: the model gives [B, H, T, D] {given}, the pool and its requests take "
                f"{held}{part}. Build the pool unsharded, with the model's dims, dtype and device "
                "(nothing is rounded), and the cache with a request for every row."
            )
        if states.requires_grad:
            raise ValueError(f"{region}: no gradients are kept. Run the model in torch.no_grad().")

    prefetch = _unsupported("prefetch", "A pool stays on the device that it was built on.")
    __deepcopy__ = _unsupported("deepcopy", "Prefill a new PoolCache with the same tokens.")


class PoolLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a PoolCache; it grows as a DynamicLayer does, within the pool."""

    def __init__(self, cache: PoolCache, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache, self.layer, self.batch_size = cache, layer, len(cache.requests)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is left to do: the pool has its memory."""

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> Any:
        return self.cache.update(key_states, value_states, self.layer)

    def get_seq_length(self) -> int:
        """Tokens cached for this layer; for one that the pool does not hold, for all others."""
        return self.cache._cached.get(self.layer, min(self.cache._cached.values()))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens that the next forward attends to, 0: none is dropped at the front)."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1, no maximum: free pages are the bound, and all requests share them."""
        return -1

    reset = _unsupported("reset", "Free the requests and build a new PoolCache.")
    crop = _unsupported("crop", "Requests do not shrink: free them, prefill what is to stay.")
    activate_past_recording = _unsupported("past recording", "Decode without an assistant model.")
    reorder_cache = _unsupported("reorder_cache", "Decode without beams, or with a DynamicCache.")
    batch_repeat_interleave = _unsupported("repeating rows", "Prefill a request for every row.")
    batch_select_indices = _unsupported("selecting rows", "Build one of the requests to keep.")
    offload = _unsupported("offload", "A pool stays on the device that it was built on.")


def _pair(pool: Pool, layer: int) -> tuple[Region, Region]:
    """The two regions of a layer, in the order in which the pool writes and reads them."""
    held = [r for r in pool.layout.regions if (r.owner, r.layer) == (pool.owner, layer)]
    axes = {axis.name for region in held for axis in region.axes}
    spaces = {pool.layout.buffer_of(region).space for region in held}
    if len(held) != 2 or not {"entry"} <= axes <= {"entry", "head"} or spaces != {"kv"}:
        raise ValueError(
            f"{pool.owner} layer {layer}: roles {[r.role for r in held]}, axes {sorted(axes)}, "
            f"spaces {sorted(spaces)}. PoolCache takes two roles of entries (and heads) in 'kv'."
        )
    return held[0], held[1]
