"""Slots of SGLang's allocators for what is read of a prompt, and block tables of what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.common import free_kv_row_segments
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from disagg.connectors.sglang.pools import SglangLayout
from disagg.store import DeferredAddress
from kvpool.layout import RequestAddress


@dataclass(frozen=True, kw_only=True)
class HeldSlots:
    """Slots of the tokens `positions` of a prompt. Of a window they have slots from
    `window_start` on.
    """

    positions: range
    tokens: torch.Tensor
    window_start: int
    state: torch.Tensor | None
    """The slot of the state after them."""
    anchor: Any
    """The node of the tree that they follow, and the lock that keeps it."""
    lock: Any
    address: DeferredAddress


class Slots:
    """Slots of a cache's pools."""

    def __init__(self, cache: Any, layout: SglangLayout) -> None:
        self._cache, self._layout = cache, layout
        self._allocator = cache.token_to_kv_pool_allocator
        self._requests = cache.req_to_token_pool
        self._page: int = cache.page_size

    def fits(self, tokens: int) -> bool:
        """Whether a pool is large enough for a place of so many tokens, if nothing else were in
        it.
        """
        size = self._allocator.size_full if self._cache.supports_swa() else self._allocator.size
        return bool(tokens < size)

    def allocate(self, anchor: Any, positions: range, *, evict: bool) -> HeldSlots | None:
        """Slots behind a node, if there are any free; `evict`: others give way."""
        count, window_start = len(positions), positions.start
        if self._cache.supports_swa():
            first = (positions.stop - self._cache.sliding_window_size) // self._page * self._page
            window_start = max(window_start, first)
        lock = self._cache.lock(anchor)  # before others give way
        slots = self._take(count, positions.stop - window_start, evict)
        if slots is None:
            self._cache.unlock(lock)
            return None
        tokens, state = slots
        return HeldSlots(
            positions=positions,
            tokens=tokens,
            window_start=window_start,
            state=state,
            anchor=anchor,
            lock=lock,
            address=self.address(tokens, positions, window_start, state),
        )

    def _take(
        self, count: int, window: int, evict: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        allocator, swa = self._allocator, self._cache.supports_swa()
        mamba = self._requests.mamba_allocator if self._cache.supports_mamba() else None
        full = allocator.full_attn_allocator if swa else allocator
        lacking = {
            "num_tokens": max(0, count - full.available_size()),
            "swa_num_tokens": max(0, window - allocator.swa_available_size()) if swa else 0,
            "mamba_num": max(0, 1 - mamba.available_size()) if mamba else 0,
        }
        if any(lacking.values()):
            if not evict:
                return None
            self._cache.evict_for_alloc(EvictParams(**lacking))
            return self._take(count, window, evict=False)
        tokens = full.alloc(count)
        if tokens is None:
            return None
        if swa:
            allocator.clear_full_to_swa_mapping(tokens)
            allocator.set_full_to_swa_mapping(
                tokens[count - window :], allocator.swa_attn_allocator.alloc(window)
            )
        return tokens.to(torch.int64), mamba.alloc(1) if mamba else None

    def address(
        self, tokens: torch.Tensor, positions: range, window_start: int, state: torch.Tensor | None
    ) -> DeferredAddress:
        """The block table of a request's `positions`, whose slots are `tokens`. The allocators are
        not for other threads, and are asked now; they change no tensor that they have given.
        """
        slots = tokens[:: self._page]
        states: list[Any] = []
        for kind in self._layout.state_types:
            if kind == "swa":
                skipped = (window_start - positions.start) // self._page
                swa = self._allocator.translate_swa_indices_for_transfer(slots)
                states.append(swa[skipped:].cpu())
            elif state is not None:
                states.append(self._requests.translate_mamba_indices(state).cpu())
            else:
                states.append(None)
        make = partial(self._table, positions, slots.cpu(), states)
        return DeferredAddress(positions.stop, make)

    def _table(self, positions: range, slots: torch.Tensor, states: list[Any]) -> RequestAddress:
        page, units = self._page, {"swa": self._page}
        indices = [
            None if state is None else state.numpy() // units.get(kind, 1)
            for kind, state in zip(self._layout.state_types, states)
        ]
        pages, first = slots.numpy() // page, positions.start // page
        return self._layout.address(positions.stop, pages, indices, first)

    def held(self, req: Any, tokens: int, *, state: bool) -> RequestAddress:
        """The block table of the first `tokens` tokens of a request that runs."""
        row = self._requests.req_to_token[req.kv.req_pool_idx, :tokens].to(torch.int64)
        alive = 0
        if self._cache.supports_swa():  # of its window the last slots that no other has
            swa = self._allocator.translate_swa_indices_for_transfer(row[:: self._page])
            gone = np.flatnonzero(swa.cpu().numpy() < self._page)
            alive = (int(gone[-1]) + 1) * self._page if gone.size else 0
        slot = req.kv.mamba_pool_idx.reshape(1) if state and req.kv.holds_mamba else None
        return self.address(row, range(tokens), alive, slot).make()

    def insert(self, place: HeldSlots, key: Any) -> None:
        """Gives a place to the tree, as the state of a prompt `key`."""
        cache, start = self._cache, place.positions.start
        tokens = place.tokens
        if start:
            tokens = torch.cat([cache.path_device_indices(place.anchor)[:start], tokens])
        result = cache.insert(
            InsertParams(
                key=key,
                value=tokens,
                mamba_value=place.state,
                prev_prefix_len=start,
                inserted_len=len(key),
                component_evicted_seqlens={ComponentType.SWA: place.window_start},
            )
        )
        if place.state is not None and result.mamba_exist:
            self._requests.mamba_allocator.free(place.state)
        cache.unlock(place.lock)

    def free(self, place: HeldSlots) -> None:
        start = place.positions.start
        free_kv_row_segments(
            self._allocator,
            [(place.tokens, start)],
            swa_evicted_seqlen=place.window_start,
            swa_dead_lo=start,
        )
        if place.state is not None:
            self._requests.mamba_allocator.free(place.state)
        self._cache.unlock(place.lock)
