"""Decode's side of the hand-off as a state machine: events in, effects out.

A room succeeds when every position that it lacks was read from every rank that contributes, and
every rank has acked that its pages stayed leased until then.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping

from disagg.digest.digester import Verification
from disagg.errors import RoomError, UnknownRoom
from disagg.protocol import events, messages
from disagg.protocol.decode_peers import DecodePeers, LinkChange, LinkReady
from disagg.protocol.decode_state import DecodeRoom, Link, Read
from disagg.protocol.effects import CancelReads, Effect, Effects, StartRead
from disagg.protocol.liveness import Leases, count_items
from disagg.protocol.messages import Aux, Hello, Message, Room, reason_text
from disagg.protocol.metrics import RoomMetrics, Snapshot, Totals, log_failure
from disagg.protocol.status import Failure, KVPoll, Phase
from disagg.protocol.verification import Comparisons
from kvpool.layout import PoolLayout


class DecodeMachine:
    """All rooms of one decode endpoint. `readers` decode ranks read each room. With `verify`,
    digests of what was read are compared before a room succeeds.
    """

    def __init__(
        self,
        hello: Hello,
        layout: PoolLayout,
        readers: int,
        verify: bool = False,
        allow_missing: Collection[str] = (),
        *,
        now: float,
    ) -> None:
        self.hello, self.readers, self.verify = hello, readers, verify
        self._now = now
        self._effects = Effects()
        self.peers = DecodePeers(hello, layout, self._effects, now, allow_missing)
        self._comparisons = Comparisons(layout, self._effects)
        self._rooms: dict[Room, DecodeRoom] = {}
        self._open: set[Room] = set()
        self.totals = Totals()

    def handle(self, event: events.DecodeEvent, now: float) -> list[Effect]:
        """What is to be done now. Raises RoomError or UnknownRoom for a call that does not fit the
        room; then nothing has changed.
        """
        self._now = now
        match event:
            case events.Received(int(rank), message):
                self._receive(rank, message)
            case events.Malformed(int(rank), reason):
                if at := self.peers.at(rank):
                    self._link_changed(self.peers.refuse(*at, reason))
            case events.Unreachable(int(rank), reason):
                if at := self.peers.at(rank):
                    self._link_changed(self.peers.mark_dead(*at, reason, now))
            case events.Tick():
                for failed in self.peers.tick(now):
                    self._link_changed(failed)
            case events.ReadEnded(read, problem):
                self._read_ended(read, problem)
            case events.ReadFailed(read, problem):
                if self._current(read.room, read.attempt):
                    self._fail(read.room, Failure("decode", problem, "read"))
            case events.DigestComputed(Verification() as check, values, problem):
                if room := self._current(check.room, check.attempt):
                    failure = self._comparisons.computed(room, check, values, problem, now)
                    self._compared(check.room, room, failure)
            case events.ConnectLink(link):
                self.peers.connect(link, now)
            case events.DisconnectLink(link):
                self._disconnect(link)
            case events.RequestRoom():
                self._request(event)
            case events.AbortRoom(name, reason):
                self._known(name)
                if name in self._open:
                    self._fail(name, Failure("decode", reason, "abort"))
            case events.ForgetRoom(name):
                if not self.poll(name).ended or self.reading(name):
                    raise RoomError(
                        f"room {name!r} has not ended. Abort it, and wait for its reads."
                    )
                del self._rooms[name]
            case events.AbortAll(reason):
                for name in list(self._open):
                    self._fail(name, Failure("decode", reason, "abort"))
            case _:
                raise TypeError(f"{event!r} is not decode's.")
        return self._effects.drain()

    def poll(self, name: Room) -> KVPoll:
        """The room's state."""
        return self._known(name).phase.poll

    def failure(self, name: Room) -> Failure | None:
        """Why the room failed, if it did."""
        return self._known(name).failure

    def aux(self, name: Room) -> Aux:
        """The values that came with success; raises RoomError before it."""
        if self.poll(name) is not KVPoll.Success:
            raise RoomError(f"room {name!r}: aux values are there once it has succeeded.")
        return dict(self._known(name).aux)

    def metrics(self, name: Room) -> RoomMetrics:
        """What was moved, and what that took; goes on changing until the last read has ended."""
        return self._known(name).metrics

    def reading(self, name: Room) -> bool:
        """Whether a read may still write to the room's pages."""
        return self._known(name).reading > 0

    def rooms(self) -> Mapping[Room, DecodeRoom]:
        """All rooms that are not forgotten."""
        return self._rooms

    def open_rooms(self) -> set[Room]:
        """Rooms that have not ended."""
        return self._open

    def leases(self) -> Leases:
        """Items of open rooms, and of ended ones to which a read may still write."""
        ended = self._rooms.keys() - self._open
        return Leases(
            count_items(self._rooms[name].address for name in self._open),
            count_items(self._rooms[name].address for name in ended if self._rooms[name].reading),
        )

    def snapshot(self, engine: str, telemetry: Mapping[str, float]) -> Snapshot:
        """Numbers now, and since the machine was made."""
        totals, plans = self.totals.copy(), self.peers.plans
        totals.planned(plans.seconds)
        now = len(self._open), self.peers.live(), self.leases()
        cache = {"hit": plans.hits, "miss": plans.misses}
        return Snapshot(totals, *now, engine, telemetry, cache)

    def _request(self, request: events.RequestRoom) -> None:
        name, address, link = request.room, request.address, request.link
        if name in self._rooms:
            raise RoomError(f"room {name!r} exists already. Forget it first.")
        if link not in self.peers.links:
            raise RoomError(
                f"room {name!r}: the link is another endpoint's, or it was disconnected."
            )
        if not 0 <= request.start <= address.num_tokens:
            raise RoomError(f"room {name!r}: start {request.start} of {address.num_tokens} tokens.")
        metrics = RoomMetrics(plan_seconds=link.plan_seconds)
        attempt, expected = uuid.uuid4().hex, frozenset(request.expected)
        room = DecodeRoom(link, address, request.start, attempt, self._now, metrics, expected)
        self._rooms[name] = room
        self._open.add(name)
        if link.refusal is not None:
            self._fail(name, Failure("decode", link.refusal, "refused"))
        elif link.lost is not None:
            self._fail(name, Failure("prefill", link.lost, "lost"))
        elif link.plan is not None:
            self._ask(name, room)

    def _disconnect(self, link: Link) -> None:
        if link not in self.peers.links:
            raise RoomError("the link is another endpoint's, or it was disconnected.")
        self._fail_link(link, Failure("decode", "decode has disconnected.", "abort"))
        self.peers.disconnect(link)

    def _receive(self, rank: int, message: Message) -> None:
        at = self.peers.at(rank)
        if at is None or at[0].refusal is not None:
            return
        link, source = at
        self.peers.liveness.heard(rank, self._now)
        if isinstance(message, (Hello, messages.Refuse, messages.UnknownPeer, messages.Pong)):
            self._link_changed(self.peers.receive(link, source, message, self._now))
            return
        if not isinstance(message, messages.ToDecode):
            reason = f"{type(message).__name__} is not decode's."
            self._link_changed(self.peers.refuse(link, source, reason))
            return
        hello = link.hellos[source]
        if hello is None or hello.generation != message.generation:
            return  # of an earlier generation: nothing here waits for it
        room = self._current(message.room, message.attempt)
        if room is None or room.link is not link:
            if isinstance(message, messages.ChunkReady):  # prefill still holds pages for it
                about = message.generation, message.room, message.attempt
                abort = messages.Abort(*about, "decode no longer asks for this room.")
                self.peers.send(link, source, abort)
            return
        match message:
            case messages.ChunkReady():
                self._chunk_ready(room, source, message)
            case messages.Digests():
                failure = self._comparisons.answered(room, source, message, self._now)
                self._compared(message.room, room, failure)
            case messages.ReleaseAck():
                self._released(message.room, room, source, message)
            case messages.Abort():
                aborted = Failure("prefill", reason_text(message.reason), "abort")
                self._fail(message.room, aborted, except_rank=source)

    def _current(self, name: Room, attempt: str) -> DecodeRoom | None:
        """The open room of that name, if this is its attempt."""
        room = self._rooms.get(name)
        return room if room and name in self._open and room.attempt == attempt else None

    def _read_ended(self, read: Read, problem: str | None) -> None:
        self._known(read.room).reading -= 1
        room = self._current(read.room, read.attempt)
        if room is None:
            return
        if problem is not None:
            self._fail(read.room, Failure("decode", problem, "read"))
        else:
            self._advance(read.room, room)

    def _link_changed(self, change: LinkChange | None) -> None:
        if isinstance(change, LinkReady):
            for name in list(self._open):
                if self._rooms[name].link is change.link:
                    self._ask(name, self._rooms[name])
        elif change is not None:
            self._fail_link(*change)

    def _fail_link(self, link: Link, failure: Failure, except_rank: int | None = None) -> None:
        """All its rooms fail; after a refusal every rank knows."""
        for name in [name for name in self._open if self._rooms[name].link is link]:
            self._fail(name, failure, except_rank, tell=link.refusal is None)

    def _ask(self, name: Room, room: DecodeRoom) -> None:
        room.phase = room.phase.to(Phase.REQUESTED)
        room.metrics.plan_seconds = room.link.plan_seconds
        start, end = room.start, room.address.num_tokens
        self._tell(
            room, lambda g: messages.ReadRequest(g, name, room.attempt, start, end, self.readers)
        )

    def _chunk_ready(self, room: DecodeRoom, source: int, ready: messages.ChunkReady) -> None:
        link = room.link
        try:
            address = room.take(source, ready)
        except ValueError as error:
            problem = f"{link.name(source)}: {error}"
            self._fail(ready.room, Failure("decode", problem, "protocol"))
            return
        if address is None:
            return  # a duplicate
        if room.phase is Phase.REQUESTED:
            room.phase = room.phase.to(Phase.TRANSFERRING)
            room.metrics.wait_seconds = self._now - room.opened_at
        tokens = range(max(ready.start, room.start), max(ready.stop, room.start))
        # slots and rings come with the last position, also where decode has all the pages
        needed = tokens or (ready.last and room.start == room.address.num_tokens)
        plan, hello = link.plan, link.hellos[source]
        if plan is None or hello is None or source not in plan.contributors() or not needed:
            self._advance(ready.room, room)
            return
        room.reading += 1
        about = ready.room, room.attempt, link, source, hello, plan, tokens, address
        self._effects.append(StartRead(Read(*about, room.address, room.metrics)))

    def _advance(self, name: Room, room: DecodeRoom) -> None:
        """Verifies or releases once every rank has closed the room and every read has ended."""
        if room.reading or room.phase is not Phase.TRANSFERRING or not all(room.closed):
            return
        missing = sorted(room.expected - room.aux.keys())
        if missing:
            sent = ", ".join(sorted(room.aux)) or "none"
            reason = f"prefill sent no aux value {', '.join(missing)} (it sent: {sent})."
            self._fail(name, Failure("decode", reason, "aux"))
            return
        plan = room.link.plan
        if self.verify and plan is not None:
            room.phase = room.phase.to(Phase.VERIFYING)
            self._comparisons.begin(name, room, plan, self._now)
        if not room.checks:
            self._release(name, room)

    def _compared(self, name: Room, room: DecodeRoom, failure: Failure | None) -> None:
        if failure is not None:
            self._fail(name, failure)
        elif room.phase is Phase.VERIFYING and not room.checks:
            self._release(name, room)

    def _release(self, name: Room, room: DecodeRoom) -> None:
        room.phase = room.phase.to(Phase.RELEASING)
        self._tell(room, lambda generation: messages.ReadDone(generation, name, room.attempt))

    def _released(
        self, name: Room, room: DecodeRoom, source: int, message: messages.ReleaseAck
    ) -> None:
        if source in room.released:
            return  # the answer to a duplicate
        if not message.leased or room.phase is not Phase.RELEASING:
            reason = f"{room.link.name(source)} released its pages before they were read."
            self._fail(name, Failure("prefill", reason, "lease"))
            return
        room.released.add(source)
        if len(room.released) == len(room.offered):
            room.phase = room.phase.to(Phase.SUCCESS)
            self._end(name, room)

    def _fail(
        self, name: Room, failure: Failure, except_rank: int | None = None, *, tell: bool = True
    ) -> None:
        """Ends a room; all ranks but `except_rank` are told, if they were asked for it."""
        room = self._rooms[name]
        asked = room.phase is not Phase.HANDSHAKE
        room.failure = failure
        room.phase = room.phase.to(Phase.FAILED)
        self._end(name, room)
        if room.reading:
            self._effects.append(CancelReads(room.attempt))
        if asked and tell:
            reason = reason_text(failure.reason)
            self._tell(room, lambda g: messages.Abort(g, name, room.attempt, reason), except_rank)

    def _end(self, name: Room, room: DecodeRoom) -> None:
        self._open.discard(name)
        room.metrics.total_seconds = self._now - room.opened_at
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
                seconds=round(room.metrics.total_seconds, 6),
            )

    def _tell(
        self, room: DecodeRoom, message: Callable[[str], Message], except_rank: int | None = None
    ) -> None:
        for source, hello in enumerate(room.link.hellos):
            if hello is not None and source != except_rank:
                self.peers.send(room.link, source, message(hello.generation))

    def _known(self, name: Room) -> DecodeRoom:
        room = self._rooms.get(name)
        if room is None:
            raise UnknownRoom(f"room {name!r} was not asked for, or is forgotten.")
        return room
