"""What the rooms of both sides have in common, and those that have ended, for a caller that asks
once a step and not for every room.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, NamedTuple, TypeVar

from disagg.errors import UnknownRoom
from disagg.protocol.messages import Room
from disagg.protocol.peers.liveness import Leases
from disagg.protocol.status import Failure, KVPoll, PhasedRoom

R = TypeVar("R", bound=PhasedRoom)


class Ended(NamedTuple):
    """A room that has ended, whose pages may be reused: `Success`, or `Failed` with the reason."""

    room: Room
    state: KVPoll
    failure: Failure | None


class EndedRooms(dict[Room, Ended]):
    """Rooms that have ended since they were taken last, but those that were forgotten meanwhile."""

    def add(self, name: Room, failure: Failure | None) -> None:
        """A room's pages are free: it has succeeded, or failed."""
        self[name] = Ended(name, KVPoll.Failed if failure else KVPoll.Success, failure)

    def take(self) -> list[Ended]:
        """The rooms, in the order in which they ended; the next call gives none of them."""
        taken = list(self.values())
        self.clear()
        return taken

    def give_back(self, taken: list[Ended]) -> None:
        """Undoes a `take` of which the caller has seen nothing."""
        later = self.take()
        self.update({ended.room: ended for ended in (*taken, *later)})


class Rooms(ABC, Generic[R]):
    """The rooms of one endpoint that are not forgotten."""

    unknown: ClassVar[str]
    """Why a name may be unknown, and what makes it known."""

    def __init__(self) -> None:
        self.by_name: dict[Room, R] = {}
        self.open: set[Room] = set()
        self.ended = EndedRooms()

    def known(self, name: Room) -> R:
        """The room of that name; raises UnknownRoom."""
        room = self.by_name.get(name)
        if room is None:
            raise UnknownRoom(f"room {name!r} is not known here: {self.unknown}")
        return room

    @abstractmethod
    def leases(self) -> Leases:
        """Items that must not be reused."""

    @abstractmethod
    def forget(self, name: Room, now: float) -> None:
        """Drops an ended room; raises RoomError if it has not ended."""
