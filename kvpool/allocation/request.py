"""One request of an allocator, the pins of requests and the calls that they refuse, and arguments
that name requests and their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from threading import Lock
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
import numpy.typing as npt

from kvpool.allocation.block_table import BlockTable, Change
from kvpool.layout import Pin, RequestAddress, Span
from kvpool.layout.grid import Ints
from kvpool.layout.request_address import MAX_TOKENS
from kvpool.layout.text import ranges

if TYPE_CHECKING:
    from kvpool.allocation.tables import Tables

FREED = -1
"""The row of a request that was freed."""


class Request:
    """One request: a row of the block tables of its allocator, which lives as long as it."""

    __slots__ = ("__weakref__", "_allocator", "_row", "_tables")

    def __init__(self, allocator: object, tables: Tables, row: int) -> None:
        self._allocator, self._tables, self._row = allocator, tables, row

    def __repr__(self) -> str:
        if self._row == FREED:
            return "Request(freed)"
        return f"Request({self.address().words()})"

    @property
    def num_tokens(self) -> int:
        """Tokens for which items are allocated; 0 once freed."""
        return int(self._tables.tokens[self._row]) if self._row != FREED else 0

    @property
    def received_tokens(self) -> int:
        """`num_tokens` after the last `extend(received=True)`; 0 without one, or once freed."""
        return int(self._tables.received[self._row]) if self._row != FREED else 0

    def address(self) -> RequestAddress:
        """The request's current block table, which plans read; endpoints that are given it pin the
        request (kvpool.layout.request_address). Raises ValueError once freed.
        """
        row = self._live_row()
        items = {name: table.span(row) for name, table in self._tables.lists.items()}
        spans = {name: Span(ids, first) for name, (ids, first) in items.items()}
        return RequestAddress(self.num_tokens, spans, self)

    def pin(self, pin: Pin) -> None:
        """See Holder.pin; endpoints call it."""
        if pin.side == "offered":
            self._tables.check_settled(np.array([self._live_row()]))
        self._tables.pins.add_pin(self._live_row(), self.num_tokens, pin)

    def unpin(self, pin: Pin) -> None:
        """See Holder.unpin."""
        self._tables.pins.drop(self._row, lambda earlier: earlier is pin)

    def pins(self) -> list[Pin]:
        """The pins that are held: while there are any, the request cannot be freed."""
        return self._tables.pins.held(self._row)

    def _live_row(self) -> int:
        if self._row == FREED:
            raise ValueError("this request was freed: its items may belong to other requests.")
        return self._row


class Pins:
    """Pins by row of the block tables, dropped once they are not held. Any thread may add one."""

    def __init__(self, lists: Mapping[str, BlockTable]) -> None:
        self._lists = lists
        self._by_row: dict[int, list[Pin]] = {}
        self._lock = Lock()

    def held(self, row: int) -> list[Pin]:
        """The pins of a row that are held."""
        if row not in self._by_row:
            return []
        return self.drop(row, lambda pin: not pin.held())

    def add_pin(self, row: int, tokens: int, pin: Pin) -> None:
        """Adds a pin to a row of `tokens` tokens. See Holder.pin."""
        lost = self._taken_back(row, tokens, pin)
        if lost is None and pin.last:
            lost = pin.lost(tokens, lambda name: int(self._lists[name].held_from[row]))
        if lost:
            raise ValueError(
                f"this block table is of {pin.address.num_tokens} tokens, the request has {tokens} "
                f"now and has lost {lost}. Call request.address() again."
            )
        if pin.side == "received":
            self._check_unshared(row, pin)
        for earlier in self.held(row):
            # of the same room and side: its endpoint has an answer
            same = (earlier.room, earlier.side) == (pin.room, pin.side)
            if same or earlier.side == pin.side == "offered" or not pin.meets(earlier):
                continue
            offered = f"{pin.claimant} would offer what is not there yet"
            received = f"{pin.claimant} would write to the same items"
            raise earlier.refusal(offered if pin.side == "offered" else received)
        with self._lock:
            self._by_row.setdefault(row, []).append(pin)

    def drop(self, row: int, ended: Callable[[Pin], bool]) -> list[Pin]:
        """Drops the pins of a row that have ended; returns the others."""
        with self._lock:
            pins = [pin for pin in self._by_row.get(row, ()) if not ended(pin)]
            if pins:
                self._by_row[row] = pins
            else:
                self._by_row.pop(row, None)
        return pins.copy()

    def check_extend(self, rows: Ints, after: Ints, changes: Mapping[str, Change]) -> None:
        """Raises RequestPinned if rows `[B]` may not have `after` `[B]` tokens by these changes."""
        for n, row in enumerate(rows.tolist()) if self._by_row else ():  # none in most batches
            for pin in (pin for pin in self.held(row) if pin.last):
                tokens = int(after[n])
                first = {name: int(change.first[n]) for name, change in changes.items()}
                if lost := pin.lost(tokens, first.__getitem__):
                    raise pin.refusal(f"at {tokens} tokens it would lose {lost}")

    def check_truncate(self, rows: Ints, after: Ints, copied: Iterable[int]) -> None:
        """Raises RequestPinned if rows `[B]` cannot have `after` tokens, `copied` new items."""
        if not self._by_row:
            return
        replaced = set(copied)
        for row, tokens in zip(rows.tolist(), after.tolist()):
            for pin in self.held(row):
                most = pin.address.num_tokens
                if tokens < most:
                    raise pin.refusal(f"at {tokens} tokens it would lose {tokens} to {most - 1}")
                if row in replaced:
                    raise pin.refusal(f"at {tokens} tokens its last item would be another")

    def check_written(self, row: int, change: str) -> None:
        """Raises RequestPinned, saying what `change` would do, while a room receives the row."""
        for pin in self.held(row):
            if pin.side == "received":
                raise pin.refusal(f"{change} what is not there yet")

    def check_free(self, row: int) -> None:
        """Raises RequestPinned while a room offers or receives the row."""
        for pin in self.held(row):
            spans = ((name, table.span(row)[0].tolist()) for name, table in self._lists.items())
            items = (f"items {ranges(ids)} of space {name}" for name, ids in spans if ids)
            raise pin.refusal(f"free would give up {', '.join(items)}")

    def _check_unshared(self, row: int, pin: Pin) -> None:
        """Raises ValueError if others need an item of a row that would be written from the pin's
        first position on. Slots and rings are never shared.
        """
        tokens, shared, own = pin.address.num_tokens, [], 0  # nothing is shared from `own` on
        for table in self._lists.values():
            size = table.space.tokens_per_item
            ids, first = table.span(row)
            numbers = first + np.flatnonzero(table.free_list.is_wanted(ids))
            numbers = numbers[numbers >= pin.start // size]
            if numbers.size:
                shared.append(table.sharers(table.ids[row, numbers], row))
                own = max(own, min((int(numbers[-1]) + 1) * size, tokens))
        if shared:
            raise ValueError(
                f"{pin.claimant} would write positions {pin.start} to {tokens - 1} of this "
                f"request to {'; '.join(shared)}. Begin at position {own} (start={own}, of a "
                f"snapshot tokens=range({own}, {tokens})), or give a request that shares nothing: "
                "new_request() without tokens."
            )

    def _taken_back(self, row: int, tokens: int, pin: Pin) -> str | None:
        """What a truncation has taken of a pin's block table; None if nothing."""
        if tokens < pin.address.num_tokens:
            return f"the last {pin.address.num_tokens - tokens} tokens"
        for name, table in self._lists.items():
            span, (ids, first) = pin.address.spans.get(name), table.span(row)
            if span is None:
                continue
            low = max(first, span.first_item)
            high = max(low, min(first + ids.size, span.first_item + span.ids.size))
            theirs = span.ids[low - span.first_item : high - span.first_item]
            replaced = theirs[theirs != ids[low - first : high - first]]
            if replaced.size:
                return f"items {ranges(replaced.tolist())} of space {name}"
        return None


def rows_of(tables: Tables, requests: Sequence[Request]) -> Ints:
    """The rows `[B]` of requests; ValueError for those freed, of other tables or named twice."""
    numbers = [r._row if r._tables is tables else FREED for r in requests]
    if FREED in numbers:
        raise ValueError("this request was freed, or belongs to another allocator.")
    if len(set(numbers)) != len(numbers):
        raise ValueError("a request is named twice in the batch.")
    return np.array(numbers, dtype=np.int64)


def tokens_of_each(rows: Ints, tokens: npt.ArrayLike) -> Ints:
    """One number, or one of each request, as int64 `[B]`."""
    # an int of any size is one number; more than MAX_TOKENS is refused later
    numbers = np.asarray(min(tokens, MAX_TOKENS + 1) if isinstance(tokens, int) else tokens)
    whole = numbers.dtype.kind in "iu" or not numbers.size
    if not whole or numbers.shape not in ((), rows.shape):
        raise ValueError(
            f"tokens: a whole number, or one for each of {rows.size} requests, got {tokens!r}."
        )
    return np.broadcast_to(numbers.astype(np.int64), rows.shape)


def whole(tokens: SupportsIndex) -> int:
    """A number of tokens. Raises TypeError for anything else."""
    try:
        return index(tokens)
    except TypeError:
        raise TypeError(f"tokens: a whole number, got {tokens!r}.") from None
