"""The rooms of a decode endpoint: which are open, and which items they write."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from disagg.errors import RoomError
from disagg.protocol.messages import Room
from disagg.protocol.peers.link import Link, Read
from disagg.protocol.peers.liveness import CHECKS_PER_TIMEOUT, Leases, count_items
from disagg.protocol.rooms.block_tables import BlockTables
from disagg.protocol.rooms.decode_room import DecodeRoom
from disagg.protocol.rooms.rooms import Rooms
from disagg.protocol.rooms.written_items import WrittenItems
from kvpool.layout import PoolLayout

MAX_DECLINED = 1000
"""Declined rooms that have ended and were not forgotten: the latest are kept."""


class DecodeRooms(Rooms[DecodeRoom]):
    """All rooms that are not forgotten, and the items that they write. A room in which nothing
    happens for longer than `offer_timeout` seconds is stuck.
    """

    unknown = "it was not asked for, or it was forgotten. `receive` makes it known."

    def __init__(
        self, layout: PoolLayout, offer_timeout: float | None, allow_missing: Collection[str] = ()
    ) -> None:
        super().__init__()
        self._of_link: dict[Link, dict[Room, None]] = {}
        self._written = WrittenItems(layout)
        self._block_tables = BlockTables(layout, allow_missing)
        self._declined: deque[tuple[Room, DecodeRoom]] = deque()
        self.offer_timeout, self._next_check = offer_timeout, 0.0

    def add(self, name: Room, room: DecodeRoom) -> None:
        """Opens a room. Raises RoomError if its name is taken, if it lacks positions that it does
        not have, if its block table cannot be right (see BlockTables), or if another room writes
        some of its items.
        """
        if name in self.by_name:
            raise RoomError(f"room {name!r} exists already. Forget it first.")
        total = room.address.num_tokens
        if not 0 <= room.start <= total:
            raise RoomError(f"room {name!r}: start {room.start} of {total} tokens.")
        if not room.declined:
            tokens = range(room.start, total)
            self._block_tables.check(name, room.address, tokens, at_most=room.at_most)
        self._written.claim(name, room.address, room.start, room.at_most)
        self.by_name[name] = room
        self.open.add(name)
        self._of_link.setdefault(room.link, {})[name] = None

    def current(self, name: Room, attempt: str) -> DecodeRoom | None:
        """The open room of that name, if this is its attempt."""
        room = self.by_name.get(name)
        return room if room and name in self.open and room.attempt == attempt else None

    def of_link(self, link: Link) -> list[Room]:
        """Open rooms of a link, in the order in which they were asked for."""
        return list(self._of_link.get(link, ()))

    def stuck(self, now: float) -> list[tuple[Room, str]]:
        """Open rooms in which nothing has happened for too long and nothing is done here, each with
        the reason. Looks from time to time.
        """
        longest = self.offer_timeout
        if longest is None or now < self._next_check:
            return []
        self._next_check = now + longest / CHECKS_PER_TIMEOUT
        rooms = [(name, self.by_name[name]) for name in self.open]
        return [
            (name, f"nothing has happened for {longest:g} s: it waits for {room.waits_for}.")
            for name, room in rooms
            if now - room.touched > longest and not room.working
        ]

    def end(self, name: Room, now: float) -> None:
        """A room has ended; its items are free unless a read may still write them."""
        room = self.by_name[name]
        self.open.discard(name)
        of_link = self._of_link[room.link]
        del of_link[name]
        if not of_link:
            del self._of_link[room.link]
        self._free(name, room)
        if room.declined:  # of no more use to its caller
            self._declined.append((name, room))
            if len(self._declined) > MAX_DECLINED:
                name, room = self._declined.popleft()
                if self.by_name.get(name) is room:
                    self.forget(name, now)

    def end_read(self, read: Read, now: float) -> DecodeRoom | None:
        """None of a read's bytes can land any more; returns its room if that is open."""
        room = self.known(read.room)
        room.end_read(read, now)
        if read.room in self.open:
            return room
        self._free(read.room, room)
        return None

    def forget(self, name: Room, now: float) -> None:
        """Drops an ended room; raises RoomError if it has not ended, or a read may still write."""
        room = self.known(name)
        if name in self.open or room.reading:
            raise RoomError(f"room {name!r} has not ended. Abort it, and wait for its reads.")
        del self.by_name[name]
        self.ended.pop(name, None)

    def leases(self) -> Leases:
        ended = (self.by_name[name] for name in self.by_name.keys() - self.open)
        return Leases(
            leased=count_items(self.by_name[name].address for name in self.open),
            quarantined=count_items(room.address for room in ended if room.reading),
        )

    def _free(self, name: Room, room: DecodeRoom) -> None:
        """Gives the items of a room that has ended back, unless a read may still write them."""
        if not room.reading:
            self._written.release(name)
            self.ended.add(name, room.failure)
