"""Decode's side of the hand-off as a state machine: events in, effects out.

A room succeeds when every position that it lacks was read from every rank that contributes, and
every rank that was asked has acked that its pages stayed leased until then.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping

from disagg.digest.digester import Verification
from disagg.errors import RoomError
from disagg.plan import Group
from disagg.protocol import events, messages
from disagg.protocol.decode_peers import DecodePeers, LinkChange, LinkFailed, LinkReady
from disagg.protocol.effects import CancelReads, Effect, Effects, RoomEnded, StartRead
from disagg.protocol.link import Link
from disagg.protocol.liveness import Leases
from disagg.protocol.messages import Aux, Hello, Message, Room
from disagg.protocol.metrics import RoomMetrics, Snapshot, Totals, log_failure
from disagg.protocol.read import Read
from disagg.protocol.rooms.decode_room import DecodeRoom
from disagg.protocol.rooms.decode_rooms import DecodeRooms
from disagg.protocol.status import Failure, KVPoll, Phase
from disagg.protocol.verification import Comparisons
from kvpool.layout import PoolLayout


class DecodeMachine:
    """All rooms of one decode endpoint. `readers` decode ranks read each room: how many, of which
    each asks every rank of prefill, or their Group, of which each asks some. With `verify`,
    digests of what was read are compared before a room succeeds. A room in which nothing happens
    for longer than `offer_timeout` seconds fails.
    """

    def __init__(
        self,
        hello: Hello,
        layout: PoolLayout,
        readers: int | Group,
        verify: bool = False,
        allow_missing: Collection[str] = (),
        *,
        offer_timeout: float | None = None,
        now: float,
    ) -> None:
        self.hello, self.verify = hello, verify
        self._now = now
        self._effects = Effects()
        self.peers = DecodePeers(hello, layout, readers, self._effects, now, allow_missing)
        self._comparisons = Comparisons(layout, self._effects)
        self._rooms = DecodeRooms(layout, offer_timeout, allow_missing)
        self.ended = self._rooms.ended
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
                    self._link_changed(self.peers.refuse(*at, reason, now))
            case events.Unreachable(int(rank), reason):
                if at := self.peers.at(rank):
                    self._link_changed(self.peers.mark_dead(*at, reason, now))
            case events.Tick():
                for failed in self.peers.tick(now):
                    self._link_changed(failed)
                for name, reason in self._rooms.stuck(now):
                    self._fail(name, Failure("decode", reason, "timeout"))
            case events.ReadEnded(read, problem):
                self._read_ended(read, problem)
            case events.ReadFailed(read, problem):
                if self._rooms.current(read.room, read.attempt):
                    self._fail(read.room, Failure("decode", problem, "read"))
            case events.DigestComputed(Verification() as check, values, problem):
                if room := self._rooms.current(check.room, check.attempt):
                    failure = self._comparisons.computed(room, check, values, problem, now)
                    self._compared(check.room, room, failure)
            case events.ConnectLink(link):
                self.peers.connect(link, now)
            case events.DisconnectLink(link):
                self._disconnect(link)
            case events.RequestRoom():
                self._request(event)
            case events.AbortRoom(name, reason):
                if not self.poll(name).ended:
                    self._fail(name, Failure("decode", reason, "abort"))
            case events.ForgetRoom(name):
                self._rooms.forget(name)
            case events.AbortAll(reason, closing):
                for name in list(self._rooms.open):
                    self._fail(name, Failure("decode", reason, "abort"))
                if closing:
                    self.peers.notify_shutdown()
            case _:
                raise TypeError(f"{event!r} is not decode's.")
        return self._effects.drain()

    def poll(self, name: Room) -> KVPoll:
        """The room's state."""
        return self._rooms.known(name).phase.poll

    def failure(self, name: Room) -> Failure | None:
        """Why the room failed, if it did."""
        return self._rooms.known(name).failure

    def waits_for(self, name: Room) -> str:
        """What must happen next in an open room."""
        return self._rooms.known(name).waits_for

    def aux(self, name: Room) -> Aux:
        """The values that came with success; raises RoomError before it."""
        if self.poll(name) is not KVPoll.Success:
            raise RoomError(f"room {name!r}: aux values are there once it has succeeded.")
        return dict(self._rooms.known(name).aux)

    def num_tokens(self, name: Room) -> int:
        """How many tokens the request has; raises RoomError before success."""
        if self.poll(name) is not KVPoll.Success:
            raise RoomError(
                f"room {name!r}: how many tokens it has is known once it has succeeded."
            )
        return self._rooms.known(name).address.num_tokens

    def metrics(self, name: Room) -> RoomMetrics:
        """What was moved, and what that took; goes on changing until the last read has ended."""
        return self._rooms.known(name).metrics

    def reading(self, name: Room) -> bool:
        """Whether a read may still write to the room's pages."""
        return self._rooms.reading(name)

    def layer_ready(self, name: Room, owner: str, layer: int) -> bool:
        """Whether all that is lacking of a layer was read."""
        return self._rooms.known(name).layer_ready(owner, layer)

    def rooms(self) -> Mapping[Room, DecodeRoom]:
        """All rooms that are not forgotten."""
        return self._rooms.by_name

    def open_rooms(self) -> set[Room]:
        """Rooms that have not ended."""
        return self._rooms.open

    def leases(self) -> Leases:
        """Items of open rooms, and of ended ones to which a read may still write."""
        return self._rooms.leases()

    def snapshot(self, engine: str, telemetry: Mapping[str, float]) -> Snapshot:
        """Numbers now, and since the machine was made."""
        totals, plans = self.totals.copy(), self.peers.plans
        totals.planned(plans.seconds)
        now = len(self._rooms.open), self.peers.live(), self.leases()
        return Snapshot(totals, *now, engine, telemetry, {"hit": plans.hits, "miss": plans.misses})

    def _request(self, request: events.RequestRoom) -> None:
        name, address, link = request.room, request.address, request.link
        self.peers.check(link)
        if request.declined and self._rooms.has_declined(name, link):
            return
        metrics = RoomMetrics(plan_seconds=link.plan_seconds)
        attempt, expected = uuid.uuid4().hex, frozenset(request.expected)
        about = self._now, metrics, expected, request.declined, request.at_most
        room = DecodeRoom(link, address, request.start, attempt, *about)
        self._rooms.add(name, room)
        if link.refusal is not None:
            self._fail(name, Failure("decode", link.refusal, "refused"))
        elif link.lost is not None:
            self._fail(name, Failure("prefill", link.lost, "lost"))
        elif link.plan is not None:
            self._ask(name, room)

    def _disconnect(self, link: Link) -> None:
        self.peers.check(link)
        failure = Failure("decode", "decode has disconnected.", "abort")
        self._fail_link(LinkFailed(link, failure))
        self.peers.disconnect(link)

    def _receive(self, rank: int, message: Message) -> None:
        link, source = self.peers.at(rank) or (None, 0)
        if link is None or link.refusal is not None or link.redials[source] is not None:
            return
        self.peers.liveness.heard(rank, self._now)
        if isinstance(message, (Hello, messages.Refuse, messages.UnknownPeer, messages.Pong)):
            self._link_changed(self.peers.receive(link, source, message, self._now))
            return
        if not isinstance(message, messages.ToDecode):
            reason = f"{type(message).__name__} is not decode's."
            self._link_changed(self.peers.refuse(link, source, reason, self._now))
            return
        hello = link.hellos[source]
        if hello is None or hello.generation != message.generation:
            return  # of an earlier generation: nothing here waits for it
        room = self._rooms.current(message.room, message.attempt)
        if room is None or room.link is not link or source not in room.offered:
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
                aborted = Failure("prefill", message.reason, "abort")
                self._fail(message.room, aborted, except_rank=source)

    def _read_ended(self, read: Read, problem: str | None) -> None:
        room = self._rooms.read_ended(read, self._now)
        if room is not None and problem is not None:
            self._fail(read.room, Failure("decode", problem, "read"))
        elif room is not None:
            self._advance(read.room, room)

    def _link_changed(self, change: LinkChange | None) -> None:
        if isinstance(change, LinkReady):
            for name in self._rooms.of_link(change.link):
                self._ask(name, self._rooms.known(name))
        elif change is not None:
            self._fail_link(change)

    def _fail_link(self, failed: LinkFailed) -> None:
        """Its rooms fail; after a refusal every rank knows."""
        link, failure, except_rank, asked = failed
        for name in self._rooms.of_link(link):
            if not asked or self._rooms.known(name).phase is not Phase.HANDSHAKE:
                self._fail(name, failure, except_rank, tell=link.refusal is None)

    def _ask(self, name: Room, room: DecodeRoom) -> None:
        room.asked(self._now)
        tokens, timeout = (room.start, room.address.num_tokens), self._rooms.offer_timeout
        about, readers = (name, room.attempt, *tokens), room.link.asks
        self._tell(
            room, lambda source, g: messages.ReadRequest(g, *about, readers[source], timeout)
        )

    def _chunk_ready(self, room: DecodeRoom, source: int, ready: messages.ChunkReady) -> None:
        try:
            address = room.take(source, ready)
        except ValueError as error:
            problem = f"{room.link.name(source)}: {error}"
            self._fail(ready.room, Failure("decode", problem, "protocol"))
            return
        if address is None:
            return  # a duplicate, or layers of roles that decode lacks
        room.touched = self._now
        if room.phase is Phase.REQUESTED:
            room.phase = room.phase.to(Phase.TRANSFERRING)
            room.metrics.wait_seconds = self._now - room.opened_at
        reads = room.begin_reads(source, ready, address, self._now)
        self._effects.extend(StartRead(read) for read in reads)
        if not reads:
            self._advance(ready.room, room)

    def _advance(self, name: Room, room: DecodeRoom) -> None:
        """Verifies or releases once every rank has closed the room and every read has ended."""
        if room.reading or room.phase is not Phase.TRANSFERRING or not room.whole:
            return
        if missing := room.missing_aux():
            self._fail(name, Failure("decode", missing, "aux"))
            return
        plan = room.link.plan
        if self.verify and plan is not None and not room.declined:
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
        room.metrics.done_seconds = self._now - room.opened_at
        self._tell(room, lambda _, g: messages.ReadDone(g, name, room.attempt))

    def _released(
        self, name: Room, room: DecodeRoom, source: int, message: messages.ReleaseAck
    ) -> None:
        released = room.metrics.released
        if source in released:
            return  # the answer to a duplicate
        if not message.leased or room.phase is not Phase.RELEASING:
            reason = f"{room.link.name(source)} released its pages before they were read."
            self._fail(name, Failure("prefill", reason, "lease"))
            return
        room.touched = self._now
        released[source] = self._now - room.opened_at
        if len(released) == len(room.offered):
            room.phase = room.phase.to(Phase.SUCCESS)
            self._end(name, room)

    def _fail(
        self, name: Room, failure: Failure, except_rank: int | None = None, *, tell: bool = True
    ) -> None:
        """Ends a room. Of the ranks that were asked, before that of all ranks, all but
        `except_rank` are told: their pages wait.
        """
        room = self._rooms.known(name)
        asked = room.phase is not Phase.HANDSHAKE
        room.failure = failure
        room.phase = room.phase.to(Phase.FAILED)
        self._end(name, room)
        if room.reading:
            self._effects.append(CancelReads(room.attempt))
        if not asked:
            drop = messages.DropRoom(name, failure.reason)
            self.peers.drop_room(room.link, drop, except_rank)
        elif tell:
            about = name, room.attempt, failure.reason
            self._tell(room, lambda _, g: messages.Abort(g, *about), except_rank)

    def _end(self, name: Room, room: DecodeRoom) -> None:
        self._rooms.end(name)
        self._effects.append(RoomEnded(name))
        room.metrics.total_seconds = self._now - room.opened_at
        self.totals.add(room.metrics, room.failure)
        if room.failure is not None:
            log_failure(room.failure, room=name, **room.facts())

    def _tell(
        self,
        room: DecodeRoom,
        message: Callable[[int, str], Message],
        except_rank: int | None = None,
    ) -> None:
        """Sends to the ranks that the room is asked of, by source and generation."""
        for source in room.offered:
            hello = room.link.hellos[source]
            if hello is not None and source != except_rank:
                self.peers.send(room.link, source, message(source, hello.generation))
