"""Rooms that have ended, for a caller that asks once a step and not for every room, and attempts
that have, for requests that come once more.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from disagg.protocol.messages import ReadRequest, Room
from disagg.protocol.status import Failure, KVPoll

KEPT_ATTEMPTS = 1000
"""Attempts of rooms that have ended: the latest are kept."""


class Ended(NamedTuple):
    """A room that has ended, whose pages may be reused: `Success`, or `Failed` with the reason."""

    room: Room
    state: KVPoll
    failure: Failure | None


class EndedRooms:
    """Rooms that have ended since they were taken last, at most one entry for each room that is not
    forgotten. Part of both machines.
    """

    def __init__(self) -> None:
        self._rooms: dict[Room, Ended] = {}

    def __bool__(self) -> bool:
        return bool(self._rooms)

    def add(self, name: Room, failure: Failure | None) -> None:
        """A room's pages are free: it has succeeded, or failed."""
        state = KVPoll.Success if failure is None else KVPoll.Failed
        self._rooms[name] = Ended(name, state, failure)

    def drop(self, name: Room) -> None:
        """A room is forgotten."""
        self._rooms.pop(name, None)

    def take(self) -> list[Ended]:
        """The rooms, in the order in which they ended; the next call gives none of them."""
        taken = list(self._rooms.values())
        self._rooms.clear()
        return taken

    def give_back(self, taken: list[Ended]) -> None:
        """Undoes a `take` of which the caller has seen nothing."""
        self._rooms = {ended.room: ended for ended in taken} | self._rooms


class EndedAttempts:
    """Requests of rooms that have ended, by peer, room and attempt. Part of `PrefillMachine`."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[tuple[bytes, Room, str], None] = OrderedDict()

    def add(self, peer: bytes, request: ReadRequest) -> None:
        """A peer's request is answered for good."""
        self._attempts[peer, request.room, request.attempt] = None
        if len(self._attempts) > KEPT_ATTEMPTS:
            self._attempts.popitem(last=False)

    def has(self, peer: bytes, request: ReadRequest) -> bool:
        """Whether a request is the copy of one that was."""
        return (peer, request.room, request.attempt) in self._attempts
