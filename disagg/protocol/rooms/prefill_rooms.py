"""The rooms of a prefill endpoint: which are open, and of which something is still to be
sent or published.
"""

from __future__ import annotations

from collections import deque

from disagg.errors import RoomError
from disagg.protocol.messages import Room
from disagg.protocol.peers.liveness import Leases, count_items
from disagg.protocol.rooms.offered import LayersByOwner, Offered
from disagg.protocol.rooms.prefill_room import ForgottenRooms, PrefillRoom
from disagg.protocol.rooms.rooms import Rooms

MAX_FAILED_UNSENT = 10_000
"""Rooms that failed before anything was sent: the latest are kept."""


class PrefillRooms(Rooms[PrefillRoom]):
    """All rooms that are not forgotten, and why those have failed that are. `unsent` are open rooms
    of which nothing was sent, `unpublished` those of which readers may not know every chunk, `read`
    those of which one knows some; `doubtful` those that none has asked for, and of which one may
    have been told that an earlier room of their name has failed.
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
        self.doubtful: set[Room] = set()
        self.forgotten = ForgottenRooms()
        self._layers = layers
        self._failed_unsent: deque[tuple[Room, PrefillRoom]] = deque()

    def new(self, now: float) -> PrefillRoom:
        """A room of which nothing was offered."""
        return PrefillRoom(opened_at=now, offered=Offered(self._layers))

    def at(self, name: Room, now: float) -> PrefillRoom:
        """The room of that name, opened if there is none."""
        if name not in self.by_name:
            self.by_name[name] = self.new(now)
            self.open.add(name)
            self.unsent.add(name)
        return self.by_name[name]

    def end(self, name: Room, room: PrefillRoom, now: float) -> None:
        """A room has ended; its items are free."""
        for names in (self.open, self.unsent, self.unpublished, self.read, self.doubtful):
            names.discard(name)
        self.ended.add(name, room.failure)
        if not room.chunks:
            self._failed_unsent.append((name, room))
            if len(self._failed_unsent) > MAX_FAILED_UNSENT:
                name, room = self._failed_unsent.popleft()
                if self.by_name.get(name) is room and not room.chunks:
                    self.forget(name, now)

    def forget(self, name: Room, now: float) -> None:
        """Drops an ended room; why it has failed is kept for decodes that ask late."""
        room = self.known(name)
        if name in self.open:
            raise RoomError(f"room {name!r} has not ended. Abort it first.")
        self.forgotten.add(name, room.notice, now)
        del self.by_name[name]
        self.ended.pop(name, None)

    def leases(self) -> Leases:
        rooms = (self.by_name[name] for name in self.open)
        return Leases(count_items(room.addresses[-1] for room in rooms if room.addresses))
