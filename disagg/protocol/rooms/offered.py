"""Which positions, of which layers, one rank has offered: chunks of positions one after another,
each of all layers at once or of some layers at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from kvpool.layout import PoolLayout
from kvpool.layout.grid import Ints
from kvpool.layout.sentences import ranges
from kvpool.layout.types import Name

MAX_LAYER = 1 << 40
_Number = Annotated[int, Meta(ge=0, le=MAX_LAYER)]


class LayerRange(Struct, frozen=True, forbid_unknown_fields=True):
    """Layers `start` to `stop` of an owner, by their global numbers. A rank may hold some of them
    only.
    """

    owner: Name
    start: _Number
    stop: _Number

    @property
    def layers(self) -> range:
        """The numbers."""
        return range(self.start, self.stop)

    def __str__(self) -> str:
        return f"{self.owner} layers {self.start} to {self.stop - 1}"


def layer_range(layers: range | None, owner: str) -> LayerRange | None:
    """What a caller means by `layers`; raises ValueError."""
    if layers is None:
        return None
    if not isinstance(layers, range) or layers.step != 1 or not layers:
        raise ValueError(f"layers={layers!r}: a range of layer numbers, such as range(3, 4).")
    if not 0 <= layers.start < layers.stop <= MAX_LAYER:
        raise ValueError(f"layers={layers!r}: layer numbers go from 0 to {MAX_LAYER}.")
    return LayerRange(owner, layers.start, layers.stop)


def layers_by_owner(layout: PoolLayout) -> dict[str, Ints]:
    """The layers that a layout has regions of, sorted."""
    found: dict[str, set[int]] = {}
    for region in layout.regions:
        found.setdefault(region.owner, set()).add(region.layer)
    return {owner: np.array(sorted(each), dtype=np.int64) for owner, each in found.items()}


def layer_names(held: Mapping[str, Ints]) -> str:
    """Layers by owner, in a sentence."""
    return ", ".join(
        f"{owner} layer{'s' if layers.size > 1 else ''} {ranges(layers.tolist())}"
        for owner, layers in held.items()
        if layers.size
    )


@dataclass(slots=True)
class Offered:
    """What a rank that holds layers `held` has offered of a room."""

    held: Mapping[str, Ints] = field(default_factory=dict)
    """Sorted, by owner."""
    chunk: range = range(0)
    """The positions that were offered last, maybe not yet of all layers."""
    closed: bool = False
    """Whether all was offered."""
    _left: Mapping[str, npt.NDArray[np.bool_]] | None = None
    """Which layers the chunk lacks; None for a chunk of all layers at once."""

    @property
    def stop(self) -> int:
        """Positions up to which all layers were offered."""
        return self.chunk.start if _any(self._left) else self.chunk.stop

    @property
    def awaited(self) -> str:
        """What a chunk lacks that was begun."""
        return f"{self._name(self._left)} of chunk {_span(self.chunk)}" if _any(self._left) else ""

    def holds(self, layers: LayerRange) -> bool:
        """Whether any of these layers is held."""
        return self.held.get(layers.owner, _NONE)[self._inside(layers)].size > 0

    def reaches(self, total: int, owner: str, layer: int) -> bool:
        """Whether all `total` positions of a layer that is held were offered."""
        if self.closed or 0 < total <= self.stop:
            return True
        if self._left is None or self.chunk.stop < total:
            return False
        return not self._left[owner][self._inside(LayerRange(owner, layer, layer + 1))].any()

    def problem(self, tokens: range, layers: LayerRange | None, last: bool) -> str | None:
        """Why positions `tokens` of `layers` (None: of all) cannot be offered next, and with `last`
        as what ends the room.
        """
        if self.closed:
            return "its last chunk was sent already."
        again = self._goes_on(tokens, layers)
        if again and self._left is not None:
            twice = {
                owner: ~self._left[owner] & which for owner, which in self._which(layers).items()
            }
            if _any(twice):
                return f"{self._name(twice)} of chunk {_span(tokens)} were sent already."
        elif _any(self._left):
            return (
                f"{self.awaited} were not sent yet, got chunk {_span(tokens)}. The next chunk "
                "follows when a chunk was sent of all layers."
            )
        elif tokens.start != self.stop or tokens.stop < tokens.start:
            return (
                f"positions up to {self.stop} were sent, the next chunk starts there, got "
                f"{_span(tokens)}."
            )
        left = self._after(tokens, layers)
        if last and _any(left):
            return (
                f"{self._name(left)} of chunk {_span(tokens)} were not sent. Say `last` with the "
                "last layers of the last chunk."
            )
        return None

    def take(self, tokens: range, layers: LayerRange | None, last: bool) -> None:
        """Notes what has no problem."""
        self._left = self._after(tokens, layers)
        self.chunk, self.closed = tokens, last

    def _goes_on(self, tokens: range, layers: LayerRange | None) -> bool:
        """Whether these positions are those of the chunk that was begun layer by layer."""
        same = (tokens.start, tokens.stop) == (self.chunk.start, self.chunk.stop)
        return self._left is not None and same and (layers is not None or _any(self._left))

    def _after(
        self, tokens: range, layers: LayerRange | None
    ) -> Mapping[str, npt.NDArray[np.bool_]] | None:
        """Which layers the chunk lacks once these were offered."""
        if layers is None:
            return None
        left = self._left if self._goes_on(tokens, layers) else None
        which = self._which(layers)
        return {owner: (left[owner] if left else True) & ~some for owner, some in which.items()}

    def _which(self, layers: LayerRange | None) -> dict[str, npt.NDArray[np.bool_]]:
        """Which of the layers that are held are meant."""
        found = {owner: np.full(held.size, layers is None) for owner, held in self.held.items()}
        if layers is not None and layers.owner in found:
            found[layers.owner][self._inside(layers)] = True
        return found

    def _inside(self, layers: LayerRange) -> slice:
        held = self.held.get(layers.owner, _NONE)
        return slice(*np.searchsorted(held, (layers.start, layers.stop)).tolist())

    def _name(self, which: Mapping[str, npt.NDArray[np.bool_]] | None) -> str:
        return layer_names({owner: self.held[owner][mask] for owner, mask in (which or {}).items()})


_NONE = np.empty(0, dtype=np.int64)


def _any(which: Mapping[str, npt.NDArray[np.bool_]] | None) -> bool:
    return which is not None and any(mask.any() for mask in which.values())


def _span(tokens: range) -> str:
    return f"{tokens.start} to {tokens.stop}"
