"""How long a peer may be silent, and which pages a hand-off holds back from reuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvpool.layout import RequestAddress

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


class Liveness(Generic[PeerId]):
    """How long each peer has been silent, while this side listened: time in which nobody looked (a
    stopped process, a long call) counts as nobody's silence.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self.timeout, self._checked = timeout, now
        self.last_heard: dict[PeerId, float] = {}

    def heard(self, peer: PeerId, now: float) -> None:
        """Notes a sign of life, or the beginning of a wait for one."""
        self.last_heard[peer] = now

    def forget(self, peer: PeerId) -> None:
        """Stops to wait for a peer."""
        self.last_heard.pop(peer, None)

    def dead(self, now: float) -> list[PeerId]:
        """Peers that have been silent for longer than the timeout. To be called often."""
        gap = now - self._checked - self.timeout / PINGS_PER_TIMEOUT
        self._checked = now
        # if both sides were stopped, both go on where they were
        if gap > 0:
            for peer, heard in self.last_heard.items():
                self.last_heard[peer] = min(heard + gap, now)
        return [peer for peer, heard in self.last_heard.items() if now - heard > self.timeout]
