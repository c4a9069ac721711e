"""Pools of one family each: they say which states they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from typing_extensions import Unpack

from kvpool.layout import Space
from kvpool.layout.dtypes import dtype_name
from kvpool.layout.formats import (
    MHA,
    MLA,
    At,
    IndexKey,
    Kind,
    LinearState,
    Order,
    Ring,
    StateType,
    V4Latent,
)
from kvpool.pools.access import DTypeLike
from kvpool.pools.base import Common
from kvpool.pools.states import UnionPool


class MHAPool(UnionPool):
    """Multi-head and grouped-query attention: K and V apart, each `[page, entry, head, dim]`.

    `num_kv_heads` is that of the model; this rank holds its shard of them. `order`: `nhd` stores
    the heads of a token together, `hnd` the tokens of a head. Packings: `fp8` (a float32 scale per
    token and head) and `mxfp8` (a ue8m0 scale per 32 elements).
    """

    def __init__(
        self,
        *,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        order: Order = "nhd",
        **common: Unpack[Common],
    ) -> None:
        self.attention = MHA(num_kv_heads, head_dim, v_head_dim, order)
        super().__init__(**common)

    def states(self) -> Iterator[tuple[Kind, At]]:
        yield self.attention, self.at()


class MLAPool(UnionPool):
    """Rows of `kv_lora_rank` latent and `qk_rope_head_dim` rope elements (DeepSeek-V3: 512 + 64).

    Rows have no head axis: every rank of a tensor-parallel group holds them whole. Packing `fp8`:
    rows of 656 bytes.
    """

    def __init__(
        self, *, kv_lora_rank: int = 512, qk_rope_head_dim: int = 64, **common: Unpack[Common]
    ) -> None:
        self.attention = MLA(kv_lora_rank, qk_rope_head_dim)
        super().__init__(**common)

    def states(self) -> Iterator[tuple[Kind, At]]:
        yield self.attention, self.at()


class NSAPool(UnionPool):
    """An MLA pool with keys of `index_head_dim` elements on `index_layers` (default: all).

    `index_packing`: `fp8` (132 bytes for a key of 128) or a float dtype, independent of `packing`.
    """

    def __init__(
        self,
        *,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
        index_head_dim: int = 128,
        index_layers: Iterable[int] | None = None,
        index_packing: str = "fp8",
        **common: Unpack[Common],
    ) -> None:
        self.attention = MLA(kv_lora_rank, qk_rope_head_dim)
        self.index = IndexKey(index_head_dim)
        self.index_layers = None if index_layers is None else tuple(index_layers)
        self.index_packing = index_packing
        super().__init__(**common)

    def states(self) -> Iterator[tuple[Kind, At]]:
        yield self.attention, self.at()
        yield self.place(self.index, self.index_layers)


class SWAPool(UnionPool):
    """`window_layers` hold the last `window` tokens in a space of their own, other layers every
    token. `window_layers` are those of the whole model; this rank holds `layers` of them.

    `full` and `swa` are the attention of either kind of layer (`swa` default: as `full`).
    """

    def __init__(
        self,
        *,
        full: MHA | MLA,
        window_layers: Iterable[int],
        window: int,
        swa: MHA | MLA | None = None,
        window_page_size: int = 0,
        **common: Unpack[Common],
    ) -> None:
        self.full, self.swa, self.window = full, swa or full, window
        self.window_layers, self.windows = frozenset(window_layers), {window: "swa"}
        self.window_page_size = window_page_size or common.get("page_size", 0)
        super().__init__(**common)

    def states(self) -> Iterator[tuple[Kind, At]]:
        yield self.full, self.at(set(self.layers) - self.window_layers)
        yield self.place(self.swa, self.window_layers, window=self.window)


class HybridLinearPool(UnionPool):
    """`linear_layers` hold the state `linear` per request, `full_layers` (default: the others) the
    attention `full`, and with `index` the keys of a sparse indexer (on `index_layers`, default: all
    of them). A layer may hold both. Without `full` the pool has slots only.

    `conv_dtype` (default: that of the pool) and `temporal_dtype` (default: that of `linear`,
    float32) are those of the states.
    """

    def __init__(
        self,
        *,
        full: MHA | MLA | None = None,
        full_layers: Iterable[int] | None = None,
        linear: LinearState,
        linear_layers: Iterable[int],
        index: IndexKey | None = None,
        index_layers: Iterable[int] | None = None,
        index_packing: str = "fp8",
        conv_dtype: DTypeLike | None = None,
        temporal_dtype: DTypeLike | None = None,
        **common: Unpack[Common],
    ) -> None:
        if temporal_dtype is not None:
            linear = replace(linear, temporal_dtype=dtype_name(temporal_dtype))
        self.full, self.linear, self.index = full, linear, index
        self.linear_layers, self.conv_dtype = frozenset(linear_layers), conv_dtype
        self.full_layers = None if full_layers is None else frozenset(full_layers)
        self.index_layers = None if index_layers is None else frozenset(index_layers)
        self.index_packing = index_packing
        super().__init__(**common)

    def states(self) -> Iterator[tuple[Kind, At]]:
        full = self.full_layers
        if full is None:
            full = frozenset(self.layers) - self.linear_layers
        if self.full is not None:
            yield self.full, self.at(full)
        if self.index is not None:
            indexed = full if self.index_layers is None else full & self.index_layers
            yield self.place(self.index, indexed)
        yield self.place(self.linear, self.linear_layers)


class DSv4Pool(UnionPool):
    """DeepSeek-V4: a sliding window of latents on all layers; on some, compressed latents and the
    open windows that are not yet compressed.

    `compress_ratios`: for every layer of the model, 0 or the tokens of a compressed entry: 4
    (`overlap_ratio`: windows overlap, entries have index keys) or 128.

    Rings hold the keys and gates of open windows; with `speculation` they are twice as long, so
    that rejected tokens can be rolled back. With `page_rings` those of windows that overlap lie in
    a ring of each page of the sliding window, not of each request. `page_size` is in tokens.
    """

    def __init__(
        self,
        *,
        compress_ratios: Sequence[int],
        latent_dim: int = 448,
        qk_rope_head_dim: int = 64,
        index_head_dim: int = 128,
        index_packing: str = "fp8",
        overlap_ratio: int = 4,
        window: int = 128,
        window_page_size: int = 128,
        speculation: bool = False,
        page_rings: bool = False,
        **common: Unpack[Common],
    ) -> None:
        self.latent, self.index = V4Latent(latent_dim, qk_rope_head_dim), IndexKey(index_head_dim)
        self.head_dim, self.index_packing = latent_dim + qk_rope_head_dim, index_packing
        self.compress_ratios, self.overlap_ratio = tuple(compress_ratios), overlap_ratio
        self.ratios = sorted(set(self.compress_ratios) - {0})
        self.window, self.windows = window, {window: "swa"}
        self.window_page_size = window_page_size
        self.ring_factor, self.page_rings = 2 if speculation else 1, page_rings
        super().__init__(**common)

    def states(self) -> Iterator[tuple[Kind, At]]:
        self._check()
        yield self.place(self.latent, window=self.window)
        for ratio in self.ratios:
            name, overlaps = f"c{ratio}", ratio == self.overlap_ratio
            layers = [n for n in self.layers if self.compress_ratios[n] == ratio]
            at, entries = partial(self.at, layers, prefix=f"{name}."), self.page_size // ratio
            state = StateType.DSV4_REQUEST_STATE
            if overlaps and self.page_rings:
                state = StateType.SWA  # one item a page of the window
            ring = at(f"{name}.ring", self._ring(ratio), state=state)
            series = 4 if overlaps else 2  # a key and a gate, for one window or for two
            yield self.latent, at(name, entries)
            yield Ring("state", series * self.head_dim), ring
            if overlaps:
                yield self.index, at(name, entries, packing=self.index_packing)
                yield Ring("index_state", series * self.index.head_dim), ring

    def spaces(self) -> Iterator[Space]:
        """Token pages, whose ids also address compressed entries; window pages; rings."""
        yield from super().spaces()
        yield Space("ring", "slot")
        for ratio in self.ratios:
            yield Space(f"c{ratio}", "paged", self.page_size // ratio, ratio, ids="kv")
            name, size = f"c{ratio}.ring", self._ring(ratio)
            alive = ratio if ratio == self.overlap_ratio else 0
            ring = Space(name, "ring", size, window=alive, window_step=ratio, ids="ring")
            if alive and self.page_rings:
                page = self.window_page_size
                ring = replace(ring, kind="paged", entries_per_item=page, ring=size, ids="swa")
            yield ring

    def _ring(self, ratio: int) -> int:
        return self.ring_factor * ratio * (2 if ratio == self.overlap_ratio else 1)

    def _check(self) -> None:
        if self.layers[-1] >= len(self.compress_ratios):
            raise ValueError(
                f"compress_ratios: {len(self.compress_ratios)} layers, but layer "
                f"{self.layers[-1]} is held. Give a ratio for every layer of the model."
            )
        wrong = [ratio for ratio in self.ratios if ratio < 0 or self.page_size % ratio]
        if wrong:
            raise ValueError(
                f"compress_ratios: pages of {self.page_size} tokens are not a multiple of "
                f"{wrong[0]}. Use a page size that every ratio divides."
            )
        if self.page_rings and self.overlap_ratio in self.ratios:
            ring, reach = self._ring(self.overlap_ratio), 2 * self.overlap_ratio - 1
            if self.window_page_size % ring:
                raise ValueError(
                    f"page_rings: window pages of {self.window_page_size} tokens are not a "
                    f"multiple of rings of {ring}. Use a window_page_size that is."
                )
            if self.window < reach:
                raise ValueError(
                    f"page_rings: a compressor reads the last {reach} tokens, a window of "
                    f"{self.window} has freed their pages. Leave page_rings out."
                )
