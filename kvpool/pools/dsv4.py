"""DeepSeek-V4: a sliding window of latents on all layers; on some, compressed latents and the
open windows that are not yet compressed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from typing_extensions import Unpack

from kvpool.layout import Space
from kvpool.layout.formats import At, IndexKey, Kind, Ring, StateType, V4Latent
from kvpool.pools.base import Common
from kvpool.pools.states import UnionPool


class DSv4Pool(UnionPool):
    """`compress_ratios`: for every layer of the model, 0 or the tokens of a compressed entry: 4
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
        """The window, then for each ratio the compressed entries and the rings."""
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
