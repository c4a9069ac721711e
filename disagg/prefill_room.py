"""What prefill knows of a decode, and of a request that it offers."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.room import Failure
from disagg.wire import Ready, Room, Want
from kvpool.layout import RequestAddress

Peer = bytes
"""A connection, as the socket names it."""


@dataclass(slots=True)
class Decode:
    """A decode that has said hello: its life, and the rooms that it wants."""

    generation: str
    rooms: set[Room] = field(default_factory=set)


@dataclass(slots=True)
class PrefillRoom:
    """One request: what was computed, who wants it, who is done with it."""

    chunks: list[Ready] = field(default_factory=list)
    addresses: list[RequestAddress] = field(default_factory=list)
    wants: dict[Peer, Want] = field(default_factory=dict)
    lives: list[str] = field(default_factory=list)
    """Generations of those who want it."""
    checking: set[Peer] = field(default_factory=set)
    done: set[Peer] = field(default_factory=set)
    opened_at: float = 0.0
    leased_until: float | None = None
    failure: Failure | None = None

    @property
    def computed(self) -> int:
        """Positions offered so far."""
        return self.chunks[-1].stop if self.chunks else 0

    @property
    def closed(self) -> bool:
        """Whether the last chunk was sent."""
        return bool(self.chunks) and self.chunks[-1].last

    @property
    def complete(self) -> bool:
        """Whether every reader is done."""
        readers = next(iter(self.wants.values())).readers if self.wants else 0
        return self.closed and 0 < readers == len(self.done)
