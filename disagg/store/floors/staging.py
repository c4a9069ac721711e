"""Memory that a transfer engine knows, lent in pieces and bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from disagg.store.floors.base import Bytes, FloorError

ALIGNMENT = 64
PAGE = 4096
WAIT_SECONDS = 10.0
"""How long a call waits for others to give memory back."""
QUARANTINE_SECONDS = 120.0
"""How long memory rests after a transfer that failed: Mooncake gives a transfer up after 60 seconds
at most, and until then bytes of it may still arrive."""


@dataclass
class LentPiece:
    """Memory that is lent: its address, its bytes, and whether bytes may still arrive in it."""

    address: int
    memory: Bytes
    uncertain: bool = False


class LentStaging:
    """So many bytes; each piece is lent to one call."""

    def __init__(self, nbytes: int) -> None:
        memory = np.zeros(nbytes + PAGE, np.uint8)
        start = -memory.ctypes.data % PAGE
        self.memory: Bytes = memory[start : start + nbytes]
        self.address = int(self.memory.ctypes.data)
        self._free = [(0, nbytes)]  # disjoint, in order, not adjacent
        self._resting: list[tuple[float, int, int]] = []  # until when, start, stop
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        return self.memory.size

    @contextmanager
    def lent(self, nbytes: int, what: str) -> Iterator[LentPiece]:
        """A piece; if it is uncertain at the end, it rests before others have it. Raises FloorError
        where others keep the memory, and where there is not as much.
        """
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if size > self.nbytes:
            raise FloorError(
                f"{what}: {nbytes:,} bytes at once, of {self.nbytes:,} of staging. Read less at "
                f"once, or open the store with staging={-(-size >> 20)}MiB or more."
            )
        start = self._take(size, what)
        piece = LentPiece(self.address + start, self.memory[start : start + nbytes])
        try:
            yield piece
        finally:
            self._give_back(start, start + size, QUARANTINE_SECONDS * piece.uncertain)

    def _take(self, size: int, what: str) -> int:
        until = time.monotonic() + WAIT_SECONDS
        with self._changed:
            while True:
                now = time.monotonic()
                self._wake(now)
                for index, (start, stop) in enumerate(self._free):
                    if stop - start >= size:
                        self._free[index : index + 1] = (
                            [(start + size, stop)] if start + size < stop else []
                        )
                        return start
                if now >= until:
                    resting = sum(stop - start for _, start, stop in self._resting)
                    raise FloorError(
                        f"{what}: no {size:,} bytes of staging became free in "
                        f"{WAIT_SECONDS:.0f} seconds; {resting:,} rest after transfers that failed."
                    )
                # what rests comes back without a call that could tell
                self._changed.wait(min([until, *(row[0] for row in self._resting)]) - now)

    def _give_back(self, start: int, stop: int, rest: float) -> None:
        with self._changed:
            if rest:
                self._resting.append((time.monotonic() + rest, start, stop))
            else:
                self._join(start, stop)
            self._changed.notify_all()

    def _wake(self, now: float) -> None:
        for row in [row for row in self._resting if row[0] <= now]:
            self._resting.remove(row)
            self._join(row[1], row[2])

    def _join(self, start: int, stop: int) -> None:
        joined: list[tuple[int, int]] = []
        for first, last in sorted([*self._free, (start, stop)]):
            if joined and joined[-1][1] == first:
                joined[-1] = joined[-1][0], last
            else:
                joined.append((first, last))
        self._free = joined
