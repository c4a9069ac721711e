"""Pairs the items and entries of both sides that hold the same positions of a request.

The pairs are the same for all layers of two spaces: they are computed and coalesced once, then
broadcast over the layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np

from disagg.plan.lookup import BlockLookup, IncompleteTransfer
from kvpool.layout import RequestAddress, Space
from kvpool.layout.grid import Ints, ragged, rows_of


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EntryPairs:
    """Stretches of entries in one item of each side: ids and first steps `[2, F]`, the source's and
    the destination's, and counts `[F]`.
    """

    item: Ints
    step: Ints
    count: Ints

    def coalesced(self, entries: Ints) -> EntryPairs:
        """The same entries, joined where a stretch continues in the next item on both sides, whose
        items hold `entries` `[2, 1]`: with 4 entries an item, all of items 7, 8 and 2 are 8 entries
        from item 7 on and 4 of item 2.
        """
        if self.count.size < 2:
            return self
        first = self.item * entries + self.step
        either = first[:, 1:] != first[:, :-1] + self.count[:-1]
        breaks = either[0] | either[1]
        if breaks.all():
            return self
        begins = np.flatnonzero(np.append(True, breaks))
        return replace(rows_of(self, begins), count=np.add.reduceat(self.count, begins))

    def entries(self) -> EntryPairs:
        """One stretch per entry."""
        stretch, within = ragged(self.count)
        pairs = rows_of(self, stretch)
        return replace(pairs, step=pairs.step + within, count=np.ones_like(within))


class Stretch(NamedTuple):
    """Entries that follow each other in one item of each side: ids and first steps, the source's
    and the destination's, and how many entries. A few bind several times as fast as numbers than as
    arrays.
    """

    item: tuple[int, int]
    step: tuple[int, int]
    length: int


class Items:
    """Entries in items of both sides that hold `entries` each: ids `[2, F]`, the source's and the
    destination's. Of the first item they are those from step `first` on, of the last those below
    step `stop`, of others all. Entries 5 to 21 in pages of 4 lie in 5 items, from step 1 of the
    first on (5 = 1 * 4 + 1) and below step 2 of the last (22 = 5 * 4 + 2): 3 + 4 + 4 + 4 + 2.
    """

    def __init__(self, item: Ints, entries: int, first: int, stop: int) -> None:
        self.item, self.entries, self.first, self.stop = item, entries, first, stop

    @cached_property
    def joined(self) -> tuple[Ints, Ints | None]:
        """Of items that follow each other on both sides the first `[2, J]`, and how many they are
        `[J]`: None if no two do.
        """
        apart = (self.item[:, 1:] - self.item[:, :-1]) != 1
        breaks = apart[0] | apart[1]
        if breaks.all():
            return self.item, None
        begins = np.flatnonzero(np.append(True, breaks))
        return self.item[:, begins], np.diff(np.append(begins, self.item.shape[1]))

    @property
    def pairs(self) -> EntryPairs:
        """One stretch an item."""
        step, count = np.zeros_like(self.item), np.full(self.item.shape[1], self.entries)
        step[:, 0] = self.first
        count[0] -= self.first
        count[-1] -= self.entries - self.stop
        return EntryPairs(item=self.item, step=step, count=count)

    def inner(self, start: int, stop: int) -> Items:
        """Some of them, whole."""
        if stop - start == self.item.shape[1]:
            return self
        return Items(self.item[:, start:stop], self.entries, 0, self.entries)

    def stretch(self, index: int, step: int, stop: int) -> Stretch:
        """Entries of one of them."""
        first, second = self.item[:, index].tolist()
        return Stretch((first, second), (step, step), stop - step)


Paired: TypeAlias = list[Stretch] | Items | EntryPairs
"""What two sides hold of the same positions: a few stretches, or more."""
FEW_ITEMS = 4


class SpacePair:
    """The spaces of a route's two sides. `packed`: of packed regions, whose items move whole."""

    def __init__(self, src: BlockLookup, dst: BlockLookup, *, packed: bool) -> None:
        self._src, self._dst, self._packed = src, dst, packed
        source, dest = src.space, dst.space
        self._kind, self._sizes = dest.traits, (source.steps, dest.steps)
        self._held = dest.held if source.held == dest.held else None
        """Which entries of a request either holds, if they are the same."""
        # a plan pairs spaces of one kind only
        self._alike = source.steps == dest.steps and not (source.wraps or dest.wraps)
        """Whether entries are at the same step of the same item of a request."""

    def pair(self, source: RequestAddress, dest: RequestAddress, tokens: range) -> Paired:
        """Pairs the entries of `tokens` that the destination keeps alive and both sides hold; of
        packed regions the items that move whole with `tokens`, each as one stretch of one entry.

        8 tokens in pages of 4, with ids 5 and 9, and on the destination in a page of 8 with id 3:
        4 entries from step 0 of item 5 to step 0 of item 3, and 4 from step 0 of item 9 to step 4
        of item 3. With a window of 8 and in pages of 4, 22 tokens move entries 14 to 21: 2 of item
        3 of the request, from step 2 on, 4 of item 4 and 2 of item 5.
        """
        space, total = self._dst.space, dest.num_tokens
        if self._packed:
            items = self._kind.needed_items(space, tokens, total)
            if not items:
                return []
            entries = self._kind.entries_of(space, items, total)
            _check_offered(self._src.space, source, entries, tokens, total)
            return self._items(source, dest, items, 1)
        needed = self._kind.needed_entries(space, tokens, total)
        if not needed:
            return []
        _check_offered(self._src.space, source, needed, tokens, total)
        if self._held is None:
            return self._any(source, dest, needed)
        entries, (size, dest_size) = self._held.part(needed), self._sizes
        if not entries:
            return []
        first, last = entries.start, entries.stop - 1
        if first // size == last // size and first // dest_size == last // dest_size:
            item, step = self._src.space.place(first)
            dest_item, dest_step = (item, step) if self._alike else space.place(first)
            ids = self._src.id(source, item), self._dst.id(dest, dest_item)
            return [Stretch(ids, (step, dest_step), len(entries))]
        if not self._alike:
            return self._any(source, dest, needed)
        return self._items(source, dest, entries, size)

    def _items(
        self, source: RequestAddress, dest: RequestAddress, entries: range, size: int
    ) -> list[Stretch] | Items:
        """Pairs a range of entries; items of both sides have `size` entries each."""
        first, last = entries.start // size, (entries.stop - 1) // size
        ids = self._src.part(source, first, last + 1), self._dst.part(dest, first, last + 1)
        step, stop = entries.start - first * size, entries.stop - last * size
        if last - first >= FEW_ITEMS:
            return Items(np.array(ids), size, step, stop)
        pairs = [Stretch(item, (0, 0), size) for item in zip(ids[0].tolist(), ids[1].tolist())]
        pairs[-1] = Stretch(pairs[-1].item, (0, 0), stop)
        if step:
            item, _, length = pairs[0]
            pairs[0] = Stretch(item, (step, step), length - step)
        return pairs

    def _any(
        self, source: RequestAddress, dest: RequestAddress, needed: range
    ) -> EntryPairs | list[Stretch]:
        pairs = _pair_by_number(self._src.space, self._dst.space, needed)
        if not pairs.count.size:
            return []
        pairs.item[0] = self._src.ids(source, pairs.item[0])
        pairs.item[1] = self._dst.ids(dest, pairs.item[1])
        return pairs


def _check_offered(
    space: Space, source: RequestAddress, needed: range, tokens: range, total: int
) -> None:
    """Raises IncompleteTransfer unless the source still has the entries `needed`."""
    computed = source.num_tokens
    if not needed:
        return
    if computed < tokens.stop:
        raise IncompleteTransfer(
            f"source: space {space.name} holds positions up to {computed - 1}, the destination "
            f"needs them up to {tokens.stop - 1}. Bind positions that are computed, or wait for "
            "the rest."
        )
    if not space.has_entries and computed != total:
        raise IncompleteTransfer(
            f"source: the state in space {space.name} is that of {computed} tokens, the "
            f"destination needs that of {total}."
        )
    if space.window is not None:
        # of a chunk, what is alive at the end: until then, prefill may free the rest
        alive = space.alive_in_request(max(computed, total))
        if needed.start < alive.start:
            raise IncompleteTransfer(
                f"source: space {space.name} keeps entries from {alive.start} on alive, the "
                f"destination needs {needed.start} to {needed.stop - 1}. Give decode a window of "
                f"at most {space.window} entries."
            )


def _pair_by_number(src: Space, dst: Space, needed: range) -> EntryPairs:
    """Pairs those of the request's entries `needed` that both spaces hold; `item` has numbers of
    items of the request.

    Entries 2 to 13 of pages of 4 and pages of 6 are five stretches, which begin at 2, 4, 6, 8 and
    12: items 0, 1, 1, 2, 3 of the source from steps 2, 0, 2, 0, 0 on, items 0, 0, 1, 1, 2 of the
    destination from steps 2, 4, 0, 2, 0 on.
    """
    if src.held is dst.held or src.held == dst.held:
        src_first, count = _stretches(src.held.part(needed), src.steps, dst.steps)
        dst_first = src_first
    else:
        src_first, dst_first, count = _common(src, dst, needed)
    item, step = np.empty((2, 2, count.size), dtype=np.int64)
    item[:], step[:] = src.place(src_first)
    shape, dst_shape = ((s.traits, s.entries_per_item, s.ring) for s in (src, dst))
    if src_first is not dst_first or shape != dst_shape:
        item[1], step[1] = dst.place(dst_first)
    return EntryPairs(item=item, step=step, count=count)


def _common(src: Space, dst: Space, needed: range) -> tuple[Ints, Ints, Ints]:
    """The entries that both of two spaces hold, interleaved differently: starts in the numbers of
    either, and counts.

    Of entries 0 to 31, a rank with stretches of 8 holds 0-7 and 16-23, the second of two ranks with
    stretches of 4 holds 4-7, 12-15, 20-23 and 28-31. Common are 4-7 and 20-23: entries 4 and 12 of
    the former, 0 and 8 of the latter.
    """
    stretches = []
    for space in (src, dst):
        starts, counts = _stretches(space.held.part(needed), space.held.size, space.steps)
        stretches.append((starts, space.held.number(starts), counts))
    if not all(counts.size for _, _, counts in stretches):
        none = np.empty(0, dtype=np.int64)
        return none, none, none
    edges = np.unique(np.concatenate([n for _, first, c in stretches for n in (first, first + c)]))
    begins, count = edges[:-1], np.diff(edges)
    common = np.ones(begins.size, dtype=np.bool_)
    places = []
    for starts, numbers, counts in stretches:
        stretch = np.searchsorted(numbers, begins, side="right") - 1
        within = begins - numbers[stretch]
        common &= (stretch >= 0) & (within < counts[stretch])
        places.append(starts[stretch] + within)
    return places[0][common], places[1][common], count[common]


def _stretches(entries: range, src_size: int, dst_size: int) -> tuple[Ints, Ints]:
    """Starts and counts of a range of entries, cut at multiples of both sizes."""

    def cuts(size: int) -> Ints:
        """Both ends of the range, and the multiples of a size in between."""
        first, last = entries.start // size * size, -(-entries.stop // size) * size
        edges = np.arange(first, last + 1, size, dtype=np.int64)
        edges[0], edges[-1] = entries.start, entries.stop
        return edges

    if not entries:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    small, large = sorted((src_size, dst_size))
    edges = cuts(small)
    if large % small:  # np.union1d loads numpy.ma: milliseconds of the first request
        edges = np.sort(np.concatenate([edges, cuts(large)]))
        edges = edges[np.append(True, edges[1:] != edges[:-1])]
    return edges[:-1], edges[1:] - edges[:-1]
