"""Decode's side of the hand-off as a state machine: events in, effects out.

A room succeeds when every position that it lacks was read from every rank that contributes, and
every rank that was asked has acked that its pages stayed leased until then.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace

from disagg.digest.arrived import ArrivedDigests
from disagg.errors import EndpointDraining, RoomError
from disagg.plan import Group
from disagg.protocol import events, messages
from disagg.protocol.machine import Machine
from disagg.protocol.messages import Hello, Message, Room
from disagg.protocol.metrics import Snapshot
from disagg.protocol.peers.decode_peers import DecodePeers, LinkChange, LinkFailed, OfAsked
from disagg.protocol.peers.link import Link, PrefillRank
from disagg.protocol.rooms.decode_room import DecodeRoom, ReadProgress
from disagg.protocol.rooms.decode_rooms import DecodeRooms
from disagg.protocol.status import Failure, Phase, RoomEvent, failure_kind
from disagg.protocol.verification import Comparisons, Verification
from kvpool.layout import PoolLayout


class DecodeMachine(Machine[DecodeRoom]):
    """All rooms of one decode endpoint. `readers`: the number of decode ranks that read each
    room, if each asks every rank of prefill, or their Group, if each asks some. With `verify`,
    digests of what was read are compared before a room succeeds. A room in which nothing happens
    for longer than `offer_timeout` seconds fails.
    """

    side = "decode"
    peers: DecodePeers
    rooms: DecodeRooms

    def __init__(
        self,
        hello: Hello,
        layout: PoolLayout,
        readers: int | Group,
        *,
        now: float,
        verify: bool = False,
        allow_missing: Collection[str] = (),
        cast: bool | Collection[str] = False,
        offer_timeout: float | None = None,
    ) -> None:
        super().__init__(hello, DecodeRooms(layout, offer_timeout, allow_missing), now)
        self.verify = verify
        self.peers = DecodePeers(
            hello, layout, readers, self._effects, now=now, allow_missing=allow_missing, cast=cast
        )
        self._comparisons = Comparisons(layout, self._effects)

    def handle(self, event: events.DecodeEvent, now: float) -> list[events.Effect]:
        """Raises RoomError, UnknownRoom or EndpointDraining, and changes nothing, for a call that
        does not fit.
        """
        self._now = now
        match event:
            case events.Received(int(number), message):
                if rank := self.peers.by_number.get(number):
                    self._receive(rank, message)
            case events.ReadBegun(read, begun, seconds, shares):
                room = self.rooms.known(read.room)
                room.reads[read] = ReadProgress(begun)
                room.metrics.bound(shares, seconds)
            case events.ReadMoved(read, nbytes, seconds):
                room = self.rooms.known(read.room)
                room.reads[read].nbytes += nbytes
                room.metrics.moved(nbytes, seconds)
            case events.ReadEnded(read, problem):
                reading = self.rooms.end_read(read, now)
                if reading and problem is not None:
                    self._fail(reading, Failure("decode", problem, "read"))
                elif reading:
                    self._advance(reading)
            case events.ReadFailed(read, problem):
                if reading := self.rooms.current(read.room, read.attempt):
                    self._fail(reading, Failure("decode", problem, "read"))
            case events.RequestRoom():
                self._request(event)
            case events.Tick():
                for failed in self.peers.tick(now):
                    self._fail_link(failed)
                for room, reason in self.rooms.stuck(now):
                    self._fail(room, Failure("decode", reason, "timeout"))
            case events.Malformed(int(number), reason):
                if rank := self.peers.by_number.get(number):
                    self._link_changed(self.peers.refuse(rank, reason, now))
            case events.Unreachable(int(number), reason):
                if rank := self.peers.by_number.get(number):
                    self._link_changed(self.peers.mark_dead(rank, reason, now))
            case events.EngineConnected(rank):
                rank.link.unconnected.discard(rank.source)
            case events.DigestComputed(Verification() as check, values, problem):
                if not check.room.phase.poll.ended:
                    check.own = values
                    failure = self._comparisons.compare(check, "decode", problem, now)
                    self._compared(check.room, failure)
            case events.ConnectLink(link):
                self.peers.connect(link, now)
            case events.DisconnectLink(link):
                self.peers.check(link)
                left = Failure("decode", "decode has disconnected.", "abort")
                self._fail_link(LinkFailed(link, left))
                self.peers.disconnect(link)
            case _:
                self._handle_common(event)
        return self._effects.drain()

    def snapshot(self, engine: str, telemetry: Mapping[str, float]) -> Snapshot:
        snapshot, plans = super().snapshot(engine, telemetry), self.peers.plans
        return replace(
            snapshot,
            links=self.peers.links_by_state(),
            plans={"hit": plans.hits, "miss": plans.misses},
            plan_seconds=plans.seconds,
        )

    def succeeded(self, name: Room, what: str) -> DecodeRoom:
        """A room that has succeeded; else raises RoomError, as `what` is true only then."""
        room = self.rooms.known(name)
        if room.phase is not Phase.SUCCESS:
            raise RoomError(f"room {name!r}: {what} once it has succeeded.")
        return room

    def _request(self, request: events.RequestRoom) -> None:
        name, link = request.room, request.link
        self.peers.check(link)
        earlier = self.rooms.by_name.get(name)
        if request.declined and earlier and earlier.declined and earlier.link is link:
            return
        # what is declined is not read: prefill's pages come back the sooner
        if self.draining and not request.declined and earlier is None:
            raise EndpointDraining(
                f"room {name!r}: this decode drains and takes no new rooms, as it will stop or "
                "change its role. Send the request to another decode."
            )
        room = DecodeRoom(
            name=name,
            opened_at=self._now,
            link=link,
            table=request.table,
            start=request.start,
            attempt=os.urandom(16).hex(),
            touched=self._now,
            expected=frozenset(request.expected),
            declined=request.declined,
            at_most=request.at_most,
            traceparent=request.traceparent,
        )
        self.rooms.open_room(room)
        if link.refusal is not None:
            self._fail(room, Failure("decode", link.refusal, "refused"))
        elif link.lost is not None:
            self._fail(room, Failure("prefill", link.lost, "lost"))
        elif link.plan is not None:
            self._ask(room)

    def _receive(self, rank: PrefillRank, received: Message) -> None:
        message = self.peers.receive(rank, received, self._now)
        if not isinstance(message, OfAsked):
            self._link_changed(message)
            return
        source, room = rank.source, self.rooms.current(message.room, message.attempt)
        if room is None or room.link is not rank.link or source not in room.offered:
            if isinstance(message, messages.ChunkReady):  # prefill still holds pages for it
                reason = "decode no longer asks for this room."
                self.peers.send(rank, message.answer(messages.Abort, reason=reason))
            return
        match message:
            case messages.ChunkReady():
                self._chunk_ready(room, source, message)
            case messages.Digests():
                failure = self._comparisons.answered(room, source, message, self._now)
                self._compared(room, failure)
            case messages.ReleaseAck():
                self._released(room, source, message.leased)
            case messages.Abort():
                aborted = Failure("prefill", message.reason, failure_kind(message.reason))
                self._fail(room, aborted, except_rank=source)

    def _link_changed(self, change: LinkChange | None) -> None:
        if isinstance(change, Link):
            for room in self.rooms.of_link(change):
                self._ask(room)
        elif change is not None:
            self._fail_link(change)

    def _fail_link(self, failed: LinkFailed) -> None:
        """Its rooms fail."""
        for room in self.rooms.of_link(failed.link):
            if not failed.asked or room.phase is not Phase.HANDSHAKE:
                self._fail(room, failed.failure, failed.except_rank)

    def _ask(self, room: DecodeRoom) -> None:
        room.ask(self._now)
        plan = room.link.plan
        if self.verify and plan is not None and plan.cast is not None:
            sources = plan.cast.plan.contributors()
            room.arrived = {source: ArrivedDigests() for source in sources}
        for rank, generation in room.asked_ranks():
            request = messages.ReadRequest(
                generation=generation,
                room=room.name,
                attempt=room.attempt,
                start=room.start,
                num_tokens=room.table.num_tokens,
                readers=room.link.asks[rank.source],
                timeout=self.rooms.offer_timeout,
                traceparent=room.traceparent,
            )
            self.peers.send(rank, request)

    def _chunk_ready(self, room: DecodeRoom, source: int, ready: messages.ChunkReady) -> None:
        try:
            table = room.note_chunk(source, ready)
        except ValueError as error:
            problem = f"{room.link.ranks[source]}: {error}"
            self._fail(room, Failure("decode", problem, "protocol"))
            return
        if table is None:
            return  # a duplicate, or layers of roles that decode lacks
        room.touched = self._now
        if room.phase is Phase.REQUESTED:
            room.metrics.wait_seconds = self._now - room.opened_at
        room.move(RoomEvent.CHUNK_READY)
        reads = room.new_reads(source, ready, table, self._now)
        self._effects.extend(events.StartRead(read) for read in reads)
        if not reads:
            self._advance(room)

    def _advance(self, room: DecodeRoom) -> None:
        """Verifies and releases once every rank has closed the room and every read has ended."""
        if room.reading or room.phase is not Phase.TRANSFERRING or not room.whole:
            return
        if missing := room.missing_aux():
            self._fail(room, Failure("decode", missing, "aux"))
            return
        room.move(RoomEvent.ALL_READ)
        if self.verify and room.link.plan is not None and not room.declined:
            self._comparisons.begin(room, room.link.plan, self._now)
        self._compared(room, None)

    def _compared(self, room: DecodeRoom, failure: Failure | None) -> None:
        if failure is not None:
            self._fail(room, failure)
        elif room.phase is Phase.VERIFYING and not room.checks:
            room.move(RoomEvent.DIGESTS_EQUAL)
            room.metrics.done_seconds = self._now - room.opened_at
            for rank, generation in room.asked_ranks():
                self.peers.send(rank, room.message(messages.ReadDone, generation))

    def _released(self, room: DecodeRoom, source: int, leased: bool) -> None:
        released = room.metrics.released
        if source in released:
            return  # the answer to a duplicate
        if not leased or room.phase is not Phase.RELEASING:
            reason = f"{room.link.ranks[source]} released its pages before they were read."
            self._fail(room, Failure("prefill", reason, "lease"))
            return
        room.touched = self._now
        released[source] = self._now - room.opened_at
        if len(released) == len(room.offered):
            room.move(RoomEvent.ALL_ACKED)
            self._end(room)

    def _fail(self, room: DecodeRoom, failure: Failure, except_rank: int | None = None) -> None:
        """Ends a room. The ranks that were asked, before that all, are told but `except_rank`;
        after a refusal of the link every rank knows.
        """
        asked = room.phase is not Phase.HANDSHAKE
        room.failure = failure
        room.move(RoomEvent.FAILED)
        self._end(room)
        if room.reading:
            # the reader never looks at a room: only the machine knows why one has ended
            self._effects.append(events.CancelReads(room.attempt))
        if not asked:
            drop = messages.DropRoom(room.name, failure.reason)
            self.peers.drop_room(room.link, drop, except_rank)
            return
        for rank, generation in room.asked_ranks() if room.link.refusal is None else ():
            if rank.source != except_rank:
                abort = room.message(messages.Abort, generation, reason=failure.reason)
                self.peers.send(rank, abort)

    def _end(self, room: DecodeRoom) -> None:
        self.rooms.end(room, self._now)
        room.metrics.total_seconds = self._now - room.opened_at
        self._record_end(room, room.metrics)
