"""What prefill knows of a decode, and of a request that it offers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from disagg.protocol.messages import ChunkReady, ReadRequest, Room
from disagg.protocol.status import Failure
from kvpool.layout import RequestAddress

if TYPE_CHECKING:
    from kvpool.device import Event

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

    chunks: list[ChunkReady] = field(default_factory=list)
    addresses: list[RequestAddress] = field(default_factory=list)
    wants: dict[Peer, ReadRequest] = field(default_factory=dict)
    events: list[Event | None] = field(default_factory=list)
    """Of the chunks that readers may not know of yet: after what work of the device they are there.
    """
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
    def shown(self) -> int:
        """Chunks that readers may know of."""
        return len(self.chunks) - len(self.events)

    @property
    def whole(self) -> bool:
        """Whether readers may know of all of it."""
        return self.closed and not self.events

    @property
    def complete(self) -> bool:
        """Whether every reader is done."""
        readers = next(iter(self.wants.values())).readers if self.wants else 0
        return self.closed and 0 < readers == len(self.done)

    def misfit(self, address: RequestAddress, tokens: range, last: bool) -> str | None:
        """Why positions `tokens` cannot be offered next."""
        end = address.num_tokens
        if self.closed:
            return "its last chunk was sent already."
        if tokens.step != 1 or tokens.start != self.computed or tokens.stop < tokens.start:
            return (
                f"positions up to {self.computed} were sent, "
                f"the next chunk starts there, got {tokens}."
            )
        if tokens.stop > end or (last and tokens.stop != end):
            return f"the address holds {end} tokens, got {tokens} with last={last}."
        return None

    def unwanted(self, peer: Peer, want: ReadRequest) -> str | None:
        """Why this peer cannot want it."""
        if self.failure is not None:
            return self.failure.reason
        if peer in self.wants:
            return "wanted twice by one reader."
        if any(known.readers != want.readers for known in self.wants.values()):
            return f"its readers disagree on how many they are ({want.readers})."
        if len(self.wants) == want.readers:
            return f"{want.readers} readers want it already."
        return None
