"""Digests of live bytes that do not depend on where they lie, for both sides to compare.

A digest is the sum of the hashes of cells (disagg.digest.cell_hash) mod 2**64. Page ids, page
sizes, ring sizes, the order of axes, shards, placement and padding have no part in it, and digests
of disjoint pieces add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct

from disagg.digest.cell_hash import CELL, Hashes, Read, cells_of, sums
from disagg.digest.memory import reader
from disagg.plan import TransferPlan
from disagg.plan.positions import End, needed_entries
from disagg.plan.runs import Box
from kvpool.layout import Axis, Key, PoolLayout, Region, RequestAddress
from kvpool.layout.grid import Ints
from kvpool.layout.sentences import axis_steps, ranges
from kvpool.layout.types import MAX_AXES, MAX_INT, MAX_NAME, MAX_PARTS

STEP_BYTES = 4 << 20
"""Work between two yields, as bytes."""
PIECE_SETUP_COST = 32 << 10
"""Bytes as many as beginning a piece takes."""
MAX_CELLS = 1 << 20
MAX_RANGES = 16


class Piece(NamedTuple):
    """Grid points of the region `key`: steps `box` of its axes, of the entries numbered `entries`.

    Both count in the whole model and the whole request. A slot is one entry.
    """

    key: Key
    box: Box
    entries: range


def pieces(plan: TransferPlan, source: int, tokens: range, total: int) -> list[Piece]:
    """What source rank `source` gives to the destination for positions `tokens` of a request of
    `total` tokens: what `plan.bind` moves.
    """
    entries: dict[str, range] = {}
    found = []
    for part, giver in plan.elected:
        if giver == source:
            space = plan.dest.space_of(part.dest)
            if space.name not in entries:
                entries[space.name] = needed_entries(space, tokens, total)
            if entries[space.name]:
                found.append(Piece(part.dest.key, part.box, entries[space.name]))
    return found


def digests(
    layout: PoolLayout, address: RequestAddress, pieces: Iterable[Piece], each: bool = False
) -> Iterator[Hashes | None]:
    """Digests of the pieces in order, one for each, or with `each` one for each of their entries.

    They come in parts, as they are made: there are about `STEP_BYTES` of work before each, and None
    where no piece has ended since. Pieces may be anybody's: raises ValueError, naming owner, layer
    and role, for what lies outside the layout, outside what the address keeps alive, or on a device
    that is not there, and where together they are more than all that is alive.
    """
    left = layout.live_bytes(address.num_tokens)
    ready: list[Hashes] = []
    work = 0
    for piece in pieces:
        region = _region(layout, piece)
        read, starts = _rows(layout, address, region, piece.entries)
        left -= starts.size * _volume(piece.box) * region.width
        if left < 0:
            raise ValueError(f"{region}: the pieces up to this one are more than what is alive.")
        numbers = np.arange(piece.entries.start, piece.entries.stop, dtype=np.int64)
        found = np.zeros(starts.size, dtype=np.uint64)
        work += PIECE_SETUP_COST
        for cells in cells_of(region.inner_axes, region.width, piece.box):
            for some, part in cells.slices(starts.size):
                if work >= STEP_BYTES:
                    yield np.concatenate(ready) if ready else None
                    ready, work = [], 0
                found[some] += sums(read, starts[some], part, region.key, numbers[some])
                work += part.work * (some.stop - some.start)
        ready.append(found if each else found.sum(keepdims=True))
    if ready:
        yield np.concatenate(ready)


def differing(
    pieces: Sequence[Piece],
    one: Sequence[Hashes],
    other: Sequence[Hashes],
    layout: PoolLayout,
) -> list[str]:
    """Sentences that name owner, layers, role and positions of entries whose digests differ.

    `one` and `other` hold an array for each piece, of one digest for each entry. Raises ValueError
    where they do not.
    """
    counts = [len(piece.entries) for piece in pieces]
    if any([array.size for array in side] != counts for side in (one, other)):
        raise ValueError("digests to compare: one array a piece, of one number an entry.")
    grouped: dict[tuple[str, str, str, str], list[int]] = {}
    for piece, here, there in zip(pieces, one, other):
        at = np.flatnonzero(here != there)
        if at.size:
            owner, layer, role = piece.key
            where = _where(layout, piece), _positions(layout, piece, at)
            grouped.setdefault((owner, role, *where), []).append(layer)
    return [
        f"{owner} layer{'s' if len(layers) > 1 else ''} {ranges(layers)} {role}{where}: {what}"
        for (owner, role, where, what), layers in grouped.items()
    ]


_Number = Annotated[int, Meta(ge=0, le=MAX_INT)]
_Index = Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
_Name = Annotated[str, Meta(max_length=MAX_NAME)]


class _Kind(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What pieces of many layers have in common."""

    owner: _Name
    role: _Name
    box: Annotated[list[tuple[_Name, _Number, _Number]], Meta(max_length=MAX_AXES)]
    start: _Number
    stop: _Number


class _Pieces(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """For each piece, which kind and which layer."""

    kinds: Annotated[list[_Kind], Meta(max_length=MAX_PARTS)]
    which: Annotated[list[_Index], Meta(max_length=MAX_PARTS)]
    layers: Annotated[list[_Number], Meta(max_length=MAX_PARTS)]


_decoder = msgspec.msgpack.Decoder(_Pieces)


def to_wire(pieces: Sequence[Piece]) -> bytes:
    """Bytes that `from_wire` reads back, in order. Raises ValueError above `MAX_PARTS` pieces."""
    if len(pieces) > MAX_PARTS:
        raise ValueError(f"{len(pieces)} pieces: at most {MAX_PARTS} are sent at once.")
    kinds: dict[tuple[str, str, Box, range], int] = {}
    which = [kinds.setdefault((p.key[0], p.key[2], p.box, p.entries), len(kinds)) for p in pieces]
    made = [
        _Kind(owner, role, list(box), entries.start, entries.stop)
        for owner, role, box, entries in kinds
    ]
    return msgspec.msgpack.encode(_Pieces(made, which, [piece.key[1] for piece in pieces]))


def from_wire(data: bytes) -> list[Piece]:
    """Pieces, from untrusted bytes; raises ValueError with the reason. `digests` checks what they
    mean.
    """
    try:
        found = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"malformed pieces: {error}") from None
    if len(found.which) != len(found.layers) or max(found.which, default=-1) >= len(found.kinds):
        raise ValueError("malformed pieces: a piece without its kind or its layer.")
    kinds = [(k.owner, k.role, tuple(k.box), range(k.start, k.stop)) for k in found.kinds]
    return [
        Piece((kinds[at][0], layer, kinds[at][1]), *kinds[at][2:])
        for at, layer in zip(found.which, found.layers)
    ]


def _where(layout: PoolLayout, piece: Piece) -> str:
    """The axis steps of a piece, where they are not all that the model has."""
    region = layout.region_by_key[piece.key]
    cut = [
        axis_steps(Axis(name, high - low, 0, low, axis.total))
        for name, low, high in piece.box
        if (axis := region.axis(name)) and high - low < axis.total
    ]
    return f" ({', '.join(cut)})" if cut else ""


def _positions(layout: PoolLayout, piece: Piece, at: Ints) -> str:
    """The positions of entries number `at` of a piece."""
    space = layout.space_of(layout.region_by_key[piece.key])
    if space.kind == "slot":
        return "its state differs."
    breaks = np.flatnonzero(np.diff(at) > 1) + 1
    more = ""
    if breaks.size >= MAX_RANGES:
        at = at[: breaks[MAX_RANGES - 1]]
        more = f" and {breaks.size + 1 - MAX_RANGES} more ranges"
    size = space.tokens_per_entry
    tokens = (piece.entries.start + at[:, None]) * size + np.arange(size)
    if tokens.size == 1:
        return f"position {tokens.item()} differs."
    return f"positions {ranges(tokens.ravel().tolist())}{more} differ."


def _region(layout: PoolLayout, piece: Piece) -> Region:
    """The region of a piece, which lies inside it."""
    region = layout.region_by_key.get(piece.key)
    if region is None:
        owner, layer, role = piece.key
        raise ValueError(f"{owner!r} layer {layer} {role!r}: there is no such region here.")
    axes = region.inner_axes
    names = [name for name, _, _ in piece.box], [axis.name for axis in axes]
    if names[0] != names[1]:
        raise ValueError(f"{region}: axes {names[0]} of a piece, the region has {names[1]}.")
    for axis, (name, low, high) in zip(axes, piece.box):
        if not axis.start <= low < high <= axis.stop:
            raise ValueError(
                f"{region}: {name} {low} to {high - 1} of a piece, held are {axis.start} to "
                f"{axis.stop - 1}."
            )
    if _volume(piece.box) * -(-region.width // CELL) > MAX_CELLS:
        raise ValueError(f"{region}: a piece of more than {MAX_CELLS} cells an entry.")
    return region


def _rows(
    layout: PoolLayout, address: RequestAddress, region: Region, entries: range
) -> tuple[Read, Ints]:
    """What reads a region's buffer, and where in it each of some entries starts that the address
    keeps alive.
    """
    space, buffer, axis = layout.space_of(region), layout.buffer_of(region), region.axis("entry")
    alive = space.alive(address.num_tokens)
    if not (entries.step == 1 and alive.start <= entries.start < entries.stop <= alive.stop):
        raise ValueError(
            f"{region}: entries {entries.start} to {entries.stop - 1} of a piece, space "
            f"{space.name} keeps {alive.start} to {alive.stop - 1} of {address.num_tokens} tokens "
            "alive."
        )
    numbers = np.arange(entries.start, entries.stop, dtype=np.int64)
    items, steps = np.divmod(numbers, space.entries_per_item)
    ids = End(space, layout, address).item(items, str(region))
    starts = ids * buffer.item_stride + region.offset + steps * (axis.stride if axis else 0)
    return reader(buffer), starts


def _volume(box: Box) -> int:
    return prod(high - low for _, low, high in box)
