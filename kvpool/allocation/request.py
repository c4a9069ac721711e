"""One request of an allocator, and the arguments that name requests and their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from kvpool.allocation.tables import Tables
from kvpool.layout import Pin, RequestAddress
from kvpool.layout.grid import Ints
from kvpool.layout.request_address import MAX_TOKENS

FREED = -1
"""The row of a request that was freed."""


class Request:
    """One request: a row of the block tables of its allocator, which lives as long as it."""

    __slots__ = ("__weakref__", "_allocator", "_row", "_tables")

    def __init__(self, allocator: object, tables: Tables, row: int) -> None:
        self._allocator, self._tables, self._row = allocator, tables, row

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
        return RequestAddress(self.num_tokens, self._tables.spans(self._live_row()), self)

    def pin(self, pin: Pin) -> None:
        """See Holder.pin; endpoints call it."""
        if pin.side == "offered":
            self._tables.check_settled(np.array([self._live_row()]))
        self._tables.pins.add(self._live_row(), self.num_tokens, pin)

    def unpin(self, pin: Pin) -> None:
        """See Holder.unpin."""
        self._tables.pins.remove(self._row, pin)

    def pins(self) -> list[Pin]:
        """The pins that are held: while there are any, the request cannot be freed."""
        return self._tables.pins.held(self._row)

    def _live_row(self) -> int:
        if self._row == FREED:
            raise ValueError("this request was freed: its items may belong to other requests.")
        return self._row


def rows_of(tables: Tables, requests: Sequence[Request]) -> Ints:
    """The rows `[B]` of requests. Raises ValueError for those that are freed, of other tables, or
    named twice.
    """
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
