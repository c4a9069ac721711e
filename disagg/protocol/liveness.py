"""What holds pages back from reuse, and for how long a peer may be silent."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvpool.layout import RequestAddress

PINGS = 4
"""Signs of life in the time after which silence means death."""
LOOKS = 4 * PINGS
"""How often one looks in that time."""


@dataclass(frozen=True, slots=True)
class Leases:
    """Items by id list (`kv`, `swa`, `state`, ...); an item of two rooms counts twice.

    `leased`: of rooms that have not ended. `quarantined`: of rooms that have ended, and to which an
    engine may still write. All others may be reused.
    """

    leased: Mapping[str, int] = field(default_factory=dict)
    quarantined: Mapping[str, int] = field(default_factory=dict)


def items(addresses: Iterable[RequestAddress]) -> dict[str, int]:
    """How many items addresses have, by id list."""
    found: dict[str, int] = {}
    for address in addresses:
        for name, span in address.spans.items():
            found[name] = found.get(name, 0) + span.ids.size
    return found


Peer = TypeVar("Peer", bound=Hashable)


class Silence(Generic[Peer]):
    """How long each of several peers has been silent, while one listened.

    Time in which nobody looked (a stopped process, a long call) is nobody's silence.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self.timeout, self._looked = timeout, now
        self._heard: dict[Peer, float] = {}

    def heard(self, peer: Peer, now: float) -> None:
        """A sign of life, or the beginning of a wait for one."""
        self._heard[peer] = now

    def forget(self, peer: Peer) -> None:
        """Waits for this one no more."""
        self._heard.pop(peer, None)

    def dead(self, now: float) -> list[Peer]:
        """Those silent for longer than the time-out. To be called often."""
        gap = now - self._looked - self.timeout / PINGS
        self._looked = now
        if gap > 0:
            for peer, at in self._heard.items():
                self._heard[peer] = min(at + gap, now)
        return [peer for peer, at in self._heard.items() if now - at > self.timeout]
