"""The pins of an allocator's requests, and the calls that they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from threading import Lock

import numpy as np

from kvpool.allocation.block_table import BlockTable, Change
from kvpool.layout import Pin
from kvpool.layout.grid import Ints
from kvpool.layout.sentences import ranges


class Pins:
    """Pins by row of the block tables. Those that are not held any more are dropped when they are
    looked at. Any thread may add one.
    """

    def __init__(self, lists: Mapping[str, BlockTable]) -> None:
        self._lists = lists
        self._by_row: dict[int, list[Pin]] = {}
        self._lock = Lock()

    def held(self, row: int) -> list[Pin]:
        """The pins of a row that are held."""
        if row not in self._by_row:
            return []
        return self._drop(row, lambda pin: not pin.held())

    def add(self, row: int, tokens: int, pin: Pin) -> None:
        """Adds a pin to a row of `tokens` tokens. See Holder.pin."""
        lost = self._taken_back(row, tokens, pin)
        if lost is None and pin.last:
            lost = pin.lost(tokens, lambda name: self._lists[name].span(row)[1])
        if lost:
            raise ValueError(
                f"this block table is of {pin.address.num_tokens} tokens, the request has {tokens} "
                f"by now and has lost {lost}. Take request.address() anew."
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

    def remove(self, row: int, pin: Pin) -> None:
        """Removes a pin, if it is there."""
        self._drop(row, lambda earlier: earlier is pin)

    def check_extend(self, rows: Ints, after: Ints, changes: Mapping[str, Change]) -> None:
        """Raises RequestPinned if rows `[B]` may not have `after` `[B]` tokens by these changes."""
        if not self._by_row:  # as for most batches
            return
        pinned = [(n, row) for n, row in enumerate(rows.tolist()) if row in self._by_row]
        for index, pin in ((n, pin) for n, row in pinned for pin in self.held(row) if pin.last):
            tokens = int(after[index])
            first = {name: int(change.first[index]) for name, change in changes.items()}
            if lost := pin.lost(tokens, first.__getitem__):
                raise pin.refusal(f"at {tokens} tokens it would lose {lost}")

    def check_truncate(self, rows: Ints, after: Ints, copied: Iterable[int]) -> None:
        """Raises RequestPinned if rows `[B]` may not be truncated to `after` `[B]` tokens, which
        replaces an item of the rows `copied`.
        """
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
            numbers = table.shared(row, pin.start // size)
            if numbers.size:
                shared.append(table.sharers(table.find(np.array([row]), numbers[None])[0], row))
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

    def _drop(self, row: int, ended: Callable[[Pin], bool]) -> list[Pin]:
        """Drops the pins of a row that have ended; returns the others."""
        with self._lock:
            pins = [pin for pin in self._by_row.get(row, ()) if not ended(pin)]
            if pins:
                self._by_row[row] = pins
            else:
                self._by_row.pop(row, None)
        return pins.copy()
