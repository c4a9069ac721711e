"""The runs of one record pair, at the entries of a request that both sides hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from disagg.plan.positions import EntryPairs, Items, Paired, Stretch
from disagg.plan.runs import Route
from kvpool.layout.grid import Ints

CHAINS, SINGLES, WHOLE = range(3)
"""Kinds of runs: see ItemRuns."""
BYTES_PER_RUN = 4096
"""Dead bytes of a last page that may travel for each run saved; at least half must be saved."""


class StretchRuns(NamedTuple):
    """Runs of one kind at one stretch of entries; of whole items, each counts as one entry."""

    kind: int
    stretch: Stretch


class BoundRuns(NamedTuple):
    """A runs at F stretches: their offsets in both buffers of a record pair `[2, 1, A, F]`, and
    bytes `[A, F]`, or `[A, 1]` where each stretch has the same.
    """

    offset: Ints
    nbytes: Ints

    @property
    def size(self) -> int:
        return self.offset.size // 2


class Shape:
    """Routes of one shape, such as those of keys and of values, which have the same runs. `sizes`
    are their numbers of record pairs, `kinds` their runs by kind.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes, self.route = routes, routes[0]
        self.sizes = [len(route.src.buffers) for route in routes]
        src, dst = self.route.src, self.route.dst
        self.spaces = src.space.name, dst.space.name, self.route.packed
        self.strides, self._entries = (src.stride, dst.stride), (src.entries, dst.entries)
        # the same for arrays of pairs
        self._columns = np.array((self.strides, self._entries))[:, :, None]
        chains, singles, whole, *_ = self.route.runs
        self.kinds = [chains, singles] if whole is None else [chains, singles, whole]
        self._starts = [runs.start[:, None, :, None] for runs in self.kinds]
        self._bytes = [(int(runs.nbytes.sum()), int(runs.step[1].sum())) for runs in self.kinds]
        """Of the runs of each kind: at one entry, and at each more of a stretch."""
        # of a ring the entries behind the last may be alive
        self._whole_tails = not dst.space.wraps and src.space.held == dst.space.held

    def within(self, layers: range) -> tuple[Ints, list[int]]:
        """Which record pairs are of a range of layers, and how many of each route."""
        inside = [route.within(layers) for route in self.routes]
        return np.flatnonzero(np.concatenate(inside)), [int(part.sum()) for part in inside]

    def runs(self, paired: Paired, ends: bool) -> Iterator[BoundRuns | StretchRuns]:
        """The runs of one record pair. `ends`: the last entries are those of the last positions."""
        if isinstance(paired, list):
            return self._of_stretches(paired, ends)
        if isinstance(paired, Items):
            return self._of_items(paired, ends)
        return self._of_pairs(paired)

    def size(self, runs: BoundRuns | StretchRuns) -> tuple[int, int]:
        """How many runs they are, and their bytes."""
        if isinstance(runs, BoundRuns):
            nbytes = int(np.add.reduce(runs.nbytes, None))
            return runs.size, runs.size // runs.nbytes.size * nbytes
        first, more = self._bytes[runs.kind]
        return self.kinds[runs.kind].size, first + (runs.stretch.length - 1) * more

    def at(self, runs: StretchRuns) -> BoundRuns:
        """The same as arrays."""
        item, step, length = runs.stretch
        places = np.array((item, step))[:, :, None]
        return self._bound(runs.kind, places[0], places[1], np.array([length]))

    def _of_stretches(
        self, stretches: Sequence[Stretch], ends: bool
    ) -> Iterator[BoundRuns | StretchRuns]:
        _, _, _, linear, dense = self.route.runs
        if linear:
            yield from [StretchRuns(CHAINS, joined) for joined in _joined(stretches, self._entries)]
            return
        whole: list[Stretch] = []
        for stretch in stretches:
            last = ends and stretch is stretches[-1]
            if not any(stretch.step) and self._moves_whole(stretch.length, last):
                whole.append(Stretch(stretch.item, stretch.step, 1))
            else:
                yield from self._of_part(stretch)
        yield from [
            StretchRuns(WHOLE, stretch) for stretch in (_joined(whole, (1, 1)) if dense else whole)
        ]

    def _of_part(self, stretch: Stretch) -> Iterator[BoundRuns | StretchRuns]:
        """The runs of some entries of an item."""
        if self.kinds[CHAINS].size:
            yield StretchRuns(CHAINS, stretch)
        if self.kinds[SINGLES].size and stretch.length == 1:
            yield StretchRuns(SINGLES, stretch)
        elif self.kinds[SINGLES].size:
            places = np.array((stretch.item, stretch.step))[:, :, None]
            yield self._bound(SINGLES, places[0], places[1] + np.arange(stretch.length))

    def _of_items(self, items: Items, ends: bool) -> Iterator[BoundRuns | StretchRuns]:
        if self.route.runs.linear:
            yield from self._of_pairs(items.pairs)
            return
        number = items.item.shape[1]
        start, stop = int(items.first > 0), number - (not self._moves_whole(items.stop, ends))
        whole = items.inner(start, stop)
        item, count = whole.joined if self.route.runs.dense else (whole.item, None)
        yield self._bound(WHOLE, item, count=count)
        if start:
            yield from self._of_part(items.stretch(0, items.first, items.entries))
        if stop < number:
            yield from self._of_part(items.stretch(-1, 0, items.stop))

    def _of_pairs(self, pairs: EntryPairs) -> Iterator[BoundRuns]:
        if self.route.runs.linear:
            pairs = pairs.coalesced(self._columns[1])
        if self.kinds[CHAINS].size:
            yield self._bound(CHAINS, pairs.item, pairs.step, pairs.count)
        if self.kinds[SINGLES].size:
            entries = pairs.entries()
            yield self._bound(SINGLES, entries.item, entries.step)

    def _bound(
        self, kind: int, item: Ints, step: Ints | None = None, count: Ints | None = None
    ) -> BoundRuns:
        """Runs at stretches of `count` entries (None: 1) from `step` of `item` on, `[2, F]`."""
        runs = self.kinds[kind]
        offset = self._starts[kind] + (item * self._columns[0])[:, None, None]
        nbytes = runs.nbytes[:, None]
        if step is not None:
            offset = offset + step[:, None, None] * runs.step[:, None, :, None]
        if count is not None:
            nbytes = nbytes + (count - 1) * runs.step[1, :, None]
        return BoundRuns(offset, nbytes)

    def _moves_whole(self, count: int, ends: bool) -> bool:
        """Whether an item whose first `count` entries are needed moves with all
        that it has. With `ends` it is the request's last.

        Then that is allowed: it is the request's last page on the destination, so the entries that
        follow are the request's own and dead. Of a page of `[8 heads, 64 entries, 256 bytes]`, 56
        entries are 8 runs, or the page is one with 8 * 8 * 256 = 16,384 dead bytes: it moves whole.
        With 40 entries 49,152 are dead, more than 7 * 4,096: they move as 8 runs.
        """
        chains, singles, whole, *_ = self.route.runs
        if whole is None or count == self._entries[0] or not (ends and self._whole_tails):
            return whole is not None and count == self._entries[0]
        runs = chains.size + count * singles.size
        needed = sum(first + (count - 1) * more for first, more in self._bytes[:WHOLE])
        dead = self._bytes[WHOLE][0] - needed
        return 2 * whole.size <= runs and dead <= (runs - whole.size) * BYTES_PER_RUN


def _joined(stretches: Sequence[Stretch], entries: tuple[int, int]) -> Sequence[Stretch]:
    """The same entries, joined where they continue in the next item on both sides, whose items hold
    so many.
    """
    if len(stretches) < 2:
        return stretches
    longer: list[Stretch] = []
    ends = None
    for stretch in stretches:
        item, step, length = stretch
        begins = item[0] * entries[0] + step[0], item[1] * entries[1] + step[1]
        if begins == ends:
            first = longer.pop()
            stretch = Stretch(first.item, first.step, first.length + length)
        longer.append(stretch)
        ends = begins[0] + length, begins[1] + length
    return longer
