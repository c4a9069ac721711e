"""Block tables: the items of each request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvpool.allocation.free_list import FreeList
from kvpool.layout import Space
from kvpool.layout.grid import Ints, ragged
from kvpool.layout.kinds import alive_start
from kvpool.layout.text import ranges

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


class BlockTable:
    """The block table of the spaces that share one list of ids, which is that of `space`: `ids`
    `[request, item number]`, -1 where there is none. A request holds the items numbered from
    `held_from` `[request]` on, taken from a free list.
    """

    def __init__(self, space: Space, spaces: Iterable[Space], free_list: FreeList) -> None:
        self.space, self.free_list = space, free_list
        self._spaces = [other_space for other_space in spaces if other_space.id_list == space.name]
        self.ids: Ints = np.full((0, 4), NO_ITEM, dtype=np.int64)
        self.held_from: Ints = np.zeros(0, dtype=np.int64)
        self._stop: Ints = np.zeros(0, dtype=np.int64)

    def add_rows(self, more: int) -> None:
        """Adds rows for more requests."""
        self.ids = np.pad(self.ids, ((0, more), (0, 0)), constant_values=NO_ITEM)
        self.held_from = np.pad(self.held_from, (0, more))
        self._stop = np.pad(self._stop, (0, more))

    def span(self, row: int) -> tuple[Ints, int]:
        """The ids of a request, and the number of its first item."""
        first = int(self.held_from[row])
        return self.ids[row, first : self._stop[row]], first

    def sharers(self, ids: Ints, row: int | None = None) -> str:
        """Items that others than the request in `row` need, and which these are, for errors: `items
        1-2 of space kv, which 1 other request holds`.
        """
        count = len({*np.nonzero(np.isin(self.ids, ids))[0].tolist()} - {row})
        requests = "requests hold" if count > 1 else "request holds"
        clauses = [f"{count} {'' if row is None else 'other '}{requests}"] * (count > 0)
        if self.free_list.kept.known[ids].any():
            clauses.append("the prefix cache keeps")
        which = " and ".join(clauses or ["a pinned prefix holds"])
        return f"items {ranges({*ids.tolist()})} of space {self.space.name}, which {which}"

    def first(self, tokens: Ints) -> Ints:
        """The first live item of requests of `tokens` `[B]` tokens: with a window of 8 and pages of
        4, of 21 tokens entries from 13 on are alive, and 13 = 3 * 4 + 1 lies in item 3.
        """
        if self.space.per_request:
            return np.zeros_like(tokens)
        return alive_start(self.space, tokens) // self.space.entries_per_item

    def stop(self, tokens: Ints) -> Ints:
        """The end of the items of requests of `tokens` `[B]` tokens."""
        if self.space.per_request:
            return np.minimum(tokens, 1)
        return -(-tokens // self.space.tokens_per_item)

    def first_whole(self, received: int) -> int:
        """The number of the first item that has all that later tokens may need:
        entries that were dead at `received` tokens never came. Of a page's ring, what is alive at
        its end. With a window of 8 and pages of 4, 21 received tokens came with entries from 13 on:
        item 3 lacks entry 12, and item 4 is the first whole one.
        """
        first = 0
        for space in self._spaces:
            start = space.alive(received).start
            at_end = space.ring is not None and start > 0
            needed = start + (space.window or 0) if at_end else start
            first = max(first, -(-needed // space.entries_per_item) - at_end)
        return first

    def extension(self, rows: Ints, reach: Ints, tokens: Ints) -> Change:
        """The change to the items of `tokens` `[B]` tokens, from those alive after `reach` on."""
        stop, had, end = self.stop(tokens), self.held_from[rows], self._stop[rows]
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
        first, end, stop = self.held_from[rows], self._stop[rows], self.stop(tokens)
        last = stop - 1
        kept = (tokens % self.space.tokens_per_item > 0) & (last >= first)
        row, column = rows[kept], last[kept]
        shared = self.free_list.is_shared(self.ids[row, column])
        return Change(
            rows=rows,
            first=np.minimum(first, stop),
            stop=stop,
            gone=_cells(rows, np.maximum(stop, first), end),
            needed=int(shared.sum()),
            since=stop,
            copied=(row[shared], column[shared]),
        )

    def free_cells(self, cells: Cells) -> None:
        """Frees the items in cells."""
        ids = self.ids[cells]
        self.ids[cells] = NO_ITEM
        self.free_list.release(ids)

    def apply_change(self, change: Change) -> tuple[Ints, Ints]:
        """Takes what a change needs; returns ids to copy from, then to be released, and to."""
        # tokens that are all dead need no item, and are looked up all the same
        self._widen(int(change.stop.max(initial=0)))
        source = fresh = self.ids[change.copied]
        if change.needed:
            fresh = self.free_list.take(change.needed)
            cells = change.copied if source.size else _cells(change.rows, change.since, change.stop)
            self.ids[cells] = fresh
        self.held_from[change.rows], self._stop[change.rows] = change.first, change.stop
        return source, fresh[: source.size]

    def fork(self, row: int, child: int, end: Ints, copied: int) -> tuple[Ints, Ints]:
        """Gives a new request the items of the first `end` `[1]` tokens of another; the last
        `copied` items are new ones; returns the ids to copy from and to.
        """
        first, stop = int(self.first(end)[0]), int(self.stop(end)[0])
        shared, source = np.split(self.ids[row, first:stop], [stop - first - copied])
        self.free_list.share(shared)
        fresh = self.free_list.take(copied)
        self.adopt(child, first, np.concatenate([shared, fresh]))
        return source, fresh

    def adopt(self, row: int, first: int, ids: Ints) -> None:
        """Makes held items those of a new request, from number `first` on."""
        stop = first + ids.size
        self._widen(stop)
        self.ids[row, first:stop] = ids
        self.held_from[row], self._stop[row] = first, stop

    def release(self, rows: Ints) -> None:
        """Frees the items of requests that no other request holds."""
        self.free_cells(_cells(rows, self.held_from[rows], self._stop[rows]))
        self.held_from[rows] = self._stop[rows] = 0

    def check_integrity(self, live: Ints, tokens: Ints) -> Ints:
        """See Allocator.check_integrity: `tokens` of requests `live`. Returns their ids."""
        first, stop = self.held_from[live], self._stop[live]
        wrong = np.flatnonzero((first > self.first(tokens)) | (stop != self.stop(tokens)))
        for row in wrong.tolist():
            raise RuntimeError(
                f"space {self.space.name}: items {first[row]} to {stop[row] - 1} are held by a "
                f"request of {tokens[row]} tokens."
            )
        return self.ids[_cells(live, first, stop)]

    def _widen(self, columns: int) -> None:
        present = self.ids.shape[1]
        if columns > present:
            more = max(columns, 2 * present) - present
            self.ids = np.pad(self.ids, ((0, 0), (0, more)), constant_values=NO_ITEM)


def _cells(rows: Ints, first: Ints, stop: Ints) -> Cells:
    """The cells `first` to `stop` of every row."""
    count = np.maximum(stop - first, 0)
    if not count.any():  # as for most lists of a decode step
        return rows[:0], rows[:0]
    group, within = ragged(count)
    return rows[group], first[group] + within
