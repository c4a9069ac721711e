"""Decode's side of the hand-off as a state machine: messages, calls, time and ended reads in,
messages, reads and verifications out; no sockets, no engine.

A room succeeds when every position that it lacks was read from every rank that contributes, and
every rank has answered that its pages stayed leased until then.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection

from disagg.digest.digester import Verification
from disagg.protocol.decode_peers import Links
from disagg.protocol.decode_state import DecodeRoom, Link, Read
from disagg.protocol.liveness import Leases, items
from disagg.protocol.messages import (
    Abort,
    Aux,
    ChunkReady,
    Digests,
    Hello,
    Message,
    ReadDone,
    ReadRequest,
    ReleaseAck,
    Room,
    reason_text,
)
from disagg.protocol.metrics import RoomMetrics, Totals, log_failure
from disagg.protocol.status import Failure, KVPoll
from disagg.protocol.verification import Comparisons
from kvpool.layout import PoolLayout, RequestAddress


class DecodeRooms:
    """All rooms of one decode endpoint. Calls append to `reads`, `checks` and what `links` has to
    say; a driver acts on them. With `verify`, digests of what was read are compared before success.
    """

    def __init__(
        self,
        hello: Hello,
        layout: PoolLayout,
        readers: int,
        verify: bool = False,
        clock: Callable[[], float] = time.monotonic,
        allow_missing: Collection[str] = (),
    ) -> None:
        self.hello, self.readers, self.verify = hello, readers, verify
        self._clock = clock
        self.totals = Totals()
        self.links = Links(hello, layout, self._link_ready, self._link_failed, clock, allow_missing)
        self.reads: list[Read] = []
        self._comparisons = Comparisons(self.links, layout, self._advance, self._fail, clock)
        self.checks = self._comparisons.checks
        self._rooms: dict[Room, DecodeRoom] = {}
        self._open: set[Room] = set()

    def want(
        self,
        name: Room,
        address: RequestAddress,
        start: int,
        link: Link,
        expected: Collection[str] = (),
    ) -> None:
        """Asks for positions `start` to the end of `address`, and for the aux values `expected`."""
        if name in self._rooms:
            raise ValueError(f"room {name!r} is wanted already. Forget it first.")
        if link not in self.links.links:
            raise ValueError(
                f"room {name!r}: the link is another endpoint's, or it was disconnected."
            )
        if not 0 <= start <= address.num_tokens:
            raise ValueError(f"room {name!r}: start {start} of {address.num_tokens} tokens.")
        attempt = uuid.uuid4().hex
        metrics = RoomMetrics(plan_seconds=link.plan_seconds)
        now = self._clock()
        room = DecodeRoom(link, address, start, attempt, now, metrics, frozenset(expected))
        self._rooms[name] = room
        self._open.add(name)
        room.offered = [0] * len(link.addresses)
        room.closed = [False] * len(link.addresses)
        if link.refusal is not None:
            self._fail(name, Failure("decode", link.refusal, "refused"))
        elif link.lost is not None:
            self._fail(name, Failure("prefill", link.lost, "lost"))
        elif link.plan is not None:
            self._ask(name, room)

    def abort(self, name: Room, reason: str) -> None:
        """Ends a room that has not ended. Its pages stay leased while `reading(name)`."""
        self._known(name)
        if name in self._open:
            self._fail(name, Failure("decode", reason, "abort"))

    def poll(self, name: Room) -> KVPoll:
        """The room's state."""
        room = self._known(name)
        if room.failure is not None:
            return KVPoll.Failed
        if room.complete:
            return KVPoll.Success
        if not room.asked:
            return KVPoll.Bootstrapping
        return KVPoll.Transferring if any(room.offered) else KVPoll.WaitingForInput

    def failure(self, name: Room) -> Failure | None:
        """Why the room failed, if it did."""
        return self._known(name).failure

    def aux(self, name: Room) -> Aux:
        """The values that came with success; raises ValueError before it."""
        if self.poll(name) is not KVPoll.Success:
            raise ValueError(f"room {name!r}: aux values are there once it has succeeded.")
        return dict(self._known(name).aux)

    def metrics(self, name: Room) -> RoomMetrics:
        """What was moved, and what that took; goes on changing until the last read has ended."""
        return self._known(name).metrics

    def reading(self, name: Room) -> bool:
        """Whether a read may still write to the room's pages."""
        return self._known(name).reading > 0

    def forget(self, name: Room) -> None:
        """Drops a room that has ended and that no read can touch any more."""
        if not self.poll(name).ended or self.reading(name):
            raise ValueError(f"room {name!r} has not ended. Abort it, and wait for its reads.")
        del self._rooms[name]

    def open_rooms(self) -> set[Room]:
        """Rooms that have not ended."""
        return self._open

    def leases(self) -> Leases:
        """Items of open rooms, and of ended ones that a read may still touch."""
        ended = self._rooms.keys() - self._open
        return Leases(
            items(self._rooms[name].address for name in self._open),
            items(self._rooms[name].address for name in ended if self._rooms[name].reading),
        )

    def tick(self) -> None:
        """Notices what time brings."""
        self.links.tick()

    def receive(self, rank: int, message: Message) -> None:
        """Takes one message of rank number `rank` (over all links)."""
        at = self.links.at(rank)
        if at is None or self.links.receive(*at, message):
            return
        link, source = at
        if not isinstance(message, (ChunkReady, Digests, ReleaseAck, Abort)):
            self.links.refuse(link, source, f"{type(message).__name__} is not decode's.")
            return
        room = self._rooms.get(message.room)
        hello = link.hellos[source]
        if hello is None or hello.generation != message.generation:
            return  # of an earlier life: nothing here waits for it
        if (
            room is None
            or room.link is not link
            or room.attempt != message.attempt
            or message.room not in self._open
        ):
            if isinstance(message, ChunkReady):  # prefill still holds pages for us
                reason = "decode wants this room no more."
                stale = Abort(message.generation, message.room, message.attempt, reason)
                self.links.post(link, source, stale)
        elif isinstance(message, ChunkReady):
            self._ready(room, source, message)
        elif isinstance(message, Digests):
            self._comparisons.answered(room, source, message)
        elif isinstance(message, ReleaseAck):
            self._released(message.room, room, source, message)
        else:
            failure = Failure("prefill", reason_text(message.reason), "abort")
            self._fail(message.room, failure, but=source)

    def lost(self, rank: int, reason: str) -> None:
        """A rank cannot be reached any more: the rooms of its link fail."""
        at = self.links.at(rank)
        if at is not None:
            self.links.lose(*at, reason)

    def wanted(self, read: Read) -> bool:
        """Whether a read that was handed out should still be made."""
        room = self._rooms.get(read.room)
        return read.room in self._open and room is not None and room.attempt == read.attempt

    def read_ended(self, read: Read, problem: str | None) -> None:
        """A read that was handed out has ended: nothing of it can land any more."""
        room = self._known(read.room)
        room.reading -= 1
        if not self.wanted(read):
            return
        if problem is not None:
            self._fail(read.room, Failure("decode", problem, "read"))
        else:
            self._advance(read.room)

    def read_failed(self, read: Read, problem: str) -> None:
        """A read has failed, and its bytes may still land: it will be said when it has ended."""
        if self.wanted(read):
            self._fail(read.room, Failure("decode", problem, "read"))

    def checked(self, check: Verification, values: bytes | None, problem: str = "") -> None:
        """Own digests of a check that was handed out, or why there are none."""
        room = self._rooms.get(check.room)
        if room is None or check.room not in self._open or room.attempt != check.attempt:
            return
        self._comparisons.digested(room, check, values, problem)

    def _link_ready(self, link: Link) -> None:
        for name in self._open:
            if self._rooms[name].link is link:
                self._ask(name, self._rooms[name])

    def _link_failed(self, link: Link, failure: Failure, but: int | None) -> None:
        """All of its rooms fail; after a refusal (`but` is None) all ranks know."""
        for name in [name for name in self._open if self._rooms[name].link is link]:
            told = link.refusal is None
            self._fail(name, failure, but, told)

    def _ask(self, name: Room, room: DecodeRoom) -> None:
        room.asked = True
        room.metrics.plan_seconds = room.link.plan_seconds
        start, end = room.start, room.address.num_tokens
        self._tell(room, lambda g: ReadRequest(g, name, room.attempt, start, end, self.readers))

    def _ready(self, room: DecodeRoom, source: int, ready: ChunkReady) -> None:
        total, link, first = room.address.num_tokens, room.link, not room.seen
        try:
            address = room.take(source, ready)
        except ValueError as error:
            problem = f"{link.name(source)}: {error}"
            self._fail(ready.room, Failure("decode", problem, "protocol"))
            return
        if address is None:
            return  # a duplicate
        if first:
            room.metrics.wait_seconds = self._clock() - room.wanted_at
        tokens = range(max(ready.start, room.start), max(ready.stop, room.start))
        # slots and rings come with the last position, also where decode has all the pages
        needed = tokens or (ready.last and room.start == total)
        plan, hello = link.plan, link.hellos[source]
        if plan is None or hello is None or source not in plan.contributors() or not needed:
            self._advance(ready.room)
            return
        room.reading += 1
        self.reads.append(
            Read(
                ready.room,
                room.attempt,
                link,
                source,
                hello,
                plan,
                tokens,
                address,
                room.address,
            )
        )

    def _advance(self, name: Room) -> None:
        """Says done once every rank has closed the room, every read has ended and is verified."""
        room = self._rooms[name]
        if room.reading or room.announced or not all(room.closed):
            return
        missing = sorted(room.expected - room.aux.keys())
        if missing:
            sent = ", ".join(sorted(room.aux)) or "none"
            reason = f"prefill sent no aux value {', '.join(missing)} (it sent: {sent})."
            self._fail(name, Failure("decode", reason, "aux"))
            return
        plan = room.link.plan
        if self.verify and room.checks is None and plan is not None:
            self._comparisons.begin(name, room, plan)
        if not room.checks:
            room.announced = True
            self._tell(room, lambda generation: ReadDone(generation, name, room.attempt))

    def _released(self, name: Room, room: DecodeRoom, source: int, message: ReleaseAck) -> None:
        if source in room.released:
            return  # the answer to a duplicate
        if not message.leased or not room.announced:
            reason = f"{room.link.name(source)} gave its pages away before they were read."
            self._fail(name, Failure("prefill", reason, "lease"))
            return
        room.released.add(source)
        if room.complete:
            self._end(name, room)

    def _fail(
        self, name: Room, failure: Failure, but: int | None = None, told: bool = True
    ) -> None:
        """Ends a room; all ranks but `but` are told, unless they know from elsewhere."""
        room = self._rooms[name]
        room.failure = failure
        self._end(name, room)
        kept = [read for read in self.reads if read.room != name]
        room.reading -= len(self.reads) - len(kept)
        self.reads = kept
        if room.asked and told:
            reason = reason_text(failure.reason)
            self._tell(room, lambda g: Abort(g, name, room.attempt, reason), but)

    def _end(self, name: Room, room: DecodeRoom) -> None:
        self._open.discard(name)
        room.metrics.total_seconds = self._clock() - room.wanted_at
        self.totals.add(room.metrics, room.failure)
        if room.failure is not None:
            hellos = [hello.generation if hello else "" for hello in room.link.hellos]
            log_failure(
                room.failure,
                room=name,
                peer=", ".join(room.link.addresses),
                generation=", ".join(hellos),
                start=room.start,
                tokens=room.address.num_tokens,
                bytes_moved=room.metrics.bytes_moved,
                seconds=room.metrics.total_seconds,
            )

    def _tell(
        self, room: DecodeRoom, message: Callable[[str], Message], but: int | None = None
    ) -> None:
        for source, hello in enumerate(room.link.hellos):
            if hello is not None and source != but:
                self.links.post(room.link, source, message(hello.generation))

    def _known(self, name: Room) -> DecodeRoom:
        room = self._rooms.get(name)
        if room is None:
            raise KeyError(f"room {name!r} was never wanted, or is forgotten.")
        return room
