"""The pins of an allocator's requests, and the calls that they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

from kvpool.block_table import BlockTable, Change
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
        with self._lock:
            return self._keep(row, [pin for pin in self._by_row.get(row, ()) if pin.held()]).copy()

    def add(self, row: int, tokens: int, pin: Pin) -> None:
        """Adds a pin to a row of `tokens` tokens. See Holder.pin."""
        lost = pin.lost(tokens, lambda name: self._lists[name].span(row)[1]) if pin.last else None
        if lost:
            raise ValueError(
                f"this block table is of {pin.address.num_tokens} tokens, the request has {tokens} "
                f"by now and has lost {lost}. Take request.address() anew."
            )
        for name, each in self._lists.items() if pin.side == "received" else ():
            shared = each.shared(row, pin.start // each.space.tokens_per_item)
            if shared.size:
                raise ValueError(
                    f"room {pin.room!r} would write to items {ranges(shared.tolist())} of space "
                    f"{name}, which other requests hold too, or are kept for others. Receive what "
                    "follows that prefix."
                )
        for other in self.held(row):
            same = (other.room, other.side) == (pin.room, pin.side)  # its endpoint has an answer
            if same or other.side == pin.side == "offered" or not pin.meets(other):
                continue
            offered = f"room {pin.room!r} would offer what is not there yet"
            received = f"room {pin.room!r} would write to the same items"
            raise other.refusal(offered if pin.side == "offered" else received)
        with self._lock:
            self._by_row.setdefault(row, []).append(pin)

    def remove(self, row: int, pin: Pin) -> None:
        """Removes a pin, if it is there."""
        with self._lock:
            self._keep(row, [other for other in self._by_row.get(row, ()) if other is not pin])

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

    def check_written(self, row: int, change: str) -> None:
        """Raises RequestPinned, saying what `change` would do, while a room receives the row."""
        for pin in self.held(row):
            if pin.side == "received":
                raise pin.refusal(f"{change} what is not there yet")

    def check_free(self, row: int) -> None:
        """Raises RequestPinned while a room offers or receives the row."""
        for pin in self.held(row):
            spans = ((name, each.span(row)[0].tolist()) for name, each in self._lists.items())
            items = (f"items {ranges(ids)} of space {name}" for name, ids in spans if ids)
            raise pin.refusal(f"free would give up {', '.join(items)}")

    def _keep(self, row: int, pins: list[Pin]) -> list[Pin]:
        if pins:
            self._by_row[row] = pins
        else:
            self._by_row.pop(row, None)
        return pins
