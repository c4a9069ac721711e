"""Block tables: the items of each request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvpool.allocation.free_list import FreeList
from kvpool.allocation.truncation import alive_start, first_whole
from kvpool.layout import Space
from kvpool.layout.grid import Ints, ragged
from kvpool.layout.sentences import ranges

NO_ITEM = -1


class Change(NamedTuple):
    """An extension: (row, column) of cells to free, those to fill from `since` on, how many these
    are, and the new bounds of the rows.
    """

    rows: Ints
    gone: tuple[Ints, Ints]
    since: Ints
    needed: int
    first: Ints
    stop: Ints


class Cut(NamedTuple):
    """A truncation: the end of the items of each row, cells (row, column) to free, and those of
    last items that others hold too, which are replaced by a copy.
    """

    rows: Ints
    stop: Ints
    gone: tuple[Ints, Ints]
    copied: tuple[Ints, Ints]


class Fork(NamedTuple):
    """A fork: items from number `first` on are shared `ids`, then copies of `src`."""

    first: int
    ids: Ints
    src: Ints


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
        """The first item of which all came that later tokens may need; see `first_whole`."""
        return max(first_whole(space, received) for space in self._spaces)

    def prepare(self, rows: Ints, reach: Ints, tokens: Ints) -> Change:
        """The change after which requests hold the items of `tokens` `[B]` tokens, from those on
        that are alive after `reach`.
        """
        first, stop = self.first(reach), self.stop(tokens)
        had, end = self._first[rows], self._stop[rows]
        first = np.maximum(np.minimum(first, stop), had)
        since = np.maximum(end, first)
        # counted, not listed: they may be more than there are
        needed = int(np.maximum(stop - since, 0).sum())
        gone = _cells(rows, had, np.minimum(first, end))
        return Change(rows=rows, gone=gone, since=since, needed=needed, first=first, stop=stop)

    def ids(self, cells: tuple[Ints, Ints]) -> Ints:
        """The ids in cells (row, column)."""
        return self._table[cells]

    def give_back(self, change: Change | Cut) -> None:
        """Frees what a prepared change frees."""
        self._put(change.gone)

    def fill(self, change: Change) -> None:
        """Takes what a prepared change needs."""
        # tokens that are all dead need no item, and are looked up all the same
        if (stop := int(change.stop.max(initial=0))) > self._table.shape[1]:
            self._widen(stop)
        if change.needed:
            fresh = _cells(change.rows, change.since, change.stop)
            self._table[fresh] = self.free_list.take(change.needed)
        self._first[change.rows], self._stop[change.rows] = change.first, change.stop

    def prepare_cut(self, rows: Ints, tokens: Ints) -> Cut:
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
        gone = _cells(rows, np.maximum(stop, first), end)
        return Cut(rows, stop, gone, (row[shared], column[shared]))

    def cut(self, cut: Cut) -> tuple[Ints, Ints]:
        """Applies a prepared truncation, of which `gone` was given back; returns the ids to copy
        from, which are to be released then, and to.
        """
        source = self._table[cut.copied]
        fresh = self.free_list.take(source.size)
        self._table[cut.copied] = fresh
        self._first[cut.rows] = np.minimum(self._first[cut.rows], cut.stop)
        self._stop[cut.rows] = cut.stop
        return source, fresh

    def freed(self, rows: Ints) -> Ints:
        """How many items of each request were freed before those that it holds, `[B]`."""
        return self._first[rows]

    def check_fork(self, row: int, first: int, shared: int, stop: int) -> Fork:
        """The items of a fork of `row`; raises ValueError."""
        if stop > first and first < self._first[row]:
            raise ValueError(
                f"space {self.space.name}: items {first} to {int(self._first[row]) - 1} of that "
                "prefix have left the window and were freed."
            )
        return Fork(
            first, self._table[row, first:shared].copy(), self._table[row, shared:stop].copy()
        )

    def apply_fork(self, row: int, fork: Fork) -> tuple[Ints, Ints]:
        """Gives a new request its items; returns the ids to copy from and to."""
        self.free_list.share(fork.ids)
        fresh = self.free_list.take(fork.src.size)
        self.adopt(row, fork.first, np.concatenate([fork.ids, fresh]))
        return fork.src, fresh

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
        what, bounds = f"space {self.space.name}: item", (self.first(tokens), self.stop(tokens))
        for has, end, start, needs in zip(self._first[live], self._stop[live], *bounds):
            if has > start or end != needs:
                raise RuntimeError(
                    f"{what}s {has} to {end - 1} are held by a request whose tokens are in "
                    f"{start} to {needs - 1}."
                )
        rows, columns = _cells(live, self._first[live], self._stop[live])
        ids = self._table[rows, columns]
        once = np.unique(np.stack([rows, ids]), axis=1)
        if once.shape[1] != ids.size:
            raise RuntimeError(f"{what}s are listed twice in one request.")
        if (self._table >= 0).sum() != (ids >= 0).sum():
            raise RuntimeError(f"space {self.space.name}: ids are left in rows without items.")
        return ids

    def _put(self, cells: tuple[Ints, Ints]) -> None:
        ids = self._table[cells]
        self._table[cells] = NO_ITEM
        self.free_list.release(ids)

    def _widen(self, least: int) -> None:
        rows, columns = self._table.shape
        more = np.full((rows, max(least, 2 * columns) - columns), NO_ITEM, dtype=np.int64)
        self._table = np.concatenate([self._table, more], axis=1)


def _cells(rows: Ints, first: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Rows and columns of the cells `first` to `stop` of every row."""
    count = np.maximum(stop - first, 0)
    if not count.any():  # as for most lists of a decode step
        return rows[:0], rows[:0]
    group, within = ragged(count)
    return rows[group], first[group] + within
