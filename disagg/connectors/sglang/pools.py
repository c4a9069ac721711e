"""From SGLang's memory pools to the layout of one rank, and from its indices to block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg.connectors.sglang.states import Ranks, read_pool
from disagg.connectors.tensors import PlacedTensor, layout_of
from kvpool.layout import PoolLayout, RequestAddress, Space, Span

IDS = {"swa": ("swa", "c4.ring"), "mamba": ("state",), "c128_state": ("c128.ring",)}
"""The spaces whose items a component of SGLang's state lists; others list those of the pages."""


@dataclass(frozen=True)
class SglangLayout:
    """What a rank's pools mean, and how SGLang's indices address them. `state_types`: of KVArgs."""

    layout: PoolLayout
    state_types: tuple[str, ...] = ()

    @property
    def held_back(self) -> int:
        """How many positions wait for the last chunk, with which SGLang lists pages of windows."""
        spaces = (s for s in self.layout.spaces if s.ids is None and not s.per_request)
        tails = (s.window + s.window_step - 1 for s in spaces if s.window is not None)
        return max(tails, default=0)

    def address(
        self,
        tokens: int,
        kv_indices: npt.ArrayLike,
        state_indices: Sequence[Any] | None = None,
        first_page: int = 0,
    ) -> RequestAddress:
        """The block table of a request's first `tokens` positions.

        `kv_indices` are its pages from number `first_page` on; `state_indices` are parallel to
        `state_types` (None: pages only, as for a chunk that is not the last).
        """
        spans = {"kv": Span(np.asarray(kv_indices), first_page)}
        for kind, indices in zip(self.state_types, state_indices or ()):
            for name in IDS.get(kind, ()):
                space = self.layout.space_by_name.get(name)
                if space is not None and indices is not None:
                    ids = np.asarray(indices, dtype=np.int64).ravel()
                    spans[name] = self.span_of(space, ids, tokens)
        return RequestAddress(tokens, spans)

    def span_of(self, space: Space, ids: npt.NDArray[np.int64], tokens: int) -> Span:
        """What SGLang's indices of a component mean in a space."""
        if space.per_request:  # of a ring, SGLang lists the part with the open window, if any
            return Span(ids // (space.entries_per_item // space.window_step))
        page = self.layout.space_by_name["kv"].tokens_per_item
        first = -(-tokens // page) - ids.size  # the last page has the last position
        ratio = page // space.entries_per_item
        items = Span.from_blocks(ids, null=-1, items_per_block=ratio).ids
        return Span(items, first * ratio)


@dataclass(frozen=True, kw_only=True)
class ModelPools:
    """What one model of a rank keeps: its `token_to_kv_pool`, and its `req_to_token_pool`
    (`requests`), which may have the slots of linear attention.
    """

    tokens: Any
    ranks: Ranks
    requests: Any | None = None


def engine_layout(
    target: Any,
    ranks: Ranks,
    *,
    state_types: Sequence[Any],
    total_layers: int,
    drafts: Sequence[ModelPools] = (),
    requests: Any | None = None,
    model: str = "",
) -> SglangLayout:
    """The layout of a rank's pools: `token_to_kv_pool` and `req_to_token_pool` (`requests`) of a
    target model of `total_layers` layers, and those of the modules of its draft, whose layers are
    numbered from 0 on, module by module. `state_types`: those of SGLang's KVArgs.

    Raises UnknownFormat, which names the owner, the pool's class and what is known, and LayoutError
    where its tensors cannot be described.
    """
    models = [ModelPools(tokens=target, ranks=ranks, requests=requests), *drafts]
    states: list[PlacedTensor] = []
    slots: list[Any] = []
    layers = 0  # of the draft
    for owner, pools in zip(("target", *("draft" for _ in drafts)), models):
        tensors = read_pool(pools.tokens, pools.ranks, owner)
        for holder in (pools.tokens, pools.requests):
            pool = getattr(holder, "mamba_pool", None)
            # a draft of a hybrid names its target's slots, in which it keeps nothing
            if pool is not None and not any(pool is slot_pool for slot_pool in slots):
                slots.append(pool)
                tensors += read_pool(pool, pools.ranks, owner)
        if owner == "draft":
            numbers = {
                n: layers + index for index, n in enumerate(sorted({t.number for _, t in tensors}))
            }
            tensors = [(space, replace(t, number=numbers[t.number])) for space, t in tensors]
            layers += len(numbers)
        states += tensors
    pages = Space("kv", entries_per_item=getattr(target, "page_size", 1))
    layout = layout_of(states, total_layers, model, pages)
    return SglangLayout(layout, tuple(str(getattr(kind, "value", kind)) for kind in state_types))
