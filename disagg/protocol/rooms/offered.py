"""Which positions and layers one rank has offered: chunks of positions one after another,
each of all layers at once or of some layers at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta, Struct

from kvpool.layout import PoolLayout
from kvpool.layout.text import ranges
from kvpool.layout.types import Name

MAX_LAYER = 1 << 40
_Number = Annotated[int, Meta(ge=0, le=MAX_LAYER)]
LayersByOwner = Mapping[str, Sequence[int]]
"""The layers that a rank holds, by owner, sorted."""
Layer = tuple[str, int]
"""An owner, and a number."""


class LayerRange(Struct, frozen=True, forbid_unknown_fields=True):
    """Layers `start` to `stop` of an owner, by global number. A rank may hold only some."""

    owner: Name
    start: _Number
    stop: _Number

    @property
    def layers(self) -> range:
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


def layers_by_owner(layout: PoolLayout) -> LayersByOwner:
    """The layers that a layout has regions of."""
    layers: dict[str, set[int]] = {}
    for region in layout.regions:
        layers.setdefault(region.owner, set()).add(region.layer)
    return {owner: sorted(numbers) for owner, numbers in layers.items()}


def layer_names(layers: LayersByOwner) -> str:
    """Layers by owner, in a sentence."""
    return ", ".join(
        f"{owner} layer{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"
        for owner, numbers in layers.items()
        if numbers
    )


@dataclass(slots=True)
class Offered:
    """What a rank that holds `all_layers` has offered of a room."""

    all_layers: LayersByOwner = field(default_factory=dict)
    chunk: range = range(0)
    """The positions that were offered last, maybe not yet of all layers."""
    closed: bool = False
    """Whether all was offered."""
    _left: set[Layer] | None = None
    """The layers that the chunk lacks; None for a chunk of all layers at once."""

    @property
    def stop(self) -> int:
        """Positions up to which all layers were offered."""
        return self.chunk.start if self._left else self.chunk.stop

    @property
    def awaited(self) -> str:
        """What a chunk lacks that was begun."""
        return f"{self._names(self._left)} of chunk {_span(self.chunk)}" if self._left else ""

    def holds(self, layers: LayerRange) -> bool:
        """Whether any of these layers is held."""
        return bool(self._numbers(layers))

    def reaches(self, total: int, owner: str, layer: int) -> bool:
        """Whether all `total` positions of a layer that is held were offered."""
        left = self._left
        if self.closed or 0 < total <= self.stop:
            return True
        return left is not None and self.chunk.stop >= total and (owner, layer) not in left

    def problem(self, tokens: range, layers: LayerRange | None, last: bool) -> str | None:
        """Why positions `tokens` of `layers` (None: of all) cannot be offered next, as `last`."""
        if self.closed:
            return "its last chunk was sent already."
        left, chunk, stop = self._left_of(tokens, layers), _span(tokens), self.stop
        if left is not None:
            if twice := self._meant(layers) - left:
                return f"{self._names(twice)} of chunk {chunk} were sent already."
        elif self._left:
            return (
                f"{self.awaited} were not sent yet, got chunk {chunk}. The next chunk follows when "
                "a chunk was sent of all layers."
            )
        elif tokens.start != stop or tokens.stop < tokens.start:
            return f"positions up to {stop} were sent, the next chunk starts there, got {chunk}."
        if last and layers is not None:
            every = self._meant(None) if left is None else left
            if missing := every - self._meant(layers):
                return (
                    f"{self._names(missing)} of chunk {chunk} were not sent. Say `last` with the "
                    "last layers of the last chunk."
                )
        return None

    def note_chunk(self, tokens: range, layers: LayerRange | None, last: bool) -> None:
        """Notes what has no problem."""
        left = self._left_of(tokens, layers)
        if layers is None:
            self._left = None
        else:
            self._left = self._meant(None) if left is None else left
            self._left -= self._meant(layers)
        self.chunk, self.closed = tokens, last

    def _left_of(self, tokens: range, layers: LayerRange | None) -> set[Layer] | None:
        """What the chunk lacks that was begun layer by layer, if these positions are its."""
        same = (tokens.start, tokens.stop) == (self.chunk.start, self.chunk.stop)
        return self._left if same and (layers is not None or self._left) else None

    def _meant(self, layers: LayerRange | None) -> set[Layer]:
        """Layers that are held: all, or those in a range."""
        if layers is not None:
            return {(layers.owner, number) for number in self._numbers(layers)}
        return {(owner, number) for owner, numbers in self.all_layers.items() for number in numbers}

    def _numbers(self, layers: LayerRange) -> Sequence[int]:
        numbers = self.all_layers.get(layers.owner, ())
        return numbers[bisect_left(numbers, layers.start) : bisect_left(numbers, layers.stop)]

    def _names(self, layers: Collection[Layer]) -> str:
        return layer_names(
            {
                owner: [number for number in numbers if (owner, number) in layers]
                for owner, numbers in self.all_layers.items()
            }
        )


def _span(tokens: range) -> str:
    return f"{tokens.start} to {tokens.stop}"
