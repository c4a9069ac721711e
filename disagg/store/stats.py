"""What has become of lookups, reads and writes, counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

OUTCOMES = {
    "hit": "lookups that found a prefix, and its tokens",
    "miss": "lookups that found none, and the tokens that were asked for",
    "read": "reads that ended well, and the bytes that were fetched",
    "aborted": "reads that their caller ended, and their tokens",
    "late": "reads that had not ended in time, and their tokens",
    "damaged": "reads of objects that are not what their name says, and their tokens",
    "vanished": "reads of objects that were found and are gone, and their tokens",
    "refused": "reads of what does not fit, and their tokens",
    "unreachable": "lookups and reads that the floor did not answer, and their tokens",
    "away": "lookups that did not wait for a floor that had not answered, and their tokens",
    "written": "objects that were written, and their bytes",
    "already there": "objects that another writer had written, and their bytes",
    "not written": "objects that the floor did not take, and their bytes",
    "dropped": "objects without room in memory, and their bytes",
    "gone": "objects whose state was gone before it was written, and their bytes",
}
OF_BYTES = {"read", "written", "already there", "not written", "dropped", "gone"}
"""Outcomes whose sizes are bytes; of the others they are tokens."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """By outcome, how often, and how many tokens or bytes (`OUTCOMES`); `reasons` are the last
    sentences that say why, by outcome. `queued_bytes`: gathered, and not put yet.
    """

    counts: Mapping[str, int]
    sizes: Mapping[str, int]
    reasons: Mapping[str, str]
    queued_bytes: int = 0

    @property
    def tokens(self) -> dict[str, int]:
        """The sizes that are tokens, by outcome."""
        return {name: size for name, size in self.sizes.items() if name not in OF_BYTES}

    @property
    def nbytes(self) -> dict[str, int]:
        """The sizes that are bytes, by outcome."""
        return {name: size for name, size in self.sizes.items() if name in OF_BYTES}


class Outcomes:
    """Counts. Any thread may count."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._sizes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._reasons: dict[str, str] = {}
        self._lock = threading.Lock()

    def count(self, outcome: str, size: int, reason: str = "") -> None:
        with self._lock:
            self._counts[outcome] += 1
            self._sizes[outcome] += size
            if reason:
                self._reasons[outcome] = reason

    def stats(self, queued_bytes: int) -> StoreStats:
        with self._lock:
            return StoreStats(
                dict(self._counts), dict(self._sizes), dict(self._reasons), queued_bytes
            )
