"""DeepSeek-V4: a window of latents on all layers, compressed latents and open windows on some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from typing_extensions import Unpack

from kvpool.layout import Space
from kvpool.pools.base import Common
from kvpool.pools.buf_infos import StateType
from kvpool.pools.composite import UnionPool
from kvpool.pools.kinds import At, IndexKey, Kind, Ring, V4Latent


class DSv4Pool(UnionPool):
    """`compress_ratios` gives, for every layer of the model, 0 or the tokens of a compressed entry:
    4 (windows overlap, entries have index keys) or 128. Other ratios may stand for either.

    Rings hold the keys and gates of windows not yet compressed; with `speculation` they are twice
    as long, so that rejected tokens can be taken back. `page_size` is tokens a page.
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
        **common: Unpack[Common],
    ) -> None:
        self.latent, self.index = V4Latent(latent_dim, qk_rope_head_dim), IndexKey(index_head_dim)
        self.head_dim, self.index_packing = latent_dim + qk_rope_head_dim, index_packing
        self.compress_ratios, self.overlap_ratio = tuple(compress_ratios), overlap_ratio
        self.ratios = sorted(set(self.compress_ratios) - {0})
        self.window, self.window_page_size = window, window_page_size
        self.ring_factor = 2 if speculation else 1
        super().__init__(**common)

    def parts(self) -> Iterator[tuple[Kind, At]]:
        """The window, then by ratio the compressed entries and the rings."""
        self._check()
        window: Any = {"entries": self.window_page_size, "prefix": "swa.", "state": StateType.SWA}
        yield self.latent, self.at(None, "swa", **window)
        for ratio in self.ratios:
            name, overlaps = f"c{ratio}", ratio == self.overlap_ratio
            layers = [n for n in self.layers if self.compress_ratios[n] == ratio]
            place: Any = {"entries": self.page_size // ratio, "prefix": f"{name}."}
            ring: Any = {**place, "entries": self._ring(ratio), "state": StateType.DSV4}
            series = 4 if overlaps else 2  # a key and a gate, for one window or for two
            yield self.latent, self.at(layers, name, **place)
            yield Ring("state", series * self.head_dim), self.at(layers, f"{name}.ring", **ring)
            if overlaps:
                yield self.index, self.at(layers, name, packing=self.index_packing, **place)
                keys = Ring("index_state", series * self.index.head_dim)
                yield keys, self.at(layers, f"{name}.ring", **ring)

    def spaces(self) -> Iterator[Space]:
        """Token pages, whose ids address compressed entries; window pages; rings of one list."""
        yield from super().spaces()
        yield Space("swa", "paged", self.window_page_size, window=self.window)
        yield Space("ring", "slot")
        for ratio in self.ratios:
            yield Space(f"c{ratio}", "paged", self.page_size // ratio, ratio, ids="kv")
            alive = ratio if ratio == self.overlap_ratio else 0
            ring = self._ring(ratio)
            yield Space(f"c{ratio}.ring", "ring", ring, window=alive, window_step=ratio, ids="ring")

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
                f"compress_ratios: pages of {self.page_size} tokens are no whole entries of "
                f"{wrong[0]}. Use a page size that every ratio divides."
            )
