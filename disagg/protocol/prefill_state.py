"""What prefill knows of a decode, and of a room that it serves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from disagg.protocol.messages import ChunkReady, ReadRequest, Room
from disagg.protocol.status import Failure, Phase
from kvpool.layout import RequestAddress

if TYPE_CHECKING:
    from kvpool.device import Event


@dataclass(slots=True)
class Decode:
    """A decode that has said hello: its generation, and the rooms that it has asked for."""

    generation: str
    rooms: set[Room] = field(default_factory=set)


@dataclass(slots=True)
class PrefillRoom:
    """One request: what was computed, which readers ask for it, which have read it."""

    opened_at: float = 0.0
    phase: Phase = Phase.HANDSHAKE
    chunks: list[ChunkReady] = field(default_factory=list)
    addresses: list[RequestAddress] = field(default_factory=list)
    """Block tables, one of each chunk."""
    unpublished: list[Event | None] = field(default_factory=list)
    """For each of the latest chunks, of which readers may not know yet, the device's event before
    which it is computed.
    """
    requests: dict[bytes, ReadRequest] = field(default_factory=dict)
    """By the peer that has asked."""
    generations: list[str] = field(default_factory=list)
    """Of the decodes that have asked."""
    digesting: set[bytes] = field(default_factory=set)
    done: set[bytes] = field(default_factory=set)
    leased_until: float | None = None
    failure: Failure | None = None

    @property
    def computed(self) -> int:
        """Positions offered so far."""
        return self.chunks[-1].stop if self.chunks else 0

    @property
    def closed(self) -> bool:
        """Whether the last chunk was offered."""
        return bool(self.chunks) and self.chunks[-1].last

    @property
    def published(self) -> int:
        """Chunks that readers may know of."""
        return len(self.chunks) - len(self.unpublished)

    @property
    def whole(self) -> bool:
        """Whether readers may know of every chunk."""
        return self.closed and not self.unpublished

    @property
    def complete(self) -> bool:
        """Whether every reader is done."""
        readers = next(iter(self.requests.values())).readers if self.requests else 0
        return self.closed and 0 < readers == len(self.done)

    def chunk_problem(self, address: RequestAddress, tokens: range, last: bool) -> str | None:
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
            return f"the block table holds {end} tokens, got {tokens} with last={last}."
        return None

    def reject_reason(self, peer: bytes, request: ReadRequest) -> str | None:
        """Why this peer cannot read it."""
        if self.failure is not None:
            return self.failure.reason
        if peer in self.requests:
            return "this reader has asked for it already."
        known = {each.readers for each in self.requests.values()} - {request.readers}
        if known:
            return f"one reader says that {request.readers} read it, another {min(known)}."
        if len(self.requests) == request.readers:
            return f"all {request.readers} readers have asked for it already."
        return None
