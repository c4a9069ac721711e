"""Rows that are converted, piece by piece: which part is read at once, and where it then lies."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from disagg.plan.bind import Count, moved_now
from disagg.plan.cast.arrival import ARRIVAL_BITS, Arrival
from disagg.plan.planner import Cast
from disagg.plan.runs import Box
from kvpool.layout import Interleave, Key, RequestAddress, Space, Span
from kvpool.layout.grid import Ints
from kvpool.layout.spaces import EVERY


class Placed(NamedTuple):
    """What of a piece comes from one source rank: of the arrival's regions `keys`, which are alike,
    steps `box` of their axes at those of `needed` entries that all `held` hold. `entries` are
    these, in the destination rank's numbers; those of item `first` of the request lie in item 0.
    """

    keys: tuple[Key, ...]
    box: Box
    space: Space
    needed: range
    held: tuple[Interleave, ...]
    entries: Ints
    first: int


class Extent(NamedTuple):
    """Positions `tokens` of `layers` of an owner, of a request of `total` tokens."""

    owner: str
    layers: range
    tokens: range
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CastPiece:
    """What is read at once of rows that are converted. `offsets` are those of an arrival's buffers
    in the piece, by name, of `nbytes` in all; `items` the numbers of the request's items, by space.
    """

    extent: Extent
    offsets: Mapping[str, int]
    items: Mapping[str, range]
    nbytes: int


def pieces(arrival: Arrival, extent: Extent, most: int) -> Iterator[CastPiece]:
    """An extent in pieces of at most `most` bytes: of fewer layers where those of all do not fit,
    then of fewer positions. Raises ValueError for one position of a layer that does not fit.
    """
    piece = _piece(arrival, extent)
    if piece.nbytes <= most:
        if piece.nbytes:
            yield piece
        return
    layers, tokens = extent.layers, extent.tokens
    if len(layers) > 1:
        middle = layers.start + len(layers) // 2
        parts = range(layers.start, middle), range(middle, layers.stop)
        halves = [extent._replace(layers=part) for part in parts]
    elif len(tokens) > 1:
        middle = tokens.start + len(tokens) // 2
        parts = range(tokens.start, middle), range(middle, tokens.stop)
        halves = [extent._replace(tokens=part) for part in parts]
    else:
        raise ValueError(
            f"{extent.owner} layer {layers.start}: {piece.nbytes} bytes arrive with position "
            f"{tokens.start} and are converted together, and a buffer has {most}. Give the "
            f"endpoint staging={4 * piece.nbytes}."
        )
    for half in halves:
        yield from pieces(arrival, half, most)


def _piece(arrival: Arrival, extent: Extent) -> CastPiece:
    spaces = arrival.layout.spaces
    items = {space.name: _items(space, extent.tokens, extent.total) for space in spaces}
    offsets: dict[str, int] = {}
    nbytes = 0
    for region in arrival.layout.regions:
        if region.owner == extent.owner and region.layer in extent.layers:
            buffer = arrival.layout.buffer_of(region)
            offsets[buffer.name] = nbytes
            nbytes += -(-len(items[buffer.space]) * buffer.item_bytes // 64) * 64
    return CastPiece(extent=extent, offsets=offsets, items=items, nbytes=nbytes)


def _items(space: Space, tokens: range, total: int) -> range:
    """Numbers of a request's items in which entries move with `tokens`."""
    entries = space.held.part(space.needed_entries(tokens, total))
    if not entries:
        return range(0)
    if space.per_request:
        return range(1)
    first, last = (int(space.place(entry)[0]) for entry in (entries[0], entries[-1]))
    return range(first, last + 1)


def piece_address(piece: CastPiece) -> RequestAddress:
    """The block table of a piece in its arrival."""
    spans = {name: Span(np.arange(len(items)), items.start) for name, items in piece.items.items()}
    return RequestAddress(piece.extent.total, spans)


def to_offsets(arrival: Arrival, piece: CastPiece, pointers: Ints) -> Ints:
    """Offsets in the piece, of pointers into the arrival."""
    names = [buffer.name for buffer in arrival.layout.buffers]
    starts = np.array([piece.offsets.get(name, 0) for name in names], dtype=np.int64)
    number = (pointers >> ARRIVAL_BITS) - 1
    return np.asarray(starts[number] + (pointers & ((1 << ARRIVAL_BITS) - 1)), dtype=np.int64)


def placed(cast: Cast, source: int, piece: CastPiece, count: Count) -> list[Placed]:
    """What of a piece comes now from source rank `source`."""
    alike: dict[Hashable, Placed] = {}
    arrival, layout, extent = cast.arrival, cast.plan.sources[source], piece.extent
    for part in cast.plan.parts:
        keys = [key for key in part.keys if key[0] == extent.owner and key[1] in extent.layers]
        if part.source != source or not keys:
            continue
        space = arrival.layout.space_of(arrival.layout.region_by_key[keys[0]])
        theirs = layout.space_of(layout.region_by_key[keys[0]])
        moved = moved_now(theirs, space, False, extent.tokens, count)
        if moved is None:
            continue
        needed = space.needed_entries(moved, extent.total)
        which = space.name, part.box, part.held, needed
        if (others := alike.get(which)) is not None:
            alike[which] = others._replace(keys=(*others.keys, *keys))
            continue
        numbers = np.arange(needed.start, needed.stop, dtype=np.int64)
        split = tuple({i: None for i in (part.held, space.held) if i != EVERY})
        for interleave in split:
            numbers = numbers[numbers // interleave.size % interleave.ranks == interleave.rank]
        if numbers.size:
            alike[which] = Placed(
                keys=tuple(keys),
                box=part.box,
                space=space,
                needed=needed,
                held=split,
                entries=np.asarray(space.held.index(numbers)),
                first=piece.items[space.name].start,
            )
    return [*alike.values()]
