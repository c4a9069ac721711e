"""Runs as numbers: what NIXL prepares once per peer, and what a read then costs.

Where runs of one shape can lie, the places are numbered, on the source's side and on the
destination's: a run of the `whole` of an item, of an entry, or of the entries that two page sizes
have in common. A strided row stands for one place in every item; rows become a prepared list, and
a run that fills a place is one number a side. Other runs (tails, neighbours that were joined) have
none and are described by address. Pure numpy: no NIXL here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from disagg.plan.bind import Block, CopyBatch
from disagg.plan.positions import Walk
from disagg.plan.runs import EntryRuns, Route
from kvpool.layout import PoolLayout, Space
from kvpool.layout.grid import Ints

log = logging.getLogger("disagg")

Numbers = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

MAX_PLACES = (1 << 31) - 1
"""NIXL's indices are int32, and those beyond wrap unseen."""
MAX_ROWS = 1 << 18
"""Rows of one side; each takes some 60 bytes."""


class Numbered(NamedTuple):
    """A batch's runs: numbers of their places on both sides, `[P]` each, and which runs have none,
    `[N - P]`.
    """

    src: Numbers
    dst: Numbers
    others: npt.NDArray[np.intp]


class _Side(NamedTuple):
    """Numbers of the first place of each run of each record pair, `[B * A]`, and the items."""

    first: Numbers
    items: int

    def places(self, item: Ints, part: Ints) -> Numbers:
        """What is added to `first` for a part of an item."""
        return (part * self.items + item).astype(np.int32)


class _Grid(NamedTuple):
    """The places of a route's runs of one kind; each holds `entries` entries."""

    entries: int
    src: _Side
    dst: _Side

    def of(self, walk: Walk) -> tuple[Numbers, Numbers, Mask | None]:
        """Numbers of the walk's steps, `[F]` each, and which of them fill a place (None: all)."""
        (src_part, src_rest), (dst_part, dst_rest) = (
            np.divmod(step, self.entries) for step in (walk.src_step, walk.dst_step)
        )
        fills = (walk.count == self.entries) & (src_rest == 0) & (dst_rest == 0)
        src = self.src.places(walk.src_item, src_part)
        dst = self.dst.places(walk.dst_item, dst_part)
        return src, dst, None if fills.all() else fills


class Places:
    """All places of one source's routes. `src_rows` and `dst_rows` are NIXL's strided rows, uint64
    `[R, 5]`: address, length, device, stride, count.
    """

    def __init__(self, routes: Sequence[Route], source: PoolLayout, dest: PoolLayout) -> None:
        self._grids: dict[tuple[Route, str], _Grid] = {}
        self._walks: tuple[tuple[Block, ...], dict[int, tuple[Numbers, Numbers, Mask | None]]]
        self._walks = (), {}
        src, dst = _Rows(source), _Rows(dest)
        for route in routes:
            for kind, runs, entries in _kinds(route):
                there = _parts(route.src_space, runs.src, runs.src_step, entries)
                here = _parts(route.dst_space, runs.dst, runs.dst_step, entries)
                nbytes = runs.nbytes + (entries - 1) * runs.dst_step
                ends = (
                    _End(route.src_space, route.src_base, there, nbytes, route.src_stride),
                    _End(route.dst_space, route.dst_base, here, nbytes, route.dst_stride),
                )
                if src.has_room(ends[0]) and dst.has_room(ends[1]):
                    self._grids[route, kind] = _Grid(entries, src.add(ends[0]), dst.add(ends[1]))
                else:
                    log.warning(
                        "NIXL: %s and %d regions like it have too many places for a list. Their "
                        "runs go by address.",
                        route.keys[0],
                        len(route.keys) - 1,
                    )
        self.src_rows, self.dst_rows = src.all(), dst.all()

    def number(self, batch: CopyBatch) -> Numbered:
        """The runs of a batch, or of a part of one."""
        if self._walks[0] is not batch.blocks:
            self._walks = batch.blocks, {}
        src, dst, others = [_NONE], [_NONE], []
        stop = -batch.first
        for number, block in enumerate(batch.blocks):
            start, stop = stop, stop + block.runs
            low, high = max(start, 0), min(stop, batch.runs)
            if low >= high:
                continue
            grid = self._grids.get((block.route, block.kind))
            if grid is None:
                others.append(np.arange(low, high))
                continue
            if number not in self._walks[1]:
                self._walks[1][number] = grid.of(block.walk)
            src_places, dst_places, fills = self._walks[1][number]
            size = block.walk.count.size
            lines = slice((low - start) // size, -(-(high - start) // size))
            cut = slice(low - start - lines.start * size, high - start - lines.start * size)
            here = (grid.src.first[lines, None] + src_places).ravel()[cut]
            there = (grid.dst.first[lines, None] + dst_places).ravel()[cut]
            if fills is not None:
                mask = np.broadcast_to(fills, (lines.stop - lines.start, size)).ravel()[cut]
                others.append(low + np.flatnonzero(~mask))
                here, there = here[mask], there[mask]
            src.append(here)
            dst.append(there)
        if not batch.blocks:
            others.append(np.arange(batch.runs))
        return Numbered(
            np.concatenate(src), np.concatenate(dst), np.concatenate([_NONE_AT, *others])
        )


_NONE = np.empty(0, dtype=np.int32)
_NONE_AT = np.empty(0, dtype=np.intp)


def _kinds(route: Route) -> Iterator[tuple[str, EntryRuns, int]]:
    """Kinds of runs of which a request has many, and the entries that a place of each holds."""
    sizes = route.src_space.entries_per_item, route.dst_space.entries_per_item
    whole = route.whole
    if whole is not None and not route.linear:
        still = np.zeros_like(whole.src)
        yield "whole", EntryRuns(whole.src, whole.dst, whole.nbytes, still, still), sizes[0]
        return
    if route.chains.size and max(sizes) % min(sizes) == 0:
        yield "chains", route.chains, min(sizes)
    if route.singles.size:
        yield "singles", route.singles, 1


def _parts(space: Space, offsets: Ints, steps: Ints, entries: int) -> Ints:
    """Where places begin in an item, `[A, parts of an item]`."""
    parts = np.arange(0, space.entries_per_item, entries, dtype=np.int64)
    return offsets[:, None] + parts * steps[:, None]


class _End(NamedTuple):
    """One side of a route's places: addresses of its records, `[B]`, where places begin in item 0,
    `[A, parts]`, their lengths, `[A]`, and the bytes to the next item.
    """

    space: Space
    bases: Ints
    parts: Ints
    nbytes: Ints
    stride: int

    @property
    def rows(self) -> int:
        """A row for every part of an item."""
        return self.bases.size * self.parts.size


class _Rows:
    """Rows of one side, as they come."""

    def __init__(self, layout: PoolLayout) -> None:
        self._items = layout.items_by_space
        self._rows = [np.empty((0, 5), dtype=np.uint64)]
        self._places = self._count = 0

    def has_room(self, end: _End) -> bool:
        """Whether so many more may be added."""
        places = self._places + end.rows * self._items[end.space.name]
        return places <= MAX_PLACES and self._count + end.rows <= MAX_ROWS

    def add(self, end: _End) -> _Side:
        """Numbers the places: item after item in each row."""
        items = self._items[end.space.name]
        starts = end.bases[:, None, None] + end.parts
        rows = np.zeros((end.rows, 5), dtype=np.uint64)
        rows[:, 0] = starts.ravel()
        rows[:, 1] = np.broadcast_to(end.nbytes[:, None], starts.shape).ravel()
        rows[:, 3], rows[:, 4] = end.stride, items
        self._rows.append(rows)
        runs, parts = end.parts.shape
        first = self._places + np.arange(end.bases.size * runs, dtype=np.int64) * (parts * items)
        self._places += end.rows * items
        self._count += end.rows
        return _Side(first.astype(np.int32), items)

    def all(self) -> npt.NDArray[np.uint64]:
        """Every row."""
        return np.concatenate(self._rows)
