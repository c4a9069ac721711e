"""How long a peer may be silent, how much is kept of it, and which pages wait for its reads."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from kvpool.layout import RequestAddress

K = TypeVar("K")
V = TypeVar("V")

PINGS_PER_TIMEOUT = 4
CHECKS_PER_TIMEOUT = 4 * PINGS_PER_TIMEOUT


@dataclass(frozen=True, slots=True)
class Leases:
    """Items by id list (`kv`, `swa`, `state`, ...); an item of two rooms counts twice. `leased` are
    those of rooms that have not ended, `quarantined` those of ended rooms to which an engine may
    still write. All others may be reused.
    """

    leased: Mapping[str, int] = field(default_factory=dict)
    quarantined: Mapping[str, int] = field(default_factory=dict)


def count_items(block_tables: Iterable[RequestAddress]) -> dict[str, int]:
    """Items of all block tables, by id list."""
    items: Counter[str] = Counter()
    for table in block_tables:
        items.update({name: span.ids.size for name, span in table.spans.items()})
    return items


PeerId = TypeVar("PeerId", bound=Hashable)


class Liveness(dict[PeerId, float]):
    """When each peer that is waited for was heard last, or the wait for it began, while this side
    listened: time without a step (a stopped process, a long call) is not a peer's silence.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self.timeout, self._checked = timeout, now

    def dead(self, now: float) -> list[PeerId]:
        """Peers that have been silent for longer than the timeout. To be called often."""
        gap = now - self._checked - self.timeout / PINGS_PER_TIMEOUT
        self._checked = now
        # if both sides were stopped, both go on where they were
        if gap > 0:
            self.update({peer: min(heard + gap, now) for peer, heard in self.items()})
        return [peer for peer, heard in self.items() if now - heard > self.timeout]


class Latest(OrderedDict[K, V]):
    """At most `most` entries: those that were set last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)
