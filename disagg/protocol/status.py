"""What callers see of a room, why it fails, its phases, and what both sides' rooms have in common.

A room is one request's hand-off: vLLM's and NIXL's request id, SGLang's bootstrap_room. Each side
keeps a phase of its own. `TRANSITIONS` has every event that may happen to a room, by side and phase
(docs/protocol.md has the same table), and `PhasedRoom.move` is the only code that changes a phase.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from disagg.errors import UnknownRoom
from disagg.protocol.messages import Room
from disagg.protocol.peers.liveness import Leases


class KVPoll(IntEnum):
    """State of one room on one side, as `poll` gives it."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4

    def __str__(self) -> str:
        return self.name

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self in (KVPoll.Failed, KVPoll.Success)


Side = Literal["prefill", "decode"]
FailureKind = Literal[
    "abort",
    "aux",
    "device",
    "digest",
    "draining",
    "lease",
    "lost",
    "protocol",
    "read",
    "refused",
    "timeout",
]
DRAINING = "draining: "
"""How a reason begins where a side drains. Every release begins so: `failure_kind` reads it."""
STOPPED = (
    f"{DRAINING}this engine has stopped and ends no room that waits for it. Send the request to "
    "another."
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a room failed, and on which side; `kind` is for counting. An abort of the other side is
    an `abort` here.
    """

    side: Side
    reason: str
    kind: FailureKind

    def __str__(self) -> str:
        return f"{self.side}: {self.reason}"


def failure_kind(reason: str) -> FailureKind:
    """Of an abort of the other side."""
    # in the text, so that a decode of any protocol is told and one that knows the word counts it
    return "draining" if reason.startswith(DRAINING) else "abort"


class Phase(Enum):
    """Where a room stands on one side."""

    # Enum's own hash is a call in Python, and every move looks up two members
    __hash__ = object.__hash__

    poll: KVPoll
    """What callers see."""

    def __new__(cls, name: str, poll: KVPoll) -> Phase:
        phase = object.__new__(cls)
        phase._value_, phase.poll = name, poll
        return phase

    HANDSHAKE = "handshake", KVPoll.Bootstrapping
    """Not every rank has answered decode's hello. Prefill: no decode has asked for the chunks."""
    REQUESTED = "requested", KVPoll.WaitingForInput
    """Decode has asked every rank. Prefill was asked, and nothing is offered."""
    TRANSFERRING = "transferring", KVPoll.Transferring
    """Decode reads chunks that are ready. Prefill serves them, until every reader is done."""
    VERIFYING = "verifying", KVPoll.Transferring
    """Decode has read everything and compares digests, if it verifies."""
    RELEASING = "releasing", KVPoll.Transferring
    """Decode has told every rank that it has read everything, and waits for their acks."""
    SUCCESS = "success", KVPoll.Success
    """Every rank has acked that its pages stayed leased. Prefill's pages are free."""
    FAILED = "failed", KVPoll.Failed
    """Decode's pages stay leased while a read may still write to them. Prefill's are free."""


class RoomEvent(Enum):
    """What happens to a room."""

    __hash__ = object.__hash__

    RANKS_KNOWN = "every rank has answered the hello"
    CHUNK_READY = "a chunk is ready"
    ALL_READ = "every rank's last chunk is ready, and every read has ended"
    DIGESTS_EQUAL = "all digests are equal, or none are compared"
    ALL_ACKED = "every rank has acked"
    ASKED = "a decode asks"
    OFFERED = "a chunk is offered"
    ALL_DONE = "every reader is done"
    FAILED = "either side fails the room"


class ProtocolError(RuntimeError):
    """An event that cannot happen to a room in its phase: a bug of kvpool, not of a peer."""


def _fails(*phases: Phase) -> dict[tuple[Phase, RoomEvent], Phase]:
    return {(phase, RoomEvent.FAILED): Phase.FAILED for phase in phases}


TRANSITIONS: Mapping[Side, Mapping[tuple[Phase, RoomEvent], Phase]] = {
    "decode": {
        (Phase.HANDSHAKE, RoomEvent.RANKS_KNOWN): Phase.REQUESTED,
        (Phase.REQUESTED, RoomEvent.CHUNK_READY): Phase.TRANSFERRING,
        (Phase.TRANSFERRING, RoomEvent.CHUNK_READY): Phase.TRANSFERRING,
        (Phase.TRANSFERRING, RoomEvent.ALL_READ): Phase.VERIFYING,
        (Phase.VERIFYING, RoomEvent.DIGESTS_EQUAL): Phase.RELEASING,
        (Phase.RELEASING, RoomEvent.ALL_ACKED): Phase.SUCCESS,
        **_fails(*(phase for phase in Phase if not phase.poll.ended)),
    },
    "prefill": {
        (Phase.HANDSHAKE, RoomEvent.OFFERED): Phase.HANDSHAKE,
        (Phase.HANDSHAKE, RoomEvent.ASKED): Phase.REQUESTED,
        (Phase.REQUESTED, RoomEvent.OFFERED): Phase.TRANSFERRING,
        (Phase.REQUESTED, RoomEvent.ASKED): Phase.REQUESTED,
        (Phase.TRANSFERRING, RoomEvent.OFFERED): Phase.TRANSFERRING,
        (Phase.TRANSFERRING, RoomEvent.ASKED): Phase.TRANSFERRING,
        (Phase.TRANSFERRING, RoomEvent.ALL_DONE): Phase.SUCCESS,
        # decode has failed the room, and prefill's caller, which has not heard of it, sends it
        (Phase.FAILED, RoomEvent.OFFERED): Phase.FAILED,
        **_fails(Phase.HANDSHAKE, Phase.REQUESTED, Phase.TRANSFERRING),
    },
}


@dataclass(eq=False, slots=True, kw_only=True)
class PhasedRoom(ABC):
    """What the rooms of both sides have in common."""

    side: ClassVar[Side]
    name: Room
    opened_at: float
    phase: Phase = Phase.HANDSHAKE
    failure: Failure | None = None
    traceparent: str | None = None
    """Of the request, where decode's caller has given one."""

    @property
    @abstractmethod
    def waits_for(self) -> str:
        """What must happen next."""

    @property
    @abstractmethod
    def needs_caller(self) -> bool:
        """Whether it cannot succeed if its caller does nothing more."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the log says of it."""

    def move(self, event: RoomEvent) -> None:
        """Goes to the phase that follows. Raises ProtocolError if the event cannot happen now."""
        phase = TRANSITIONS[self.side].get((self.phase, event))
        if phase is None:
            place = f"a room of {self.side} in {self.phase.name}"
            raise ProtocolError(f"{event.name} cannot happen to {place}.")
        self.phase = phase


R = TypeVar("R", bound=PhasedRoom)


class Ended(NamedTuple):
    """A room that has ended, whose pages may be reused: `Success`, or `Failed` with the reason."""

    room: Room
    state: KVPoll
    failure: Failure | None


class EndedRooms(dict[Room, Ended]):
    """Rooms that have ended since they were taken last and were not forgotten meanwhile, for a
    caller that asks once a step and not for every room.
    """

    def note_ended(self, name: Room, failure: Failure | None) -> None:
        """A room's pages are free: it has succeeded, or failed."""
        self[name] = Ended(name, KVPoll.Failed if failure else KVPoll.Success, failure)

    def take_ended(self) -> list[Ended]:
        """The rooms, in the order in which they ended; the next call gives none of them."""
        taken = list(self.values())
        self.clear()
        return taken

    def give_back(self, taken: list[Ended]) -> None:
        """Undoes a `take_ended` whose result the caller has not seen."""
        later = self.take_ended()
        self.update({ended.room: ended for ended in (*taken, *later)})


class Rooms(ABC, Generic[R]):
    """The rooms of one endpoint that are not forgotten."""

    unknown: ClassVar[str]
    """Why a name may be unknown, and what makes it known."""

    def __init__(self) -> None:
        self.by_name: dict[Room, R] = {}
        self.open: dict[Room, R] = {}
        self.ended = EndedRooms()

    @property
    def idle(self) -> bool:
        """Whether none is open, and none holds items."""
        return not self.open

    def known(self, name: Room) -> R:
        """The room of that name; raises UnknownRoom."""
        room = self.by_name.get(name)
        if room is None:
            raise UnknownRoom(f"room {name!r} is not known here: {self.unknown}")
        return room

    @abstractmethod
    def leases(self) -> Leases:
        """Items that must not be reused."""

    def quarantined(self) -> int:
        """Ended rooms to whose items an engine may still write."""
        return 0

    @abstractmethod
    def forget(self, name: Room, now: float) -> None:
        """Drops an ended room; raises RoomError if it has not ended."""
