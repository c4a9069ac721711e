"""Rooms of a check, one after the other, until enough bytes have moved or the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from disagg.cli.check.memory import CheckMemory
from disagg.cli.check.offer import room_of
from disagg.plan import TransferPlan
from disagg.protocol.metrics import RoomMetrics
from disagg.protocol.peers.link import Link
from disagg.protocol.status import KVPoll
from disagg.runtime.decode_endpoint import DecodeEndpoint

LOOK = 0.1
"""Seconds between two looks at how far a room is."""
FIRST_BYTES = 1 << 20
ROOM_SECONDS = 1.0
"""How long a room is to take at the rate of the one before: what is not whole does not count."""
Tell = Callable[[int], object]


class Refused(Exception):
    """A reason against, and what it is about."""

    def __init__(self, about: str, reason: object) -> None:
        super().__init__(str(reason))
        self.about = about


@dataclass(slots=True, kw_only=True)
class Moved:
    """What has arrived in whole rooms, every byte compared by checksum; in how many seconds while
    bytes were on their way; and whether it is all that was asked for.
    """

    bytes: int = 0
    seconds: float = 0.0
    rooms: int = 0
    tokens: int = 0
    complete: bool = False

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds if self.seconds else 0.0

    def count_room(self, metrics: RoomMetrics, tokens: int) -> None:
        """Counts a room that has succeeded."""
        ready = min(read.ready for read in metrics.reads)
        self.seconds += max(read.ended for read in metrics.reads) - ready
        self.bytes += metrics.bytes_moved
        self.tokens += tokens
        self.rooms += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRooms:
    """From a link to prefill's part of the check, by the plan of that link."""

    endpoint: DecodeEndpoint
    memory: CheckMemory
    link: Link
    plan: TransferPlan

    def bytes_of(self, tokens: int) -> int:
        """Of a request."""
        return self.plan.explain(tokens).nbytes

    def move(self, nbytes: int, timeout: float, tell: Tell) -> Moved:
        """Moves so many bytes, or as many as arrive in `timeout` seconds. Raises Refused for a room
        that fails, and if no whole room arrives.
        """
        until, moved = time.monotonic() + timeout, Moved()
        # not in the figure unless it is all: engines connect with their first read
        first = self._room(FIRST_BYTES, until, Moved(), lambda arrived: None)
        if first is None:
            raise Refused("bytes", f"no room of {FIRST_BYTES:,} bytes arrived in {timeout:g} s.")
        rate = first.rate
        while moved.bytes < nbytes:
            wanted = max(FIRST_BYTES, min(int(rate * ROOM_SECONDS), nbytes - moved.bytes))
            room = self._room(wanted, until, moved, tell)
            if room is None:
                return moved if moved.rooms else first
            rate = room.rate
        moved.complete = True
        return moved

    def _room(self, nbytes: int, until: float, moved: Moved, tell: Tell) -> Moved | None:
        """Adds a room of `nbytes`, or of as many as there is room for. None: the time is over."""
        tokens = self._tokens(nbytes)
        room, state = room_of(tokens), KVPoll.Bootstrapping
        self.endpoint.receive(room, self.memory.address(tokens), link=self.link)
        while not state.ended and time.monotonic() < until:
            with suppress(TimeoutError):
                state = self.endpoint.wait(room, LOOK)
            tell(moved.bytes + self.endpoint.metrics(room).bytes_moved)
        failure, metrics = self.endpoint.failure(room), self.endpoint.metrics(room)
        if failure is not None:
            raise Refused("bytes", f"{failure.kind}: {failure}")
        if not state.ended:
            self.endpoint.abort(room, "the time of the check is over.")
            return None
        self.endpoint.forget(room)
        moved.count_room(metrics, tokens)
        alone = Moved()
        alone.count_room(metrics, tokens)
        return alone

    def _tokens(self, nbytes: int) -> int:
        """The fewest that are as many bytes."""
        low, high = 1, self.memory.tokens
        while low < high:
            middle = (low + high) // 2
            if self.bytes_of(middle) >= nbytes:
                high = middle
            else:
                low = middle + 1
        return low
