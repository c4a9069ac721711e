"""Prefill's side of the hand-off as a state machine: events in, effects out.

A room's pages are leased from its first chunk until every reader is done, either side aborts, a
reader dies, or the lease runs out; a reader that is done later is told that they were not.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from msgspec.structs import replace

from disagg.errors import EndpointDraining, RoomError
from disagg.protocol import events, messages
from disagg.protocol.codec import encode, pack_aux
from disagg.protocol.machine import Machine
from disagg.protocol.messages import DigestRequest, Hello, Message, Room
from disagg.protocol.metrics import RoomMetrics
from disagg.protocol.peers.liveness import CHECKS_PER_TIMEOUT, Latest
from disagg.protocol.peers.prefill_peers import OfServed, PrefillPeers
from disagg.protocol.rooms.block_tables import BlockTables
from disagg.protocol.rooms.offered import layers_by_owner
from disagg.protocol.rooms.prefill_rooms import MAX_TOLD, FailureNotice, PrefillRoom, PrefillRooms
from disagg.protocol.status import DRAINING, Failure, Phase, RoomEvent, failure_kind
from disagg.protocol.verification import DigestAnswers
from kvpool.layout import PoolLayout
from kvpool.layout.types import MAX_NAME

MAX_REQUESTED = 1 << 14
"""Rooms that one decode may ask for at once."""
MAX_UNSENT = 1 << 16
"""Open rooms that a decode has asked for, without a chunk."""
KEPT_ATTEMPTS = 1000
"""Attempts of ended rooms, whose request may come once more: the latest."""
DRAINS = (
    f"{DRAINING}this prefill takes no new rooms, as it will stop or change its role. Send the "
    "request to another prefill."
)
LONGEST_ATTEMPT = "x" * MAX_NAME


class PrefillMachine(Machine[PrefillRoom]):
    """All rooms of one prefill endpoint. A peer that is silent for longer than the hello's timeout
    is dead. A lease ends `lease` seconds after the last chunk or request of a room (None: never).
    """

    side = "prefill"
    peers: PrefillPeers
    rooms: PrefillRooms

    def __init__(
        self, hello: Hello, layout: PoolLayout, lease: float | None = None, *, now: float
    ) -> None:
        super().__init__(hello, PrefillRooms(layers_by_owner(layout)), now)
        self._block_tables = BlockTables(layout)
        self.peers = PrefillPeers(hello, layout, self._effects, now)
        self._digests = DigestAnswers(layout, self._effects)
        self._ended_attempts: Latest[tuple[bytes, Room, str], None] = Latest(KEPT_ATTEMPTS)
        self._lease, self._next_check = math.inf if lease is None else lease, 0.0

    def handle(self, event: events.PrefillEvent, now: float) -> list[events.Effect]:
        """Raises RoomError, UnknownRoom or EndpointDraining, and changes nothing, for a call that
        does not fit.
        """
        self._now = now
        match event:
            case events.Received(bytes(peer), message, origin):
                self._receive(peer, message, origin)
            case events.Malformed(bytes(peer), reason):
                self._drop(peer, self.peers.refuse(peer, reason))
            case events.Unreachable(bytes(peer), reason):
                self._drop(peer, Failure("prefill", f"decode: {reason}", "lost"))
            case events.Tick():
                self._tick()
            case events.DigestComputed((bytes(peer), DigestRequest() as request), values, problem):
                self._digests.answer(peer, request, values or b"", problem)
            case events.OfferChunk():
                self._offer(event)
            case events.EngineRenewed(reason, metadata):
                self.peers.renew(metadata)
                self._disconnect_all(Failure("prefill", reason, "lost"))
            case events.RejectRoom(name):
                self.rooms.at(name, now)
                self._handle_common(event)
            case _:
                self._handle_common(event)
        return self._effects.drain()

    def computed(self, name: Room) -> int:
        """Positions of a room whose layers were all offered so far."""
        room = self.rooms.by_name.get(name)
        return room.offered.stop if room else 0

    def _offer(self, chunk: events.OfferChunk) -> None:
        name, tokens = chunk.room, chunk.tokens
        room = self.rooms.by_name.get(name)
        if room is None and self.draining:
            raise EndpointDraining(f"room {name!r}: {DRAINS}")
        room = room or self.rooms.new(name, self._now)
        if problem := room.chunk_problem(chunk):
            raise RoomError(f"room {name!r}: {problem}")
        self._block_tables.check(name, chunk.table, tokens, last=chunk.last)
        ready = messages.ChunkReady(
            generation=self.hello.generation,
            room=name,
            attempt=LONGEST_ATTEMPT,
            start=tokens.start,
            stop=tokens.stop,
            last=chunk.last,
            num_tokens=chunk.table.num_tokens,
            spans=messages.spans_of(chunk.table),
            aux=pack_aux(chunk.aux),
            layers=chunk.layers,
        )
        encode(ready)  # what cannot be sent is refused before anything is kept
        room = self.rooms.at(name, self._now)
        notice = self.rooms.forgotten.pop(name, None)
        if notice is not None and notice.refused and room.phase is Phase.HANDSHAKE:
            room.doubtful = True
        self.rooms.unsent.discard(name)
        room.offered.note_chunk(tokens, chunk.layers, chunk.last)
        room.chunks.append(ready)
        room.tables.append(chunk.table)
        room.move(RoomEvent.OFFERED)
        if room.failure is None:
            room.ends_at = self._now + self._lease_of(room)
            room.unpublished.append(chunk.after)
            self.rooms.unpublished.add(name)
            self._publish_ready_chunks(room)
        else:  # a caller that tracks rooms from `send` on has not heard of it
            self.ended.note_ended(name, room.failure)

    def _tick(self) -> None:
        """Publishes chunks that are computed by now; gives up silent peers, and ends leases."""
        for name in list(self.rooms.unpublished):
            self._publish_ready_chunks(self.rooms.by_name[name])
        if self._now < self._next_check:
            return
        pause = min(self.hello.timeout, self._lease)
        self._next_check = self._now + pause / CHECKS_PER_TIMEOUT
        reason = f"decode was silent for more than {self.hello.timeout:g} s."
        for peer in self.peers.liveness.dead(self._now):
            self._drop(peer, Failure("prefill", reason, "lost"))
        for room in list(self.rooms.open.values()):
            if self._now < room.ends_at:
                continue
            if room.chunks:
                earlier = "a decode was told of an earlier room of this name, and "
                doubt = earlier if room.doubtful else ""
                missing = "not every reader was done" if room.requests else "no decode asked for it"
                seconds = self._lease_of(room)
                reason = f"its lease ended: {doubt}{missing} within {seconds:g} s."
                self._fail(room, Failure("prefill", reason, "lease"))
            elif self._now > room.ends_at + self.hello.timeout:  # decode says so first
                reason = "no chunk of it was sent while the decodes that asked for it waited."
                self._fail(room, Failure("prefill", reason, "timeout"))

    def _receive(self, peer: bytes, message: Message, origin: str) -> None:
        match self.peers.receive(peer, message, self._now, origin):
            case messages.DropRoom() as drop:
                self._dropped(drop)
            case messages.ReadRequest() as request:
                self._requested(peer, request)
            case DigestRequest() as request:
                if problem := self._digests.asked(peer, request, self._room_of(peer, request)):
                    self._drop(peer, self.peers.refuse(peer, problem))
            case messages.ReadDone() as done:
                self._done(peer, done, self._room_of(peer, done))
            case messages.Abort() as abort:
                room = self._room_of(peer, abort)
                if room is not None and room.name in self.rooms.open:
                    kind = failure_kind(abort.reason)
                    self._fail(room, Failure("decode", abort.reason, kind), except_peer=peer)
            case Failure() as failure:
                self._drop(peer, failure)

    def _room_of(self, peer: bytes, message: OfServed) -> PrefillRoom | None:
        """The room, unless it was not asked for, or is an earlier one of that name."""
        room = self.rooms.by_name.get(message.room)
        request = room.requests.get(peer) if room else None
        return room if request is not None and request.attempt == message.attempt else None

    def _requested(self, peer: bytes, request: messages.ReadRequest) -> None:
        name, decode = request.room, self.peers.alive[peer]
        room = self.rooms.by_name.get(name)
        attempt = peer, name, request.attempt
        if attempt in self._ended_attempts or (room and room.requests.get(peer) == request):
            return  # a duplicate; today's pages must not vouch for those that were read then
        problem = self._reject_reason(peer, request)
        if problem is not None:
            self._ended_attempts[attempt] = None
            self._effects.send(peer, request.answer(messages.Abort, reason=problem))
            return
        room = self.rooms.at(name, self._now)
        room.requests[peer], room.doubtful = request, False
        room.traceparent = room.traceparent or request.traceparent
        if len(room.requests) == 1:
            room.asked_seconds = self._now - room.opened_at
        room.generations.append(decode.generation)
        decode.rooms.add(name)
        room.move(RoomEvent.ASKED)
        if room.chunks:  # they came before the request, and are offered to it now
            room.move(RoomEvent.OFFERED)
            room.ends_at = self._now + self._lease_of(room)
        else:
            room.ends_at = self._now + room.patience
        for chunk in room.chunks[: len(room.chunks) - len(room.unpublished)]:
            self._effects.send(peer, replace(chunk, attempt=request.attempt))
            self.rooms.read.add(name)

    def _dropped(self, drop: messages.DropRoom) -> None:
        """Ends a room that a decode will not ask for, unless all its readers have."""
        room = self.rooms.by_name.get(drop.room)
        asked_by_all = room is not None and 0 < room.readers == len(room.requests)
        if room is None or (drop.room in self.rooms.open and not asked_by_all):
            room = self.rooms.at(drop.room, self._now)
            self._fail(room, Failure("decode", drop.reason, failure_kind(drop.reason)))

    def _reject_reason(self, peer: bytes, request: messages.ReadRequest) -> str | None:
        room, decode = self.rooms.by_name.get(request.room), self.peers.alive[peer]
        if room is not None and room.notice is not None:
            return room.notice.tell(decode.generation, request.readers)
        forgotten = self.rooms.untold(request, decode.generation, self._now)
        if forgotten is not None:
            return forgotten
        if room is None and self.draining:
            return DRAINS
        if len(decode.rooms) >= MAX_REQUESTED:
            return f"a decode may ask for at most {MAX_REQUESTED} rooms at once."
        if room is not None:
            return room.reject_reason(peer, request)
        if len(self.rooms.unsent) >= MAX_UNSENT:
            return f"{MAX_UNSENT} rooms without a chunk are asked for already."
        return None

    def _done(self, peer: bytes, done: messages.ReadDone, room: PrefillRoom | None) -> None:
        leased = room is not None and room.failure is None and room.whole
        if room is not None and leased:
            room.done.add(peer)
            if room.readers == len(room.done) and done.room in self.rooms.open:
                room.move(RoomEvent.ALL_DONE)
                self._close(room)
        self._effects.send(peer, done.answer(messages.ReleaseAck, leased=leased))

    def _drop(self, peer: bytes, failure: Failure) -> None:
        """Serves a peer no more: the rooms fail that it has asked for and is not done with."""
        self.peers.counts.losses += failure.kind == "lost" and peer in self.peers.alive
        self._fail_unread(peer, self.peers.drop(peer), failure, except_peer=peer)

    def _disconnect_all(self, failure: Failure) -> None:
        """Lets every decode connect again: the rooms fail that it has asked for."""
        for peer, decode in list(self.peers.alive.items()):
            self._fail_unread(peer, [*decode.rooms], failure)
            self.peers.send_away(peer)
            self._drop(peer, failure)

    def _fail_unread(
        self,
        peer: bytes,
        names: Collection[Room],
        failure: Failure,
        except_peer: bytes | None = None,
    ) -> None:
        """Of rooms that a decode has asked for, those fail that it is not done with."""
        for name in names:
            room = self.rooms.open.get(name)
            if room and peer in room.requests and peer not in room.done:
                self._fail(room, failure, except_peer)

    def _fail(self, room: PrefillRoom, failure: Failure, except_peer: bytes | None = None) -> None:
        room.failure = failure
        room.move(RoomEvent.FAILED)
        told = {*room.generations[:MAX_TOLD]}
        room.notice = FailureNotice(reason=failure.reason, told=told, readers=room.readers)
        self._close(room)
        for peer, request in room.requests.items():
            if peer != except_peer:
                self._effects.send(peer, request.answer(messages.Abort, reason=failure.reason))

    def _close(self, room: PrefillRoom) -> None:
        self.rooms.end(room, self._now)
        metrics = RoomMetrics(
            chunks=len(room.chunks),
            asked_seconds=room.asked_seconds,
            done_seconds=room.done_seconds,
            total_seconds=self._now - room.opened_at,
        )
        self._record_end(room, metrics)
        for peer, request in room.requests.items():
            self._ended_attempts[peer, room.name, request.attempt] = None
            if peer in self.peers.alive:
                self.peers.alive[peer].rooms.discard(room.name)

    def _publish_ready_chunks(self, room: PrefillRoom) -> None:
        """Tells readers of the chunks that the device has computed."""
        while room.unpublished:
            event = room.unpublished[0]
            try:
                computed = event is None or event.query()
            except Exception as error:  # an error of a device's event is this room's alone
                self._fail(room, Failure("prefill", f"its device failed: {error}", "device"))
                return
            if not computed:
                break
            ready = room.chunks[-len(room.unpublished)]
            room.unpublished.pop(0)
            for peer, request in room.requests.items():
                self._effects.send(peer, replace(ready, attempt=request.attempt))
                self.rooms.read.add(room.name)
        if not room.unpublished:
            self.rooms.unpublished.discard(room.name)
        if room.whole:
            room.done_seconds = self._now - room.opened_at

    def _lease_of(self, room: PrefillRoom) -> float:
        """Seconds; those after which a silent peer is dead where none may ask any more."""
        return min(self._lease, self.hello.timeout) if room.doubtful else self._lease
