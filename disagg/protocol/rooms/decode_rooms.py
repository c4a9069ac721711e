"""The rooms that decode has asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

from disagg.errors import RoomError
from disagg.protocol.messages import Room
from disagg.protocol.metrics import ReadTimes
from disagg.protocol.peers.link import Link, Read
from disagg.protocol.peers.liveness import CHECKS_PER_TIMEOUT, Leases, count_items
from disagg.protocol.rooms.block_tables import BlockTables, WrittenItems
from disagg.protocol.rooms.decode_room import DecodeRoom
from disagg.protocol.status import Rooms
from kvpool.layout import PoolLayout

MAX_DECLINED = 1000
"""Declined rooms that have ended and were not forgotten: the latest are kept."""


class DecodeRooms(Rooms[DecodeRoom]):
    """All rooms that are not forgotten, and the items that they write."""

    unknown = "it was not asked for, or it was forgotten. `receive` makes it known."

    def __init__(
        self, layout: PoolLayout, offer_timeout: float | None, allow_missing: Collection[str] = ()
    ) -> None:
        super().__init__()
        self._written = WrittenItems(layout)
        self._block_tables = BlockTables(layout, allow_missing)
        self._declined: deque[DecodeRoom] = deque()
        self.offer_timeout, self._next_check = offer_timeout, 0.0

    @property
    def idle(self) -> bool:
        # of a room that has failed, a read may still write to its pages
        return not self.open and not any(room.reading for room in self.by_name.values())

    def open_room(self, room: DecodeRoom) -> None:
        """Opens a room. Raises RoomError if its name is taken, if it lacks positions that it does
        not have, if its block table cannot be right (BlockTables), or if another writes its items.
        """
        name, total = room.name, room.table.num_tokens
        if name in self.by_name:
            raise RoomError(f"room {name!r} exists already. Forget it first.")
        if not 0 <= room.start <= total:
            raise RoomError(f"room {name!r}: start {room.start} of {total} tokens.")
        if not room.declined:
            tokens = range(room.start, total)
            self._block_tables.check(name, room.table, tokens, at_most=room.at_most)
        self._written.claim(name, room.table, room.start, room.at_most)
        self.by_name[name] = self.open[name] = room

    def current(self, name: Room, attempt: str) -> DecodeRoom | None:
        """The open room of that name, if this is its attempt."""
        room = self.open.get(name)
        return room if room and room.attempt == attempt else None

    def of_link(self, link: Link) -> list[DecodeRoom]:
        """Open rooms, in the order in which they were asked for."""
        return [room for room in self.open.values() if room.link is link]

    def stuck(self, now: float) -> list[tuple[DecodeRoom, str]]:
        """Open rooms that have waited for another rank for too long, each with the reason."""
        longest = self.offer_timeout
        if longest is None or now < self._next_check:
            return []
        self._next_check = now + longest / CHECKS_PER_TIMEOUT
        stuck = [room for room in self.open.values() if now - room.touched > longest]
        why = f"nothing has happened for {longest:g} s: it waits for"
        return [(room, f"{why} {room.waits_for}.") for room in stuck if not room.working]

    def end(self, room: DecodeRoom, now: float) -> None:
        """A room has ended; its items are free unless a read may still write them."""
        del self.open[room.name]
        room.checks.clear()  # a cycle would keep the room, and with it the pool of its block table
        self._free(room)
        if room.declined:  # of no more use to its caller
            self._declined.append(room)
            if len(self._declined) > MAX_DECLINED:
                oldest = self._declined.popleft()
                if self.by_name.get(oldest.name) is oldest:
                    self.forget(oldest.name, now)

    def end_read(self, read: Read, now: float) -> DecodeRoom | None:
        """None of a read's bytes can land any more; returns its room if that is open."""
        room = self.known(read.room)
        progress = room.reads.pop(read)
        begun = progress.begun
        room.touched = now
        room.metrics.reads.append(
            ReadTimes(
                source=read.rank.source,
                start=read.tokens.start,
                stop=read.tokens.stop,
                layers=read.layers,
                nbytes=progress.nbytes,
                ready=read.ready - room.opened_at,
                begun=None if begun is None else begun - room.opened_at,
                ended=now - room.opened_at,
            )
        )
        if read.room in self.open:
            return room
        self._free(room)
        return None

    def forget(self, name: Room, now: float) -> None:
        room = self.known(name)
        if name in self.open or room.reading:
            raise RoomError(f"room {name!r} has not ended. Abort it, and wait for its reads.")
        del self.by_name[name]
        self.ended.pop(name, None)

    def leases(self) -> Leases:
        return Leases(
            leased=count_items(room.table for room in self.open.values()),
            quarantined=count_items(room.table for room in self._quarantine()),
        )

    def quarantined(self) -> int:
        return sum(1 for _ in self._quarantine())

    def _quarantine(self) -> Iterator[DecodeRoom]:
        for name, room in self.by_name.items():
            if name not in self.open and room.reading:
                yield room

    def _free(self, room: DecodeRoom) -> None:
        if not room.reading:
            self._written.release(room.name)
            self.ended.note_ended(room.name, room.failure)
