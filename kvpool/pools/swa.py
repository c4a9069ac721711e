"""Layers of full attention beside layers of sliding-window attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from typing_extensions import Unpack

from kvpool.layout import Space
from kvpool.pools.base import Common
from kvpool.pools.buf_infos import StateType
from kvpool.pools.composite import UnionPool
from kvpool.pools.kinds import MHA, MLA, At, Kind


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
        self.window_layers = frozenset(window_layers)
        self.window_page_size = window_page_size or common.get("page_size", 0)
        super().__init__(**common)

    def parts(self) -> Iterator[tuple[Kind, At]]:
        """The full layers, then the window layers."""
        yield self.full, self.at(set(self.layers) - self.window_layers)
        entries = self.window_page_size
        yield (
            self.swa,
            self.at(self.window_layers, "swa", entries, prefix="swa.", state=StateType.SWA),
        )

    def spaces(self) -> Iterator[Space]:
        """Pages of tokens, and pages of the window."""
        yield from super().spaces()
        yield Space("swa", "paged", self.window_page_size, window=self.window)
