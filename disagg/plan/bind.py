"""Binds a plan's routes to one request: arrays of pointers and lengths, no object per run."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from disagg.plan.lookup import Apart, BlockLookup
from disagg.plan.positions import Paired, SpacePair
from disagg.plan.runs import Route
from disagg.plan.shapes import BoundRuns, Shape, StretchRuns
from kvpool.layout import PoolLayout, RequestAddress, Space
from kvpool.layout.grid import Ints, ragged

_LENGTH = struct.Struct("q")
FEW_ROWS, TABLE_ROWS = 1 << 10, 1 << 14
"""Runs of a kind at all record pairs of a shape: so many or fewer are rows of a table, from which
those of all shapes are bound at once; and of how many the table is full.
"""
TABLES = 32
"""Ranges of layers for which a table is kept."""
NOTHING = np.empty((2, 0), np.int64), np.empty(0, np.int64)


class Count(Enum):
    """Whether the number of a request's tokens is known, which decides what is bound. `UNKNOWN` of
    every chunk and then `LEARNED` of all positions move what `KNOWN` of every chunk does.
    """

    KNOWN = "known"
    """All of `tokens`: the destination's block table says how many tokens the request has."""
    UNKNOWN = "unknown"
    """The part of `tokens` that moves for any number: full entries of spaces without a window, and
    full items of packed regions. The block table's number is the most that it can be.
    """
    LEARNED = "learned"
    """The rest, to the request's end: windows, slots, rings, the last packed item or partial entry
    if not full.
    """


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch:
    """Source pointers, destination pointers and lengths in bytes, int64 `[N]` each.

    Equal lengths may be one number, broadcast and read-only. `shares` are runs and bytes of routes,
    of a batch that `bind` returned; its parts have none.
    """

    src: Ints
    dst: Ints
    nbytes: Ints
    shares: Iterable[tuple[Route, int, int]] = ()

    def __iter__(self) -> Iterator[Ints]:
        return iter((self.src, self.dst, self.nbytes))

    @property
    def runs(self) -> int:
        """How many runs."""
        return self.src.size

    @property
    def total(self) -> int:
        """Bytes of all runs."""
        if self.runs and self.nbytes.strides == (0,):
            return self.runs * int(self.nbytes[0])
        return int(self.nbytes.sum())

    def split(self, max_bytes: int, max_runs: int) -> Iterator[CopyBatch]:
        """Consecutive parts of at most `max_runs` runs and `max_bytes` bytes."""
        if 0 < self.runs <= max_runs and self.total <= max_bytes:
            yield CopyBatch(self.src, self.dst, self.nbytes)
            return
        whole = self.cut(max_bytes)
        edges = np.append(0, np.cumsum(whole.nbytes))
        start = 0
        while start < whole.runs:
            stop = int(np.searchsorted(edges, edges[start] + max_bytes, side="right")) - 1
            stop = min(stop, start + max_runs)
            src, dst, nbytes = (column[start:stop] for column in whole)
            yield CopyBatch(src, dst, nbytes)
            start = stop

    def cut(self, most: int) -> CopyBatch:
        """The same bytes in runs of at most `most` bytes: with 128, a run of 300 is three of 128,
        128 and 44.
        """
        if not self.runs or int(self.nbytes.max()) <= most:
            return self
        pieces = -(-self.nbytes // most)
        run, piece = ragged(pieces)
        within = piece * most
        src, dst, nbytes = (column[run] for column in self)
        return CopyBatch(src + within, dst + within, np.minimum(nbytes - within, most))


class _ShapeRecords(NamedTuple):
    """Record pairs of a shape: the pointers at which both buffers begin `[2, B]`, how many each
    route has, and for each kind of runs which rows of the table are theirs; none if they are many.
    """

    shape: Shape
    base: Ints
    sizes: Sequence[int]
    rows: Sequence[range]


class _CountedShares:
    """What each route has of runs that were bound: counted when it is asked for, which is after the
    read has begun.
    """

    def __init__(self, bound: Sequence[tuple[_ShapeRecords, BoundRuns | StretchRuns]]) -> None:
        self._bound = bound

    def __iter__(self) -> Iterator[tuple[Route, int, int]]:
        for group, runs in self._bound:
            number, nbytes = group.shape.size(runs)
            for route, pairs in zip(group.shape.routes, group.sizes):
                if pairs:
                    yield route, pairs * number, pairs * nbytes


class Binder:
    """The routes of a plan from one source rank, for any number of requests."""

    def __init__(self, routes: Sequence[Route], source: PoolLayout, dest: PoolLayout) -> None:
        by_shape: dict[object, list[Route]] = {}
        for route in routes:
            by_shape.setdefault(route.shape, []).append(route)
        self._shapes: list[tuple[Shape, Ints]] = []
        """With the pointers at which both buffers of their record pairs begin, `[2, B]`."""
        self._spaces: dict[object, SpacePair] = {}
        for alike in by_shape.values():
            base = [
                [source.buffer_by_name[name].base for r in alike for name in r.src.buffers],
                [dest.buffer_by_name[name].base for r in alike for name in r.dst.buffers],
            ]
            shape, route = Shape(alike), alike[0]
            self._shapes.append((shape, np.array(base, np.int64)))
            if shape.spaces not in self._spaces:
                src = BlockLookup(route.src.space, source, "source")
                dst = BlockLookup(route.dst.space, dest, "destination")
                self._spaces[shape.spaces] = SpacePair(src, dst, packed=route.packed)
        self._table = lru_cache(TABLES)(self._tabulate)

    def bind(
        self,
        source_address: RequestAddress,
        dest_address: RequestAddress,
        *,
        tokens: range,
        layers: range | None = None,
        count: Count = Count.KNOWN,
    ) -> CopyBatch:
        """Runs for positions `tokens`, of all layers or of `layers`: see TransferPlan.bind."""
        total = dest_address.num_tokens
        if tokens.step != 1 or not 0 <= tokens.start <= tokens.stop <= total:
            raise ValueError(f"tokens={tokens}: must be a range of positions within 0 to {total}.")
        by_spaces: dict[object, Paired] = {}
        few: list[tuple[_ShapeRecords, StretchRuns]] = []
        blocks: list[tuple[_ShapeRecords, BoundRuns]] = []
        groups, table = self._table(layers)
        for group in groups:
            shape, route = group.shape, group.shape.route
            moved = moved_now(route.src.space, route.dst.space, route.packed, tokens, count)
            if moved is None:
                continue
            paired = by_spaces.get(shape.spaces)
            if paired is None:
                spaces = self._spaces[shape.spaces]
                paired = spaces.pair(source_address, dest_address, moved)
                by_spaces[shape.spaces] = paired
            for runs in shape.runs(paired, ends=tokens.stop == total):
                if isinstance(runs, BoundRuns):
                    blocks.append((group, runs))
                elif group.rows[runs.kind]:
                    few.append((group, runs))
                else:
                    blocks.append((group, shape.at(runs)))
        return _batch(few, blocks, table)

    def _tabulate(self, layers: range | None) -> tuple[list[_ShapeRecords], Ints]:
        """Groups of the record pairs of some layers, and a table of their runs, one a row: both
        pointers in item 0, the bytes to the next entry of both, and bytes `[5, R]`.
        """
        groups: list[_ShapeRecords] = []
        columns, stop = [np.empty((5, 0), np.int64)], 0
        for shape, base in self._shapes:
            sizes, rows = shape.sizes, []
            if layers is not None:
                inside, sizes = shape.within(layers)
                base = base[:, inside]
            pairs = base.shape[1]
            for runs in shape.kinds:
                start = stop
                if 0 < pairs * runs.size <= FEW_ROWS and stop < TABLE_ROWS:
                    pointers = (base[:, :, None] + runs.start[:, None]).reshape(2, -1)
                    others = np.vstack((runs.step, runs.nbytes))
                    columns.append(np.concatenate((pointers, np.tile(others, pairs))))
                    stop += pairs * runs.size
                rows.append(range(start, stop))
            if pairs:
                groups.append(_ShapeRecords(shape, base, sizes, rows))
        return groups, np.concatenate(columns, axis=1)


def _batch(
    few: Sequence[tuple[_ShapeRecords, StretchRuns]],
    blocks: Sequence[tuple[_ShapeRecords, BoundRuns]],
    table: Ints,
) -> CopyBatch:
    """Runs at each record pair: `few` at a time, and then blocks of `[B, A, F]`."""
    shares = _CountedShares([*few, *blocks])
    pointers, nbytes = _bound_few(few, table)
    if not blocks:
        return CopyBatch(pointers[0], pointers[1], nbytes, shares)
    start = nbytes.size
    size = start + sum(group.base.shape[1] * runs.size for group, runs in blocks)
    lengths = [runs.nbytes for _, runs in blocks] + ([nbytes] if start else [])
    length = lengths[0].item(0)
    alike = all((nbytes == length).all() for nbytes in lengths)
    # one allocation: of several, glibc gives the memory back at once, and takes page faults again
    columns = np.empty((2 if alike else 3, size), dtype=np.int64)
    columns[:2, :start] = pointers
    if not alike:
        columns[2, :start] = nbytes
    for group, runs in blocks:
        block = group.base.shape[1], *runs.offset.shape[2:]
        stop = start + block[0] * runs.size
        out = columns[:, start:stop].reshape((-1, *block))
        np.add(group.base[:, :, None, None], runs.offset, out=out[:2])
        if not alike:
            out[2] = runs.nbytes
        start = stop
    src, dst, nbytes = columns[0], columns[1], columns[-1]
    if alike:  # one number for all runs: a third less memory to write
        nbytes = np.ndarray(size, np.int64, _LENGTH.pack(length), 0, (0,))
    return CopyBatch(src, dst, nbytes, shares)


def _bound_few(few: Sequence[tuple[_ShapeRecords, StretchRuns]], table: Ints) -> tuple[Ints, Ints]:
    """Their pointers `[2, N]` and lengths `[N]`."""
    rows: list[int] = []
    numbers: list[int] = []  # of each row, to which of `few` it belongs
    places: list[tuple[int, ...]] = []
    for number, (group, (kind, ((src, dst), step, length))) in enumerate(few):
        strides, group_rows = group.shape.strides, group.rows[kind]
        rows.extend(group_rows)
        numbers.extend([number] * len(group_rows))
        places.append((src * strides[0], dst * strides[1], *step, length - 1))
    if not rows:
        return NOTHING
    indices = np.array((rows, numbers))
    row, place = table.take(indices[0], axis=1), np.array(places).T.take(indices[1], axis=1)
    pointers = row[:2] + place[:2]
    pointers += place[2:4] * row[2:4]
    return pointers, row[4] + place[4] * row[3]


def moved_now(
    source: Space, space: Space, packed: bool, tokens: range, count: Count
) -> range | None:
    """The positions of `tokens` that move now, at least in part, from one space to another: of 50
    tokens in packed pages of 16, with an UNKNOWN count the first 48, and then, LEARNED, 48 and 49.
    """
    if count is Count.KNOWN:
        return tokens
    unknown, grows = count is Count.UNKNOWN, source.grows and space.grows
    if not (grows and (packed or space.partial)):
        return tokens if grows == unknown else None
    size = space.tokens_per_item if packed else space.tokens_per_entry
    full = tokens.stop // size * size
    return range(tokens.start, full) if unknown else range(max(tokens.start, full), tokens.stop)


def cost(route: Route, tokens: int) -> tuple[int, int]:
    """Runs and bytes that a route moves of a request of so many tokens, if no two of its items are
    adjacent.
    """
    shape, bound = _apart(route, tokens)
    sizes = [shape.size(runs) for runs in bound]
    records = len(route.src.buffers)
    return records * sum(number for number, _ in sizes), records * sum(n for _, n in sizes)


def run_lengths(route: Route, tokens: int) -> Counter[int]:
    """The runs of `cost`: how many there are of each number of bytes."""
    shape, bound = _apart(route, tokens)
    counts = Counter[int]()
    for runs in bound:
        block = shape.at(runs) if isinstance(runs, StretchRuns) else runs
        lengths, numbers = np.unique(block.nbytes, return_counts=True)
        # a length may stand for those at all stretches of entries
        numbers = numbers * (len(route.src.buffers) * block.size // block.nbytes.size)
        for nbytes, number in zip(lengths.tolist(), numbers.tolist()):
            counts[nbytes] += number
    return counts


def _apart(route: Route, tokens: int) -> tuple[Shape, list[BoundRuns | StretchRuns]]:
    """The runs of one record pair of a route, if no two of its items are adjacent."""
    shape, request = Shape([route]), RequestAddress(tokens, {})
    src, dst = Apart(route.src.space), Apart(route.dst.space)
    paired = SpacePair(src, dst, packed=route.packed).pair(request, request, range(tokens))
    return shape, [*shape.runs(paired, ends=True)]
