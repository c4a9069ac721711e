"""Layers of full attention beside layers of sliding-window attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from typing_extensions import Unpack

from kvpool.layout import Space
from kvpool.pools.base import Common
from kvpool.pools.buf_infos import StateType
from kvpool.pools.composite import UnionPool
from kvpool.pools.kinds import MHA, MLA, At, Kind


class SWAPool(UnionPool):
    """`window_layers` keep the last `window` tokens in pages of their own, all others keep every
    token. Layers are those of the whole model; this rank holds `layers` of them.

    `full` and `swa` say what a token leaves in a layer of either kind (`swa` default: as `full`).
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
        self.window_layers = frozenset(window_layers)
        self.window_page_size = window_page_size or common.get("page_size", 0)
        super().__init__(**common)

    def parts(self) -> Iterator[tuple[Kind, At]]:
        """The full layers, then the window layers."""
        yield self.full, self.at(set(self.layers) - self.window_layers)
        window: Any = {"entries": self.window_page_size, "prefix": "swa.", "state": StateType.SWA}
        yield self.swa, self.at(self.window_layers, "swa", **window)

    def spaces(self) -> Iterator[Space]:
        """Pages of tokens, and pages of the window."""
        yield from super().spaces()
        yield Space("swa", "paged", self.window_page_size, window=self.window)
