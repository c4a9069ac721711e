"""Pairs the items and entries of both sides that hold the same positions of a request.

The pairs are the same for all layers of two spaces: they are computed and coalesced once, then
broadcast over the layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.layout import PoolLayout, RequestAddress, Space, Span
from kvpool.layout.grid import Ints, ragged


class IncompleteTransfer(ValueError):
    """A source does not hold all positions that the destination needs."""


@dataclass(frozen=True, slots=True, eq=False)
class EntryPairs:
    """Stretches of entries that lie in one item on each side: item ids, first steps within the
    items, and counts, `[F]` each.
    """

    src_item: Ints
    src_step: Ints
    dst_item: Ints
    dst_step: Ints
    count: Ints

    def select(self, which: slice | npt.NDArray[np.bool_]) -> EntryPairs:
        """The stretches of a slice or mask."""
        return EntryPairs(*(column[which] for column in self.columns()))

    def columns(self) -> tuple[Ints, ...]:
        """src_item, src_step, dst_item, dst_step, count."""
        return self.src_item, self.src_step, self.dst_item, self.dst_step, self.count

    def coalesced(self, src_entries: int, dst_entries: int) -> EntryPairs:
        """The same entries, joined where a stretch continues in the next item on both sides."""
        src = self.src_item * src_entries + self.src_step
        dst = self.dst_item * dst_entries + self.dst_step
        breaks = (src[1:] != src[:-1] + self.count[:-1]) | (dst[1:] != dst[:-1] + self.count[:-1])
        if breaks.all():
            return self
        first = np.flatnonzero(np.append(True, breaks))
        count = np.add.reduceat(self.count, first)
        return EntryPairs(
            self.src_item[first],
            self.src_step[first],
            self.dst_item[first],
            self.dst_step[first],
            count,
        )

    def entries(self) -> EntryPairs:
        """One stretch per entry."""
        index, within = ragged(self.count)
        src_item, src_step, dst_item, dst_step = (c[index] for c in self.columns()[:4])
        return EntryPairs(
            src_item, src_step + within, dst_item, dst_step + within, np.ones_like(within)
        )


def scattered(src_space: Space, dst_space: Space, tokens: int) -> EntryPairs:
    """The pairs of a request of `tokens` tokens in the worst case: no two items adjacent."""
    needed = needed_entries(dst_space, range(tokens), tokens)
    src, src_step, dst, dst_step, count = _paired(src_space, dst_space, needed).columns()
    return EntryPairs(2 * src, src_step, 2 * dst, dst_step, count)


def scattered_items(space: Space, tokens: int) -> EntryPairs:
    """As `scattered`, of items that move whole."""
    return _item_pairs(*2 * [2 * _numbers(needed_items(space, range(tokens), tokens))])


class BlockLookup:
    """Item ids of a request in one space, checked against the space's buffers."""

    def __init__(self, space: Space, layout: PoolLayout, address: RequestAddress) -> None:
        self.space, self.address = space, address
        self.items = layout.items_by_space[space.name]
        self.span: Span | None = address.spans.get(space.id_list)

    def ids(self, index: Ints, who: str) -> Ints:
        """Ids of the request's items number `index`, which ascend. Raises IncompleteTransfer for
        items that are not listed, ValueError for ids outside the buffer.
        """
        if self.space.per_request:
            return self.consecutive(0, 1, who)[np.zeros_like(index)]
        first, stop = int(index[0]), int(index[-1]) + 1
        if stop - first == index.size and (index[1:] > index[:-1]).all():
            return self.consecutive(first, stop, who)
        return self._inside(self._listed(first, stop, who)[index - first], who)

    def consecutive(self, first: int, stop: int, who: str) -> Ints:
        """As `ids`, of items number `first` to `stop`."""
        return self._inside(self._listed(first, stop, who), who)

    def _listed(self, first: int, stop: int, who: str) -> Ints:
        span = self.span
        if span is None:
            raise ValueError(f"{who}: its block table has no ids for space {self.space.id_list!r}.")
        start = 0 if self.space.per_request else span.first_item
        if first < start or stop > start + span.ids.size:
            wanted = self._positions(first, stop)
            listed = self._positions(start, start + span.ids.size)
            raise IncompleteTransfer(
                f"{who}: space {self.space.name} needs items for positions {wanted}, its block "
                f"table covers {listed}. List the items of all of them."
            )
        return span.ids[first - start : stop - start]

    def _inside(self, ids: Ints, who: str) -> Ints:
        low, high = int(np.minimum.reduce(ids)), int(np.maximum.reduce(ids))
        if low < self.space.reserved or high >= self.items:
            wrong = low if low < self.space.reserved else high
            raise ValueError(
                f"{who}: item {wrong} of space {self.space.name} lies outside "
                f"{self.space.reserved} to {self.items - 1}."
            )
        return ids

    def _positions(self, first: int, stop: int) -> str:
        """First and last position that items `first` to `stop` hold."""
        space = self.space
        if first == stop:
            return "none"
        size, per = space.entries_per_item, space.tokens_per_entry
        last = space.held.number(stop * size - 1)
        return f"{space.held.number(first * size) * per} to {(last + 1) * per - 1}"


def pair_entries(src: BlockLookup, dst: BlockLookup, tokens: range) -> EntryPairs:
    """Pairs the entries of `tokens` that the destination keeps alive and both sides hold."""
    needed = needed_entries(dst.space, tokens, dst.address.num_tokens)
    _check_offered(src, needed, tokens, dst.address.num_tokens)
    found = _paired(src.space, dst.space, needed)
    if not found.count.size:
        return found
    src_item = src.ids(found.src_item, "source")
    dst_item = dst.ids(found.dst_item, "destination")
    return EntryPairs(src_item, found.src_step, dst_item, found.dst_step, found.count)


def pair_items(src: BlockLookup, dst: BlockLookup, tokens: range) -> EntryPairs:
    """Pairs the items that move whole with `tokens`, each as one stretch of one entry."""
    total = dst.address.num_tokens
    needed, alive = needed_items(dst.space, tokens, total), dst.space.alive(total)
    if not dst.space.per_request:
        size = dst.space.entries_per_item
        alive = range(max(alive.start, needed.start * size), min(alive.stop, needed.stop * size))
    index = _numbers(needed)
    if not needed:
        return _item_pairs(index, index)
    _check_offered(src, alive, tokens, total)
    return _item_pairs(src.ids(index, "source"), dst.ids(index, "destination"))


def _numbers(numbers: range) -> Ints:
    return np.arange(numbers.start, numbers.stop, dtype=np.int64)


def _item_pairs(src: Ints, dst: Ints) -> EntryPairs:
    none = np.zeros_like(src)
    return EntryPairs(src, none, dst, none, np.ones_like(src))


def needed_items(space: Space, tokens: range, total: int) -> range:
    """Items, by number in the request, that move whole with `tokens`: those with live entries whose
    last position is among them. The last item ends with the request.
    """
    alive = space.alive_items(total)
    if space.per_request:
        return alive if tokens.stop == total else range(0)
    size = space.tokens_per_item
    stop = alive.stop if tokens.stop == total else min(alive.stop, tokens.stop // size)
    start = max(alive.start, tokens.start // size)
    return range(start, stop) if tokens and start < stop else range(0)


def needed_entries(space: Space, tokens: range, total: int) -> range:
    """Entries of `tokens` that are alive once a request has `total` tokens, in the request's
    numbers, whichever rank holds them.
    """
    alive = space.alive_in_request(total)
    if space.per_request:  # it changes until the last position is written
        return alive if tokens.stop == total else range(0)
    first, stop = (each // space.tokens_per_entry for each in (tokens.start, tokens.stop))
    step = space.window_step if space.wraps else 1  # a row may change until its window closes
    if tokens.stop != total:
        stop = stop // step * step
    return range(max(alive.start, first // step * step), stop)


def _check_offered(src: BlockLookup, needed: range, tokens: range, total: int) -> None:
    space, held = src.space, src.address.num_tokens
    if not needed:
        return
    if held < tokens.stop:
        raise IncompleteTransfer(
            f"source: space {space.name} holds positions up to {held - 1}, the destination needs "
            f"them up to {tokens.stop - 1}. Bind positions that are computed, or wait for the rest."
        )
    if space.kind == "slot" and held != total:
        raise IncompleteTransfer(
            f"source: the state in space {space.name} is that of {held} tokens, the destination "
            f"needs that of {total}."
        )
    if space.window is not None:
        # of a chunk, what is alive at the end: until then, prefill may free the rest
        alive = space.alive_in_request(max(held, total))
        if needed.start < alive.start:
            raise IncompleteTransfer(
                f"source: space {space.name} keeps entries from {alive.start} on alive, the "
                f"destination needs {needed.start} to {needed.stop - 1}. Give decode a window of "
                f"at most {space.window} entries."
            )


def _paired(src: Space, dst: Space, needed: range) -> EntryPairs:
    """Pairs those of the request's entries `needed` that both spaces hold; `src_item` and
    `dst_item` are numbers of items of the request.
    """
    sizes = (src.entries_per_item, src.steps), (dst.entries_per_item, dst.steps)
    if src.held == dst.held:
        src_starts, count = _stretches(src.held.part(needed), src.steps, dst.steps)
        dst_starts = src_starts
    else:
        src_starts, dst_starts, count = _common(src, dst, needed)
    src_place = _places(src_starts, *sizes[0])
    same = src_starts is dst_starts and sizes[0] == sizes[1]
    dst_place = src_place if same else _places(dst_starts, *sizes[1])
    return EntryPairs(*src_place, *dst_place, count)


def _places(entries: Ints, size: int, steps: int) -> tuple[Ints, Ints]:
    """Items and steps of a rank's entries, of which an item has `size` and room for `steps`."""
    items, within = np.divmod(entries, size)
    return items, within if steps == size else within % steps


def _common(src: Space, dst: Space, needed: range) -> tuple[Ints, Ints, Ints]:
    """The entries that both of two spaces hold, interleaved differently: starts in the numbers of
    either, and counts.
    """
    sides = []
    for space in (src, dst):
        starts, count = _stretches(space.held.part(needed), space.held.size, space.steps)
        sides.append((starts, space.held.number(starts), count))
    if not all(count.size for _, _, count in sides):
        none = np.empty(0, dtype=np.int64)
        return none, none, none
    edges = np.unique(np.concatenate([n + more for _, n, c in sides for more in (0, c)]))
    begins, count = edges[:-1], np.diff(edges)
    both = np.ones(begins.size, dtype=np.bool_)
    found = []
    for starts, numbers, counts in sides:
        at = np.searchsorted(numbers, begins, side="right") - 1
        within = begins - numbers[at]
        both &= (at >= 0) & (within < counts[at])
        found.append(starts[at] + within)
    return found[0][both], found[1][both], count[both]


def _stretches(entries: range, one: int, other: int) -> tuple[Ints, Ints]:
    """Starts and counts of a range of entries, cut at multiples of both sizes."""

    def cuts(size: int) -> Ints:
        found = np.arange(entries.start // size * size, entries.stop, size, dtype=np.int64)
        found[:1] = entries.start
        return found

    if not entries:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    nested = one % other == 0 or other % one == 0
    starts = cuts(min(one, other))
    if not nested:  # np.union1d loads numpy.ma: milliseconds of the first request
        both = np.sort(np.concatenate([starts, cuts(max(one, other))]))
        starts = both[np.append(True, both[1:] != both[:-1])]
    count = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=count[:-1])
    count[-1:] = entries.stop - starts[-1:]
    return starts, count
