"""Digests of live bytes that both sides of a transfer compare, independent of memory layout.

A digest is the sum of cell hashes (disagg.digest.cell_hash) mod 2**64. It does not depend on page
ids, page sizes, ring sizes, axis order, shards, placement or padding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct

from disagg.digest.cell_hash import CELL, Hashes, ReadCells, cells_of, read_memory, sums
from disagg.plan import TransferPlan
from disagg.plan.lookup import BlockLookup
from disagg.plan.pairing import cut
from disagg.plan.runs import Box, volume
from kvpool.layout import Axis, Interleave, Key, PoolLayout, Region, RequestAddress
from kvpool.layout.grid import Ints
from kvpool.layout.spaces import EVERY
from kvpool.layout.text import axis_steps, by_layers, held_words, one_line, ranges
from kvpool.layout.types import MAX_AXES, MAX_INT, MAX_PARTS, MAX_REASON, Name

STEP_BYTES = 4 << 20
"""Work between two yields, in bytes."""
PIECE_SETUP_COST = 32 << 10
"""Cost of starting a piece, in bytes."""
MAX_CELLS = 1 << 20
MAX_POSITION_RANGES = 16


class Piece(NamedTuple):
    """Part of region `key`: steps `box` of its axes, and of `entries` those that all `held` hold.

    Steps count in the whole model, entries in the whole request. A slot is one entry, and so is an
    item of a packed region.
    """

    key: Key
    box: Box
    entries: range
    held: tuple[Interleave, ...] = ()

    def numbers(self) -> Ints:
        first, *others = sorted(self.held, key=lambda part: -part.ranks) or [EVERY]
        indices = first.part(self.entries)
        numbers = first.number(np.arange(indices.start, indices.stop, dtype=np.int64))
        for part in others:
            numbers = numbers[numbers // part.size % part.ranks == part.rank]
        return numbers


def pieces(plan: TransferPlan, source: int, tokens: range, total: int) -> list[Piece]:
    """What `plan.bind` moves from rank `source` for positions `tokens` of `total`."""
    first_pieces: dict[tuple[str, Interleave, bool], Piece | None] = {}
    moved: list[Piece] = []
    for part in plan.parts:
        if part.source == source:
            region = plan.dest.region_by_key[part.keys[0]]
            space, packed = plan.dest.space_of(region), bool(region.packing)
            alike = space.name, part.held, packed
            if alike not in first_pieces:
                needed = space.needed_items if packed else space.needed_entries
                interleaves = tuple({h: None for h in (part.held, space.held) if h != EVERY})
                piece = Piece(region.key, part.box, needed(tokens, total), interleaves)
                first_pieces[alike] = piece if piece.numbers().size else None
            if first := first_pieces[alike]:
                moved.extend(first._replace(key=key, box=part.box) for key in part.keys)
    return moved


def digests(
    layout: PoolLayout,
    address: RequestAddress,
    pieces: Iterable[Piece],
    each: bool = False,
    read: ReadCells = read_memory,
) -> Iterator[Hashes]:
    """Digests of the pieces in order, one per piece, or with `each` one per entry. `read` reads
    cells of a buffer, which need not be memory.

    Yields after about `STEP_BYTES` of work: the digests of pieces completed since, if any. Pieces
    may be untrusted: raises ValueError, naming owner, layer and role, if a piece lies outside the
    layout, outside the live entries or on a missing device, or if they exceed all live bytes.
    """
    live, none = layout.live_bytes(address.num_tokens), np.empty(0, dtype=np.uint64)
    ready, work = [none], 0
    for piece in pieces:
        region = _region(layout, piece)
        starts, numbers = _rows(layout, address, region, piece)
        buffer = layout.buffer_of(region)
        # looking for the entries of a piece takes time by this side's entries, all of them
        entries = len(layout.space_of(region).held.part(piece.entries))
        live -= entries * volume(piece.box) * region.width
        if live < 0:
            raise ValueError(f"{region}: the pieces up to this one exceed the live bytes.")
        hashes = np.zeros(starts.size, dtype=np.uint64)
        work += PIECE_SETUP_COST
        for cells in cells_of(region.inner_axes, region.width, piece.box):
            for rows, part in cells.slices(starts.size):
                if work >= STEP_BYTES:
                    yield np.concatenate(ready)
                    ready, work = [none], 0
                data = read(buffer, starts[rows, None] + part.offsets, part.width)
                hashes[rows] += sums(data, part, region.key, numbers[rows])
                work += part.work * (rows.stop - rows.start)
        ready.append(hashes if each else hashes.sum(keepdims=True))
    yield np.concatenate(ready)


def differing(pieces: Sequence[Piece], own: Hashes, other: Hashes, layout: PoolLayout) -> list[str]:
    """Sentences that name owner, layers, role and positions of entries whose digests differ: one
    digest for each entry of each piece, in order, as `digests` makes them with `each`.
    """
    edges = np.cumsum([piece.numbers().size for piece in pieces])[:-1]
    wrong = zip(pieces, map(np.flatnonzero, np.split(own != other, edges)))
    return by_layers((p.key, _difference(layout, p, which)) for p, which in wrong if which.size)


class Digester:
    """Makes digests in small steps, between which its thread serves others."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Hashable, Iterator[Hashes]]] = deque()
        self._parts: list[Hashes] = []
        """Of the first job."""

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def enqueue(self, key: Hashable, steps: Iterator[Hashes]) -> None:
        """Takes a job over, which is what `digests` returns; `step` returns them with `key`."""
        self._jobs.append((key, steps))

    def step(self) -> tuple[Hashable, bytes | None, str] | None:
        """Goes one step on; where that ends a job, its key, and digests or the reason for none."""
        if not self._jobs:
            return None
        key, steps = self._jobs[0]
        try:
            self._parts.append(next(steps))
            return None
        except StopIteration:
            values, reason = np.concatenate(self._parts).tobytes(), ""
        except Exception as error:  # what goes wrong in one job fails that room and no other
            values, reason = None, str(error) or type(error).__name__
        self._jobs.popleft()
        self._parts = []
        return key, values, reason


_Number = Annotated[int, Meta(ge=0, le=MAX_INT)]
_Index = Annotated[int, Meta(ge=0, lt=MAX_PARTS)]


class _PieceShape(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the pieces of many layers have in common."""

    owner: Name
    role: Name
    box: Annotated[tuple[tuple[Name, _Number, _Number], ...], Meta(max_length=MAX_AXES)]
    start: _Number
    stop: _Number
    held: Annotated[tuple[tuple[_Number, _Number, _Number], ...], Meta(max_length=2)]
    """Size, rank and ranks of each interleave."""


class _Pieces(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """For each piece, the index of its shape and its layer."""

    shapes: Annotated[list[_PieceShape], Meta(max_length=MAX_PARTS)]
    which: Annotated[list[_Index], Meta(max_length=MAX_PARTS)]
    layers: Annotated[list[_Number], Meta(max_length=MAX_PARTS)]


_decoder = msgspec.msgpack.Decoder(_Pieces)


def to_wire(pieces: Sequence[Piece]) -> bytes:
    """Encodes pieces for `from_wire`. Raises ValueError above `MAX_PARTS` pieces."""
    if len(pieces) > MAX_PARTS:
        raise ValueError(f"{len(pieces)} pieces: at most {MAX_PARTS} are sent at once.")
    shapes: dict[_PieceShape, int] = {}
    which = [shapes.setdefault(_shape(piece), len(shapes)) for piece in pieces]
    pieces_by_shape = _Pieces(list(shapes), which, [piece.key[1] for piece in pieces])
    return msgspec.msgpack.encode(pieces_by_shape)


def _shape(piece: Piece) -> _PieceShape:
    owner, _, role = piece.key
    start, stop = piece.entries.start, piece.entries.stop
    interleaves = tuple([(part.size, part.rank, part.ranks) for part in piece.held])
    return _PieceShape(
        owner=owner, role=role, box=piece.box, start=start, stop=stop, held=interleaves
    )


def from_wire(data: bytes, most: int = MAX_PARTS) -> list[Piece]:
    """At most `most` pieces of untrusted bytes. Raises ValueError; `digests` checks the rest."""
    try:
        sent = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"malformed pieces: {one_line(str(error), MAX_REASON)}") from None
    if len(sent.which) != len(sent.layers) or max(sent.which, default=-1) >= len(sent.shapes):
        raise ValueError("malformed pieces: a piece without its shape or its layer.")
    for what, count in (("pieces", len(sent.which)), ("shapes of pieces", len(sent.shapes))):
        if count > most:
            raise ValueError(f"{count} {what}: at most {most} are digested at once.")
    parts = [
        (range(s.start, s.stop), tuple([Interleave(n, rank, ranks) for n, rank, ranks in s.held]))
        for s in sent.shapes
    ]
    moved = []
    for number, layer in zip(sent.which, sent.layers):
        shape = sent.shapes[number]
        entries, interleaves = parts[number]
        moved.append(Piece((shape.owner, layer, shape.role), shape.box, entries, interleaves))
    return moved


def _difference(layout: PoolLayout, piece: Piece, entries: Ints) -> str:
    """The axis steps of a piece, if they are not the whole model's, and positions of `entries`."""
    region = layout.region_by_key[piece.key]
    space = layout.space_of(region)
    cut = [
        axis_steps(Axis(name=name, size=high - low, stride=0, start=low, total=axis.total))
        for name, low, high in piece.box
        if (axis := region.axis(name)) and high - low < axis.total
    ]
    steps = f" ({', '.join(cut)}):" if cut else ":"
    if space.per_request and (region.packing or not space.has_entries):
        return f"{steps} its state differs."
    numbers = piece.numbers()[entries]
    breaks = np.flatnonzero(np.diff(numbers) > 1) + 1
    more = ""
    if breaks.size >= MAX_POSITION_RANGES:
        numbers = numbers[: breaks[MAX_POSITION_RANGES - 1]]
        more = f" and {breaks.size + 1 - MAX_POSITION_RANGES} more ranges"
    size = space.tokens_per_item if region.packing else space.tokens_per_entry
    tokens = numbers[:, None] * size + np.arange(size)
    if tokens.size == 1:
        return f"{steps} position {tokens.item()} differs."
    return f"{steps} positions {ranges(tokens.ravel().tolist())}{more} differ."


def _region(layout: PoolLayout, piece: Piece) -> Region:
    """The region that a piece lies in. Raises ValueError if it lies in none."""
    region = layout.region_by_key.get(piece.key)
    if region is None:
        owner, layer, role = piece.key
        raise ValueError(f"{owner!r} layer {layer} {role!r}: this layout has no such region.")
    names, own = [name for name, _, _ in piece.box], [axis.name for axis in region.inner_axes]
    more = [name for name in names if name not in (*own, "entry")]
    uncut = region
    if len(more) == 1 and not region.packing:  # the other side has an axis in place of a cell
        region = cut(region, more[0])
    axes = region.inner_axes
    if names != [axis.name for axis in axes]:
        raise ValueError(f"{uncut}: a piece has axes {names}, the region {own}.")
    for axis, (name, low, high) in zip(axes, piece.box):
        if not axis.start <= low < high <= axis.stop:
            raise ValueError(
                f"{region}: a piece has {name} {low} to {high - 1}, the region {axis.start} to "
                f"{axis.stop - 1}."
            )
    if volume(piece.box) * -(-region.width // CELL) > MAX_CELLS:
        raise ValueError(f"{region}: a piece has more than {MAX_CELLS} cells per entry.")
    return region


def _rows(
    layout: PoolLayout, address: RequestAddress, region: Region, piece: Piece
) -> tuple[Ints, Ints]:
    """Each entry's offset in its buffer, and number. Raises ValueError for dead or others' ones."""
    space, buffer, axis = layout.space_of(region), layout.buffer_of(region), region.axis("entry")
    packed, total, entries = bool(region.packing), address.num_tokens, piece.entries
    alive = space.alive_items(total) if packed else space.alive_in_request(total)
    if not (entries.step == 1 and alive.start <= entries.start < entries.stop <= alive.stop):
        raise ValueError(
            f"{region}: a piece has {'items' if packed else 'entries'} {entries.start} to "
            f"{entries.stop - 1}, space {space.name} keeps {alive.start} to {alive.stop - 1} alive "
            f"at {total} tokens."
        )
    if space.interleave is not None and space.held not in piece.held:
        raise ValueError(
            f"{region}: a piece has entries of all ranks, space {space.name} those of "
            f"{held_words(space)}."
        )
    numbers = piece.numbers()
    if not numbers.size:
        raise ValueError(f"{region}: a piece has no entries that all of {piece.held} hold.")
    indices = space.held.index(numbers)
    items, steps = (indices, np.zeros_like(indices)) if packed else space.place(indices)
    ids = BlockLookup(space, layout, str(region)).ids(address, items)
    starts = ids * buffer.item_stride + region.offset + steps * (axis.stride if axis else 0)
    return starts, numbers
