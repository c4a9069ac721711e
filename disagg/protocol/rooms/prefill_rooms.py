"""What prefill knows of a room that it serves, of all rooms, and of those that it has forgotten."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from disagg.errors import RoomError
from disagg.protocol.messages import ChunkReady, ReadRequest, Room
from disagg.protocol.peers.liveness import Latest, Leases, count_items
from disagg.protocol.rooms.offered import LayersByOwner, Offered, layer_names
from disagg.protocol.status import Phase, PhasedRoom, Rooms, Side
from kvpool.layout import RequestAddress

if TYPE_CHECKING:
    from disagg.protocol.events import OfferChunk
    from kvpool.device import Event

FORGOTTEN_SECONDS = 600.0
"""How long the failure of a forgotten room is kept for decodes that ask for it late."""
MAX_FORGOTTEN = 10_000
"""So many forgotten rooms keep it: the latest."""
MAX_TOLD = 256
"""So many decodes of each room are remembered to know of its failure."""
MAX_FAILED_UNSENT = 10_000
"""Rooms that failed before anything was sent: the latest are kept."""


@dataclass(slots=True, kw_only=True)
class FailureNotice:
    """Why a room has failed, which generations know, and how many read it (0: unknown)."""

    reason: str
    told: set[str]
    readers: int
    forgotten_at: float = 0.0
    refused: bool = False
    """A decode has asked for it since it was forgotten, and was told."""

    def tell(self, generation: str, readers: int) -> str:
        """A decode learns the reason, and has said how many read the room."""
        if len(self.told) < MAX_TOLD:
            self.told.add(generation)
        self.readers = self.readers or readers
        return self.reason

    @property
    def known_to_all(self) -> bool:
        return 0 < self.readers <= len(self.told)


@dataclass(eq=False, slots=True, kw_only=True)
class PrefillRoom(PhasedRoom):
    """One request: what was computed, which readers ask for it, which have read it."""

    side: ClassVar[Side] = "prefill"
    offered: Offered
    chunks: list[ChunkReady] = field(default_factory=list)
    tables: list[RequestAddress] = field(default_factory=list)
    """Block tables, one of each chunk."""
    unpublished: list[Event | None] = field(default_factory=list)
    """Device events of the latest chunks, not yet told to readers."""
    requests: dict[bytes, ReadRequest] = field(default_factory=dict)
    """By the peer that has asked."""
    generations: list[str] = field(default_factory=list)
    """Of the decodes that have asked."""
    notice: FailureNotice | None = None
    # numbers, and no RoomMetrics: a peer may ask for thousands of rooms that nothing is sent of
    asked_seconds: float = 0.0
    done_seconds: float = 0.0
    digested: set[tuple[bytes, bool]] = field(default_factory=set)
    """Which decodes have asked for digests, and whether for one of each entry: once each."""
    done: set[bytes] = field(default_factory=set)
    ends_at: float = math.inf
    """When the lease of what was sent ends; before the first chunk, when a decode's wait ends."""
    doubtful: bool = False
    """None has asked for it, and one may have been told that an earlier room of its name failed."""

    @property
    def whole(self) -> bool:
        """Whether readers may know of every chunk."""
        return self.offered.closed and not self.unpublished

    @property
    def needs_caller(self) -> bool:
        return not self.offered.closed

    @property
    def readers(self) -> int:
        """How many read it; 0 while none has asked."""
        return next(iter(self.requests.values())).readers if self.requests else 0

    @property
    def patience(self) -> float:
        """The longest time-out of the decodes that have asked."""
        timeouts = (request.timeout for request in self.requests.values())
        return max(math.inf if timeout is None else timeout for timeout in timeouts)

    @property
    def waits_for(self) -> str:
        if self.phase is Phase.HANDSHAKE:
            return "a decode to ask for it"
        if not self.offered.closed:
            awaited = self.offered.awaited or f"the chunk from position {self.offered.stop}"
            return f"{awaited} (`send`)"
        if self.unpublished:
            return "the device to compute what was sent"
        return f"{self.readers - len(self.done)} of {self.readers} readers to be done"

    def facts(self) -> dict[str, Any]:
        return {
            "peer": ", ".join(self.generations),
            "start": min((request.start for request in self.requests.values()), default=0),
            "tokens": self.offered.stop,
        }

    def chunk_problem(self, chunk: OfferChunk) -> str | None:
        """Why positions and layers cannot be offered next."""
        end, tokens, last = chunk.table.num_tokens, chunk.tokens, chunk.last
        if tokens.step != 1:
            return f"tokens={tokens}: a range of positions."
        if chunk.layers is not None and not self.offered.holds(chunk.layers):
            return f"{chunk.layers} are not here, but {layer_names(self.offered.all_layers)}."
        if problem := self.offered.problem(tokens, chunk.layers, last):
            return problem
        if tokens.stop > end or (last and tokens.stop != end):
            return f"the block table holds {end} tokens, got {tokens} with last={last}."
        return "aux values travel with the last chunk." if chunk.aux and not last else None

    def reject_reason(self, peer: bytes, request: ReadRequest) -> str | None:
        """Why this peer cannot read it, while it is open."""
        if peer in self.requests:
            return "this reader has asked for it already."
        if self.readers not in (0, request.readers):
            return f"one reader says that {request.readers} read it, another {self.readers}."
        if len(self.requests) == request.readers:
            return (
                f"all {request.readers} decode ranks that it is for have asked for it already. "
                "Where n ranks share a room, each is a DecodeEndpoint with ranks=n."
            )
        return None


class PrefillRooms(Rooms[PrefillRoom]):
    """All rooms that are not forgotten, and why those have failed that are. `unsent` are open rooms
    without a chunk, `unpublished` those with a chunk that readers may not know, `read` those with
    a chunk that a reader knows.
    """

    unknown = (
        "no chunk of it was sent and no decode has asked for it, or it was forgotten. `send` makes "
        "it known, or a decode that asks for it."
    )

    def __init__(self, layers: LayersByOwner) -> None:
        super().__init__()
        self.unsent: set[Room] = set()
        self.unpublished: set[Room] = set()
        self.read: set[Room] = set()
        self.forgotten: Latest[Room, FailureNotice] = Latest(MAX_FORGOTTEN)
        """Those that have failed, until every reader knows of the failure or a new chunk comes."""
        self._layers = layers
        self._failed_unsent: deque[PrefillRoom] = deque()

    def new(self, name: Room, now: float) -> PrefillRoom:
        """A room without an offered chunk."""
        return PrefillRoom(name=name, opened_at=now, offered=Offered(self._layers))

    def at(self, name: Room, now: float) -> PrefillRoom:
        """The room of that name, opened if there is none."""
        if name not in self.by_name:
            self.by_name[name] = self.open[name] = self.new(name, now)
            self.unsent.add(name)
        return self.by_name[name]

    def end(self, room: PrefillRoom, now: float) -> None:
        """A room has ended; its items are free."""
        self.open.pop(room.name, None)
        for names in (self.unsent, self.unpublished, self.read):
            names.discard(room.name)
        self.ended.note_ended(room.name, room.failure)
        if not room.chunks:
            self._failed_unsent.append(room)
            if len(self._failed_unsent) > MAX_FAILED_UNSENT:
                oldest = self._failed_unsent.popleft()
                if self.by_name.get(oldest.name) is oldest and not oldest.chunks:
                    self.forget(oldest.name, now)

    def forget(self, name: Room, now: float) -> None:
        """Drops an ended room; why it has failed is kept for decodes that ask late."""
        room = self.known(name)
        if name in self.open:
            raise RoomError(f"room {name!r} has not ended. Abort it first.")
        self.forgotten.pop(name, None)
        if room.notice is not None and not room.notice.known_to_all:
            room.notice.forgotten_at = now
            self.forgotten[name] = room.notice
        del self.by_name[name]
        self.ended.pop(name, None)

    def untold(self, request: ReadRequest, generation: str, now: float) -> str | None:
        """Why a forgotten room has failed, for a decode that does not know; from now on it does.

        The decode may be a reader of the failed room that asks late, and it may be the first reader
        of the next room of that name: nothing in a request tells them apart. So each is told once,
        at most as many as read the failed room, and none once all of these know.
        """
        notices = self.forgotten
        while notices and now - next(iter(notices.values())).forgotten_at > FORGOTTEN_SECONDS:
            notices.popitem(last=False)
        notice = notices.get(request.room)
        if notice is None or notice.known_to_all or generation in notice.told:
            return None
        notice.refused = True
        return notice.tell(generation, request.readers)

    def leases(self) -> Leases:
        tables = (room.tables[-1] for room in self.open.values() if room.tables)
        return Leases(count_items(tables))
