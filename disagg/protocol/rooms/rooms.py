"""What the rooms of both sides have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

from disagg.errors import UnknownRoom
from disagg.protocol.messages import Room
from disagg.protocol.peers.liveness import Leases
from disagg.protocol.phases import PhasedRoom
from disagg.protocol.rooms.ended import EndedRooms

R = TypeVar("R", bound=PhasedRoom)


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
