"""Block tables: the items of each request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvpool.allocation.free_list import FreeList
from kvpool.layout import Space
from kvpool.layout.grid import Ints, ragged
from kvpool.layout.sentences import ranges

NO_ITEM = -1
Cells = tuple[Ints, Ints]
"""Rows and columns of a block table."""


class Change(NamedTuple):
    """Rows that come to hold the items numbered `first` to `stop`. Cells (row, column) `gone` are
    freed; `needed` items are taken: for the cells from `since` on, or for `copied`, the last items
    that others hold too, which are replaced by a copy.
    """

    rows: Ints
    first: Ints
    stop: Ints
    gone: Cells
    needed: int
    since: Ints
    copied: Cells


class Fork(NamedTuple):
    """The numbers of the items that a fork shares, and of those that it copies."""

    shared: range
    copied: range


def alive_start(space: Space, tokens: Ints) -> Ints:
    """The first live entry of requests of `tokens` `[B]` tokens."""
    if space.window is None:
        return np.zeros_like(tokens)
    step = space.window_step
    return np.maximum(tokens // space.tokens_per_entry // step * step - space.window, 0)


class BlockTable:
    """The block table `[request, item number] -> id` of the spaces that share one list of ids,
    which is that of `space`. A request holds the items numbered `first` to `stop`, taken from a
    free list.
    """

    def __init__(self, space: Space, spaces: Iterable[Space], free_list: FreeList) -> None:
        self.space, self.free_list = space, free_list
        self._spaces = [other_space for other_space in spaces if other_space.id_list == space.name]
        self._table: Ints = np.full((0, 4), NO_ITEM, dtype=np.int64)
        self._first: Ints = np.zeros(0, dtype=np.int64)
        self._stop: Ints = np.zeros(0, dtype=np.int64)

    def add_rows(self, more: int) -> None:
        """Adds rows for more requests."""
        wide = np.full((more, self._table.shape[1]), NO_ITEM, dtype=np.int64)
        self._table = np.concatenate([self._table, wide])
        self._first = np.append(self._first, np.zeros(more, dtype=np.int64))
        self._stop = np.append(self._stop, np.zeros(more, dtype=np.int64))

    def span(self, row: int) -> tuple[Ints, int]:
        """The ids of a request, and the number of its first item."""
        first, stop = int(self._first[row]), int(self._stop[row])
        return self._table[row, first:stop], first

    def find(self, rows: Ints, numbers: Ints) -> Ints:
        """Ids of the items `numbers` `[B, T]` of requests `[B]`; -1 where there is none."""
        return self._table[rows[:, None], numbers]

    def shared(self, row: int, first: int) -> Ints:
        """The numbers, from `first` on, of a request's items that other requests hold, or may begin
        with.
        """
        first = max(first, int(self._first[row]))
        ids = self._table[row, first : self._stop[row]]
        return first + np.flatnonzero(self.free_list.is_wanted(ids))

    def sharers(self, ids: Ints, row: int | None = None) -> str:
        """Items that others than the request in `row` need, and which these are, for errors: `items
        1-2 of space kv, which 1 other request holds`.
        """
        count = len({*np.nonzero(np.isin(self._table, ids))[0].tolist()} - {row})
        requests = "requests hold" if count > 1 else "request holds"
        clauses = [f"{count} {'' if row is None else 'other '}{requests}"] * (count > 0)
        if self.free_list.is_kept(ids).any():
            clauses.append("the prefix cache keeps")
        which = " and ".join(clauses or ["a pinned prefix holds"])
        return f"items {ranges({*ids.tolist()})} of space {self.space.name}, which {which}"

    def start(self, tokens: Ints) -> Ints:
        """The first live entry of requests of `tokens` `[B]` tokens."""
        return np.zeros_like(tokens) if self.space.per_request else alive_start(self.space, tokens)

    def first(self, tokens: Ints) -> Ints:
        """The first live item of requests of `tokens` `[B]` tokens."""
        return self.start(tokens) // self.space.entries_per_item

    def stop(self, tokens: Ints) -> Ints:
        """The end of the items of requests of `tokens` `[B]` tokens."""
        if self.space.per_request:
            return np.minimum(tokens, 1)
        return -(-tokens // self.space.tokens_per_item)

    def first_whole(self, received: int) -> int:
        """The number of the first item of which nothing is missing that later tokens may need:
        entries that were dead at `received` tokens never came. Of a page's ring, what is alive at
        its end.
        """
        first = 0
        for space in self._spaces:
            start = int(alive_start(space, np.array([received]))[0])
            at_end = space.ring is not None and start > 0
            needed = start + (space.window or 0) if at_end else start
            first = max(first, -(-needed // space.entries_per_item) - at_end)
        return first

    def extension(self, rows: Ints, reach: Ints, tokens: Ints) -> Change:
        """The change after which requests hold the items of `tokens` `[B]` tokens, from those on
        that are alive after `reach`.
        """
        stop, had, end = self.stop(tokens), self._first[rows], self._stop[rows]
        first = np.maximum(np.minimum(self.first(reach), stop), had)
        since = np.maximum(end, first)
        return Change(
            rows=rows,
            first=first,
            stop=stop,
            gone=_cells(rows, had, np.minimum(first, end)),
            # counted, not listed: they may be more than there are
            needed=int(np.maximum(stop - since, 0).sum()),
            since=since,
            copied=(rows[:0], rows[:0]),
        )

    def truncation(self, rows: Ints, tokens: Ints) -> Change:
        """The change after which requests hold the items of their first `tokens` `[B]` tokens; a
        last one that these do not fill is written to again.
        """
        first, end, stop = self._first[rows], self._stop[rows], self.stop(tokens)
        last = stop - 1
        kept = (tokens % self.space.tokens_per_item > 0) & (last >= first)
        if self.space.per_request:
            kept[:] = False
        row, column = rows[kept], last[kept]
        shared = self.free_list.is_shared(self._table[row, column])
        return Change(
            rows=rows,
            first=np.minimum(first, stop),
            stop=stop,
            gone=_cells(rows, np.maximum(stop, first), end),
            needed=int(shared.sum()),
            since=stop,
            copied=(row[shared], column[shared]),
        )

    def ids(self, cells: Cells) -> Ints:
        """The ids in cells."""
        return self._table[cells]

    def give_back(self, change: Change) -> None:
        """Frees what a change frees."""
        self._put(change.gone)

    def take(self, change: Change) -> tuple[Ints, Ints]:
        """Takes what a change needs, after all have given back; returns the ids to copy from, which
        are to be released then, and to.
        """
        # tokens that are all dead need no item, and are looked up all the same
        if (stop := int(change.stop.max(initial=0))) > self._table.shape[1]:
            self._widen(stop)
        source = fresh = self._table[change.copied]
        if change.needed:
            fresh = self.free_list.take(change.needed)
            cells = change.copied if source.size else _cells(change.rows, change.since, change.stop)
            self._table[cells] = fresh
        self._first[change.rows], self._stop[change.rows] = change.first, change.stop
        return source, fresh[: source.size]

    def freed(self, rows: Ints) -> Ints:
        """How many items of each request were freed before those that it holds, `[B]`."""
        return self._first[rows]

    def fork(self, row: int, child: int, fork: Fork) -> tuple[Ints, Ints]:
        """Gives a new request its items; returns the ids to copy from and to."""
        shared, source = (
            self._table[row, numbers.start : numbers.stop] for numbers in (fork.shared, fork.copied)
        )
        self.free_list.share(shared)
        fresh = self.free_list.take(source.size)
        self.adopt(child, fork.shared.start, np.concatenate([shared, fresh]))
        return source, fresh

    def adopt(self, row: int, first: int, ids: Ints) -> None:
        """Makes held items those of a new request, from number `first` on."""
        stop = first + ids.size
        if stop > self._table.shape[1]:
            self._widen(stop)
        self._table[row, first:stop] = ids
        self._first[row], self._stop[row] = first, stop

    def release(self, rows: Ints) -> None:
        """Frees the items of requests that no other request holds."""
        self._put(_cells(rows, self._first[rows], self._stop[rows]))
        self._first[rows] = self._stop[rows] = 0

    def check_integrity(self, live: Ints, tokens: Ints) -> Ints:
        """See Allocator.check_integrity: `tokens` of requests `live`. Returns their ids."""
        first, stop = self._first[live], self._stop[live]
        wrong = np.flatnonzero((first > self.first(tokens)) | (stop != self.stop(tokens)))
        for row in wrong.tolist():
            raise RuntimeError(
                f"space {self.space.name}: items {first[row]} to {stop[row] - 1} are held by a "
                f"request of {tokens[row]} tokens."
            )
        return self._table[_cells(live, first, stop)]

    def _put(self, cells: Cells) -> None:
        ids = self._table[cells]
        self._table[cells] = NO_ITEM
        self.free_list.release(ids)

    def _widen(self, least: int) -> None:
        rows, columns = self._table.shape
        more = np.full((rows, max(least, 2 * columns) - columns), NO_ITEM, dtype=np.int64)
        self._table = np.concatenate([self._table, more], axis=1)


def _cells(rows: Ints, first: Ints, stop: Ints) -> Cells:
    """The cells `first` to `stop` of every row."""
    count = np.maximum(stop - first, 0)
    if not count.any():  # as for most lists of a decode step
        return rows[:0], rows[:0]
    group, within = ragged(count)
    return rows[group], first[group] + within
