"""What prefill knows of a room that it serves, and of rooms that it has forgotten."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from disagg.protocol.messages import ChunkReady, ReadRequest, Room
from disagg.protocol.phases import Phase, PhasedRoom
from disagg.protocol.rooms.offered import Offered, layer_names
from disagg.protocol.status import Side
from kvpool.layout import RequestAddress

if TYPE_CHECKING:
    from disagg.protocol.events import OfferChunk
    from kvpool.device import Event

FORGOTTEN_SECONDS = 600.0
"""How long the failure of a forgotten room is kept for decodes that ask for it late."""
MAX_FORGOTTEN = 10_000
"""Forgotten rooms of which that is kept: the latest."""
MAX_TOLD = 256
"""Decodes of which it is kept, for each room, that they know of its failure."""


class Told(NamedTuple):
    """Which decodes know of a room's failure, by generation, and how many read it (0: none has
    said).
    """

    generations: frozenset[str] = frozenset()
    readers: int = 0

    def also(self, generations: Sequence[str], readers: int) -> Told:
        """With these decodes, at most `MAX_TOLD` in all."""
        room_for = max(0, MAX_TOLD - len(self.generations))
        return Told(self.generations.union(generations[:room_for]), self.readers or readers)

    @property
    def everyone(self) -> bool:
        """Whether every reader knows."""
        return 0 < self.readers <= len(self.generations)


NOBODY = Told()


@dataclass(eq=False, slots=True, kw_only=True)
class PrefillRoom(PhasedRoom):
    """One request: what was computed, which readers ask for it, which have read it."""

    side: ClassVar[Side] = "prefill"
    offered: Offered
    chunks: list[ChunkReady] = field(default_factory=list)
    addresses: list[RequestAddress] = field(default_factory=list)
    """Block tables, one of each chunk."""
    unpublished: list[Event | None] = field(default_factory=list)
    """For each of the latest chunks, of which readers may not know yet, the device's event before
    which it is computed.
    """
    requests: dict[bytes, ReadRequest] = field(default_factory=dict)
    """By the peer that has asked."""
    patience: float | None = 0.0
    """The longest time-out of these."""
    generations: list[str] = field(default_factory=list)
    """Of the decodes that have asked."""
    told: Told = NOBODY
    """Who knows of its failure."""
    digested: set[tuple[bytes, bool]] = field(default_factory=set)
    """Who has asked for digests, and whether for one of each entry: once each."""
    done: set[bytes] = field(default_factory=set)
    ends_at: float | None = None
    """When the lease ends of what was sent; before, until when who has asked for it waits."""

    @property
    def computed(self) -> int:
        """Positions of which all layers were offered so far."""
        return self.offered.stop

    @property
    def closed(self) -> bool:
        """Whether the last chunk was offered."""
        return self.offered.closed

    @property
    def published(self) -> int:
        """Chunks that readers may know of."""
        return len(self.chunks) - len(self.unpublished)

    @property
    def whole(self) -> bool:
        """Whether readers may know of every chunk."""
        return self.closed and not self.unpublished

    @property
    def readers(self) -> int:
        """How many read it; 0 while none has asked."""
        return next(iter(self.requests.values())).readers if self.requests else 0

    @property
    def full(self) -> bool:
        """Whether every reader has asked for it."""
        return 0 < self.readers == len(self.requests)

    @property
    def complete(self) -> bool:
        """Whether every reader is done."""
        return self.closed and 0 < self.readers == len(self.done)

    @property
    def waits_for(self) -> str:
        """What must happen next."""
        if self.phase is Phase.HANDSHAKE:
            return "a decode to ask for it"
        if not self.closed:
            awaited = self.offered.awaited or f"the chunk from position {self.computed}"
            return f"{awaited} (`send`)"
        if self.unpublished:
            return "the device to compute what was sent"
        return f"{self.readers - len(self.done)} of {self.readers} readers to be done"

    @property
    def missing(self) -> str:
        """What did not happen while its lease lasted."""
        return "not every reader was done" if self.requests else "no decode asked for it"

    def asked_until(self, now: float) -> float | None:
        """Until when the decodes that have asked, one of them now, wait for a chunk."""
        return None if self.patience is None else now + self.patience

    def ask(self, peer: bytes, request: ReadRequest, generation: str) -> None:
        """Notes a request that has no reason against it."""
        self.requests[peer] = request
        self.generations.append(generation)
        bounded = None not in (self.patience, request.timeout)
        self.patience = max(self.patience or 0.0, request.timeout or 0.0) if bounded else None

    def facts(self) -> dict[str, Any]:
        """What the log says of it."""
        return {
            "peer": ", ".join(self.generations),
            "start": min((request.start for request in self.requests.values()), default=0),
            "tokens": self.computed,
        }

    def chunk_problem(self, chunk: OfferChunk) -> str | None:
        """Why positions and layers cannot be offered next."""
        end, tokens, last = chunk.address.num_tokens, chunk.tokens, chunk.last
        if tokens.step != 1:
            return f"tokens={tokens}: a range of positions."
        if chunk.layers is not None and not self.offered.holds(chunk.layers):
            return f"{chunk.layers} are not here, but {layer_names(self.offered.all_layers)}."
        problem = self.offered.problem(tokens, chunk.layers, last)
        if problem is None and (tokens.stop > end or (last and tokens.stop != end)):
            problem = f"the block table holds {end} tokens, got {tokens} with last={last}."
        if problem is None and chunk.aux and not last:
            problem = "aux values travel with the last chunk."
        return problem

    def reject_reason(self, peer: bytes, request: ReadRequest) -> str | None:
        """Why this peer cannot read it, while it is open."""
        if peer in self.requests:
            return "this reader has asked for it already."
        if self.readers not in (0, request.readers):
            return f"one reader says that {request.readers} read it, another {self.readers}."
        if len(self.requests) == request.readers:
            return f"all {request.readers} readers have asked for it already."
        return None


class ForgottenRoom(NamedTuple):
    """Why a room failed that was `forgotten`, and which decodes know. `refused`: one has asked for
    it since, and was told.
    """

    reason: str
    told: Told
    forgotten: float
    refused: bool = False


class ForgottenRooms:
    """Failed rooms that prefill has forgotten, until every reader knows of the failure.

    A decode that asks for one and does not know is told once, as it may be a reader of the failed
    room that asks late. It may also be the first reader of the next room of that name: nothing in
    a request tells them apart. So at most as many are told as read the failed room, and none once
    all of these know. A new chunk ends the memory.
    """

    def __init__(self) -> None:
        self._rooms: OrderedDict[Room, ForgottenRoom] = OrderedDict()

    def add(self, name: Room, room: PrefillRoom, now: float) -> None:
        """Remembers a room, if it has failed and not every reader knows."""
        self._rooms.pop(name, None)
        if room.failure is not None and not room.told.everyone:
            self._rooms[name] = ForgottenRoom(room.failure.reason, room.told, now)
        if len(self._rooms) > MAX_FORGOTTEN:
            self._rooms.popitem(last=False)

    def pop(self, name: Room) -> bool:
        """The name stands for another room from now on. Whether a decode was told of the forgotten
        one that may have meant this one.
        """
        forgotten = self._rooms.pop(name, None)
        return forgotten is not None and forgotten.refused

    def untold(self, request: ReadRequest, generation: str, now: float) -> str | None:
        """Why the room has failed, for a decode that does not know; from now on it does."""
        while self._rooms and now - next(iter(self._rooms.values())).forgotten > FORGOTTEN_SECONDS:
            self._rooms.popitem(last=False)
        room = self._rooms.get(request.room)
        if room is None or room.told.everyone or generation in room.told.generations:
            return None
        told = room.told.also([generation], request.readers)
        self._rooms[request.room] = room._replace(told=told, refused=True)
        return room.reason
