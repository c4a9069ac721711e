"""Hands out the items of every space to requests, and takes them back.

All requests are rows of one table per id list, so that a batch is extended in a few array
operations, whatever its size.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from operator import index
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from kvpool.block_table import IdList, OutOfPages
from kvpool.layout import PoolLayout, RequestAddress, Span
from kvpool.layout.grid import Ints
from kvpool.layout.request_address import MAX_TOKENS

__all__ = ["Allocator", "OutOfPages", "Request"]


# who hands out the items of the memory that begins at an address
_HANDED_OUT: WeakValueDictionary[tuple[str, int], Allocator] = WeakValueDictionary()


class HasItems(Protocol):
    """A pool, as far as an allocator needs to know it."""

    layout: PoolLayout

    def copy_items(self, space: str, src: Any, dst: Any) -> None:
        """Copies items of an id list; see KVPool.copy_items."""


class Request:
    """One request's tokens, as its allocator knows them.

    `given` is how many of them the pool of an owner was given, where that is known to be fewer;
    `unfinished` are owners of whose layers some were not given all.
    """

    __slots__ = ("_allocator", "_row", "given", "unfinished")

    def __init__(self, allocator: Allocator, row: int) -> None:
        self._allocator, self._row = allocator, row
        self.given: dict[str, int] = {}
        self.unfinished: set[str] = set()

    @property
    def num_tokens(self) -> int:
        """Tokens for which there is room; 0 once freed."""
        return int(self._allocator._tokens[self._row]) if self._allocator._holds(self) else 0

    def address(self) -> RequestAddress:
        """Where the tokens lie now, as plans read it. Raises ValueError once freed."""
        if not self._allocator._holds(self):
            raise ValueError("this request was freed: its items are others' now.")
        lists = self._allocator.lists
        spans = {name: Span(*each.span(self._row)) for name, each in lists.items()}
        return RequestAddress(self.num_tokens, spans)


class Allocator:
    """The items of one pool, or of a target and its drafts, which then share their requests' ids.

    Pages of tokens are counted, so that requests share a prefix; pages that have left a window go
    back when their request is extended; a slot or ring is a request's own.
    """

    def __init__(self, *pools: HasItems) -> None:
        if not pools:
            raise ValueError("an allocator is for at least one pool.")
        self.pools = pools
        _alone(self, pools)
        first, *others = (pool.layout for pool in pools)
        self.layout = PoolLayout.merge(first, *others) if others else first
        used = {self.layout.space_by_name[buffer.space].name for buffer in self.layout.buffers}
        self.spaces = tuple(space for space in self.layout.spaces if space.name in used)
        self.lists = {name: self._list(name) for name in {s.id_list: 0 for s in self.spaces}}
        self._tokens: Ints = np.zeros(0, dtype=np.int64)
        # tokens that a request had when last some were received: what was dead then never came
        self._received: Ints = np.zeros(0, dtype=np.int64)
        self._live: dict[int, Request] = {}
        self._rows: list[int] = []

    @property
    def free_pages(self) -> int:
        """Pages of tokens that can still be handed out, in the list that has fewest. Raises
        ValueError where no list grows with the tokens of a request.
        """
        spaces = (self.layout.space_by_name[name] for name in self.lists)
        grow = [s.name for s in spaces if not s.per_request and s.window is None]
        if not grow:
            raise ValueError(f"no pages of tokens here: ask free_items for one of {[*self.lists]}.")
        return min(self.free_items(name) for name in grow)

    def free_items(self, id_list: str) -> int:
        """Items of an id list that can still be handed out."""
        return self.lists[id_list].num_free

    def new_request(self) -> Request:
        """A request without tokens; it holds nothing yet."""
        if not self._rows:
            rows = self._tokens.size
            more = max(16, rows)
            self._tokens = np.append(self._tokens, np.zeros(more, dtype=np.int64))
            self._received = np.append(self._received, np.zeros(more, dtype=np.int64))
            self._rows.extend(range(rows + more - 1, rows - 1, -1))
            for each in self.lists.values():
                each.add_rows(more)
        request = Request(self, self._rows.pop())
        self._live[request._row] = request
        return request

    def extend(self, request: Request, tokens: int, *, received: bool = False) -> dict[str, Ints]:
        """Makes room for `tokens` more tokens; returns their flat locations by space.

        Locations are int64 `[tokens]`: a token's entry (a compressed one has several tokens), or
        its slot; -1 where a ring has no room for it beside later ones. Pages that have left a
        window go back first. `received`: the tokens are computed elsewhere, so what is dead at
        their end gets no page, and -1. Raises OutOfPages, and changes nothing, if too few items are
        free.
        """
        found = self.extend_batch([request], tokens, received=received)
        return {space: rows[0] for space, rows in found.items()}

    def extend_batch(
        self, requests: Sequence[Request], tokens: int, *, received: bool = False
    ) -> dict[str, Ints]:
        """`extend` for each of a batch, all or none: int64 `[B, tokens]` by space."""
        rows, tokens = self._rows_of(requests), _whole(tokens)
        before = self._tokens[rows]
        if tokens < 0:
            raise ValueError(f"tokens: 0 or more, got {tokens}. Requests do not shrink.")
        if int(before.max(initial=0)) + tokens > MAX_TOKENS:
            raise ValueError(f"tokens: {tokens} more are over {MAX_TOKENS}, the most of a request.")
        after = before + tokens
        # what later tokens may still read: all that is alive now, or only what is alive in the end
        reach = after if received else before
        changes = {
            name: each.prepare(rows, self._first(name, reach), self._stop(name, after))
            for name, each in self.lists.items()
        }
        positions = before[:, None] + np.arange(tokens, dtype=np.int64)
        for name, each in self.lists.items():
            each.apply(changes[name])
        self._tokens[rows] = after
        if received:
            self._received[rows] = after
            for request in requests:
                request.given = dict.fromkeys(request.given, request.num_tokens)
        return self._locate(rows, positions, after)

    def locations(self, request: Request) -> dict[str, Ints]:
        """Flat locations of all tokens of a request, int64 `[num_tokens]`, by space; -1 for those
        that have no place any more.
        """
        rows = self._rows_of([request])
        after = self._tokens[rows]
        positions = np.arange(int(after[0]), dtype=np.int64)[None]
        return {name: found[0] for name, found in self._locate(rows, positions, after).items()}

    def fork(self, request: Request, tokens: int) -> Request:
        """A request whose first `tokens` tokens are those of `request`: whole pages are shared, a
        partial last page, slots and rings are copied.

        Raises ValueError if the state at that prefix is not there (slots and rings are those of the
        last token; window pages go back, and were not received if dead), and OutOfPages, and
        changes nothing.
        """
        tokens = _whole(tokens)
        if request.unfinished:
            raise ValueError("the last forward over this request ended half-way. Free it.")
        (row,) = self._rows_of([request])
        held, received = int(self._tokens[row]), self._received[row : row + 1]
        if not 0 <= tokens <= held:
            raise ValueError(f"tokens: 0 to {held}, which the request has, got {tokens}.")
        end = np.array([tokens], dtype=np.int64)
        parts = {}
        for name, each in self.lists.items():
            lender = self.layout.space_by_name[name]
            if lender.per_request and tokens not in (0, held):
                raise ValueError(
                    f"space {name}: holds the state of {held} tokens, not that of {tokens}. Fork "
                    "at the end of the request."
                )
            first, stop = int(self._first(name, end)[0]), int(self._stop(name, end)[0])
            start, came = int(self._start(name, end)[0]), int(self._start(name, received)[0])
            if tokens and start < came:
                raise ValueError(
                    f"space {name}: entries {start} to {came - 1} of that prefix were dead when "
                    "it was received, and did not come."
                )
            shared = (
                stop
                if not lender.per_request and tokens % lender.tokens_per_item == 0
                else stop - 1
            )
            parts[name] = each.check_fork(int(row), first, max(shared, first), stop)
        child = self.new_request()
        child.given = {owner: min(given, tokens) for owner, given in request.given.items()}
        self._tokens[child._row] = tokens
        self._received[child._row] = min(int(received[0]), tokens)
        copies = [
            (name, *each.apply_fork(child._row, parts[name])) for name, each in self.lists.items()
        ]
        try:
            self._copy(copies)
        except BaseException:
            self.free(child)
            raise
        return child

    def free(self, request: Request) -> None:
        """Takes back all that only this request holds."""
        rows = self._rows_of([request])
        for each in self.lists.values():
            each.release(rows)
        self._tokens[rows] = self._received[rows] = 0
        del self._live[request._row]
        self._rows.append(request._row)

    def check_integrity(self) -> None:
        """Every item is free, or held by as many requests as is counted, and every request holds
        those of its tokens; raises RuntimeError naming the first that is not.
        """
        live = np.array(sorted(self._live), dtype=np.int64)
        tokens = self._tokens[live]
        for name, each in self.lists.items():
            each.check_integrity(live, self._first(name, tokens), self._stop(name, tokens))

    def _copy(self, copies: Sequence[tuple[str, Ints, Ints]]) -> None:
        """Copies items of id lists, in every pool that has them."""
        for name, src, dst in copies:
            for pool in self.pools if src.size else ():
                if any(space.id_list == name for space in pool.layout.spaces):
                    pool.copy_items(name, src, dst)

    def _list(self, name: str) -> IdList:
        items = min(
            buffer.items
            for buffer in self.layout.buffers
            if self.layout.space_by_name[buffer.space].id_list == name
        )
        return IdList(self.layout.space_by_name[name], items)

    def _start(self, name: str, tokens: Ints) -> Ints:
        """Number of the first entry that is alive of requests of so many tokens `[B]`."""
        space = self.layout.space_by_name[name]
        if space.per_request or space.window is None:
            return np.zeros_like(tokens)
        step = space.window_step
        return np.maximum(tokens // space.tokens_per_entry // step * step - space.window, 0)

    def _first(self, name: str, tokens: Ints) -> Ints:
        """Number of the first item that is alive of requests of so many tokens `[B]`."""
        return self._start(name, tokens) // self.layout.space_by_name[name].entries_per_item

    def _stop(self, name: str, tokens: Ints) -> Ints:
        """Number of items up to the last one of requests of so many tokens `[B]`."""
        space = self.layout.space_by_name[name]
        if space.per_request:
            return np.minimum(tokens, 1)
        return -(-tokens // space.tokens_per_item)

    def _locate(self, rows: Ints, positions: Ints, after: Ints) -> dict[str, Ints]:
        found = {}
        for space in self.spaces:
            table, size = self.lists[space.id_list], space.entries_per_item
            entries = positions // space.tokens_per_entry
            if space.per_request:
                located = table.find(rows, np.zeros_like(positions)) * size + entries % size
                kept = entries >= (after // space.tokens_per_entry)[:, None] - size
                found[space.name] = np.where(kept | (space.kind == "slot"), located, -1)
            else:
                items = table.find(rows, entries // size)
                found[space.name] = np.where(items < 0, -1, items * size + entries % size)
        return found

    def _rows_of(self, requests: Sequence[Request]) -> Ints:
        live = self._live
        if not all(live.get(request._row) is request for request in requests):
            raise ValueError("this request was freed, or belongs to another allocator.")
        rows: npt.NDArray[np.int64] = np.array([r._row for r in requests], dtype=np.int64)
        if len(set(rows.tolist())) != rows.size:
            raise ValueError("a request is named twice in the batch.")
        return rows

    def _holds(self, request: Request) -> bool:
        return self._live.get(request._row) is request


def _whole(tokens: Any) -> int:
    try:
        return index(tokens)
    except TypeError:
        raise TypeError(f"tokens: a whole number, got {tokens!r}.") from None


def _alone(allocator: Allocator, pools: Sequence[HasItems]) -> None:
    """Two allocators of one pool would hand out the same items: the first must be done."""
    places = [(b.memory, b.base) for pool in pools for b in pool.layout.buffers[:1]]
    for collected in (False, True):
        busy = [p for p in places if p in _HANDED_OUT and _HANDED_OUT[p]._live and p[0] != "meta"]
        if busy and collected:
            raise ValueError(
                f"this pool has an allocator already, with {len(_HANDED_OUT[busy[0]]._live)} live "
                "requests. Use that one, or free them."
            )
        if busy:
            gc.collect()
    _HANDED_OUT.update((place, allocator) for place in places)
