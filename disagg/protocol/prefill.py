"""Prefill's side of the hand-off as a state machine: events in, effects out.

A room's pages are leased from its first chunk until every reader is done, either side aborts, a
reader dies, or the lease runs out; a reader that is done later is told that they were not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec.structs import replace

from disagg.errors import RoomError
from disagg.plan.block_tables import BlockTables
from disagg.protocol import events, messages
from disagg.protocol.effects import Effect, Effects, RoomEnded
from disagg.protocol.liveness import CHECKS_PER_TIMEOUT, Leases
from disagg.protocol.messages import Hello, Message, Room
from disagg.protocol.metrics import RoomMetrics, Snapshot, Totals, log_failure
from disagg.protocol.prefill_peers import LostPeer, PrefillPeers
from disagg.protocol.rooms.ended import EndedAttempts
from disagg.protocol.rooms.offered import layers_by_owner
from disagg.protocol.rooms.prefill_room import Decode, PrefillRoom
from disagg.protocol.rooms.prefill_rooms import PrefillRooms
from disagg.protocol.status import Failure, KVPoll, Phase
from disagg.protocol.verification import DigestAnswers
from kvpool.layout import PoolLayout
from kvpool.layout.types import MAX_NAME

MAX_REQUESTED = 1 << 14
"""Rooms that one decode may ask for at once."""
MAX_UNSENT = 1 << 16
"""Open rooms that a decode has asked for and of which nothing was sent."""
LONGEST_ATTEMPT = "x" * MAX_NAME


class PrefillMachine:
    """All rooms of one prefill endpoint.

    A peer that is silent for longer than the hello's timeout is dead. A lease lasts `lease` seconds
    from the last chunk or request of a room, `None` for ever.
    """

    def __init__(
        self, hello: Hello, layout: PoolLayout, lease: float | None = None, *, now: float
    ) -> None:
        self.hello = hello
        self._block_tables = BlockTables(layout)
        self._effects = Effects()
        self.peers = PrefillPeers(hello, layout, self._effects, now)
        self._lease, self._now = lease, now
        self._rooms = PrefillRooms(layers_by_owner(layout))
        self._digests = DigestAnswers(layout, self._effects)
        self._ended_attempts = EndedAttempts()
        self._next_check = 0.0
        self.ended = self._rooms.ended
        self.totals = Totals()

    def handle(self, event: events.PrefillEvent, now: float) -> list[Effect]:
        """What is to be done now. Raises RoomError or UnknownRoom for a call that does not fit the
        room; then nothing has changed.
        """
        self._now = now
        match event:
            case events.Received(bytes(peer), message, origin):
                self._receive(peer, message, origin)
            case events.Malformed(bytes(peer), reason):
                self._lose(self.peers.refuse(peer, reason))
            case events.Unreachable(bytes(peer), reason):
                self._lose(self.peers.mark_dead(peer, f"decode: {reason}"))
            case events.Tick():
                self._tick()
            case events.DigestComputed(
                (bytes(peer), messages.DigestRequest() as request), values, problem
            ):
                self._digests.computed(peer, request, values, problem)
            case events.OfferChunk():
                self._offer(event)
            case events.AbortRoom(name, reason):
                room = self._rooms.known(name)
                if name in self._rooms.open:
                    self._fail(name, room, Failure("prefill", reason, "abort"))
            case events.RejectRoom(name, reason):
                room = self._rooms.at(name, now)
                if name in self._rooms.open:
                    self._fail(name, room, Failure("prefill", reason, "abort"))
            case events.ForgetRoom(name):
                if not self.poll(name).ended:
                    raise RoomError(f"room {name!r} has not ended. Abort it first.")
                self._rooms.forget(name, now)
            case events.AbortAll(reason, closing):
                for name in list(self._rooms.open):
                    self._fail(name, self._rooms.by_name[name], Failure("prefill", reason, "abort"))
                if closing:
                    self.peers.notify_shutdown()
            case _:
                raise TypeError(f"{event!r} is not prefill's.")
        return self._effects.drain()

    def computed(self, name: Room) -> int:
        """Positions of a room of which all layers were offered so far."""
        room = self._rooms.by_name.get(name)
        return room.computed if room else 0

    def poll(self, name: Room) -> KVPoll:
        """The room's state."""
        return self._rooms.known(name).phase.poll

    def failure(self, name: Room) -> Failure | None:
        """Why the room failed, if it did."""
        return self._rooms.known(name).failure

    def waits_for(self, name: Room) -> str:
        """What must happen next in an open room."""
        return self._rooms.known(name).waits_for

    def rooms(self) -> Mapping[Room, PrefillRoom]:
        """All rooms that are not forgotten."""
        return self._rooms.by_name

    def open_rooms(self) -> set[Room]:
        """Rooms that have not ended."""
        return self._rooms.open

    @property
    def computing(self) -> bool:
        """Whether a device computes what was sent."""
        return bool(self._rooms.unpublished)

    @property
    def read(self) -> bool:
        """Whether a decode may be reading a room."""
        return bool(self._rooms.read)

    def leases(self) -> Leases:
        """Items of open rooms."""
        return self._rooms.leases()

    def snapshot(self, engine: str, telemetry: Mapping[str, float]) -> Snapshot:
        """Numbers now, and since the machine was made."""
        alive = len(self.peers.alive)
        return Snapshot(
            self.totals.copy(), len(self._rooms.open), alive, self.leases(), engine, telemetry
        )

    def _offer(self, chunk: events.OfferChunk) -> None:
        name, address, tokens = chunk.room, chunk.address, chunk.tokens
        known = self._rooms.by_name.get(name) or self._rooms.new()
        if problem := known.chunk_problem(chunk):
            raise RoomError(f"room {name!r}: {problem}")
        try:
            self._block_tables.check(f"room {name!r}", address, tokens, last=chunk.last)
        except ValueError as error:
            raise RoomError(str(error)) from None
        rest = address.num_tokens, messages.spans_of(address), messages.pack_aux(chunk.aux)
        about = self.hello.generation, name, LONGEST_ATTEMPT, tokens.start, tokens.stop
        ready = messages.ChunkReady(*about, chunk.last, *rest, chunk.layers)
        messages.encode(ready)  # what cannot be sent is refused before anything is kept
        room = self._rooms.at(name, self._now)
        if self._rooms.forgotten.pop(name) and room.phase is Phase.HANDSHAKE:
            self._rooms.doubtful.add(name)
        self._rooms.unsent.discard(name)
        room.offered.take(tokens, chunk.layers, chunk.last)
        room.chunks.append(ready)
        room.addresses.append(address)
        if room.phase is Phase.REQUESTED:
            room.phase = room.phase.to(Phase.TRANSFERRING)
        if room.failure is None:
            room.ends_at = self._lease_end(name)
            room.unpublished.append(chunk.after)
            self._publish_ready_chunks(name, room)
        else:  # who tracks rooms from `send` on has not heard of it
            self.ended.add(name, room.failure)

    def _tick(self) -> None:
        """Publishes chunks that are computed by now; gives up silent peers, and ends leases."""
        for name in list(self._rooms.unpublished):
            self._publish_ready_chunks(name, self._rooms.by_name[name])
        if self._now < self._next_check:
            return
        pause = min(self.hello.timeout, self._lease or math.inf)
        self._next_check = self._now + pause / CHECKS_PER_TIMEOUT
        for lost in self.peers.find_dead(self._now):
            self._lose(lost)
        for name in list(self._rooms.open):
            room = self._rooms.by_name[name]
            if room.ends_at is None or self._now < room.ends_at:
                continue
            if room.chunks:
                doubt = (
                    "a decode was told of an earlier room of this name, and "
                    if name in self._rooms.doubtful
                    else ""
                )
                seconds = self._lease_of(name)
                reason = f"its lease ended: {doubt}{room.missing} within {seconds:g} s."
                self._fail(name, room, Failure("prefill", reason, "lease"))
            elif self._now > room.ends_at + self.hello.timeout:  # decode says so first
                reason = "no chunk of it was sent while the decodes that asked for it waited."
                self._fail(name, room, Failure("prefill", reason, "timeout"))

    def _receive(self, peer: bytes, message: Message, origin: str) -> None:
        received = self.peers.receive(peer, message, self._now, origin)
        if received is None or isinstance(received, LostPeer):
            self._lose(received)
            return
        if isinstance(received, messages.DropRoom):
            self._dropped(received)
            return
        decode, about = received
        if isinstance(about, messages.ReadRequest):
            self._requested(peer, about, decode)
            return
        room = self._rooms.by_name.get(about.room)
        request = room.requests.get(peer) if room else None
        mine = room if request is not None and request.attempt == about.attempt else None
        if isinstance(about, messages.ReadDone):
            self._done(peer, about, mine)
        elif isinstance(about, messages.DigestRequest):
            if problem := self._digests.asked(peer, about, mine):
                self._lose(self.peers.refuse(peer, problem))
        elif mine is not None and about.room in self._rooms.open:
            failure = Failure("decode", about.reason, "abort")
            self._fail(about.room, mine, failure, except_peer=peer)

    def _requested(self, peer: bytes, request: messages.ReadRequest, decode: Decode) -> None:
        known = self._rooms.by_name.get(request.room)
        again = self._ended_attempts.has(peer, request)
        if again or (known and known.requests.get(peer) == request):
            return  # a duplicate; today's pages must not vouch for those that were read then
        problem = self._reject_reason(peer, request, decode)
        if problem is not None:
            self._ended_attempts.add(peer, request)
            about = request.generation, request.room, request.attempt
            self._effects.send(peer, messages.Abort(*about, problem))
            return
        room = self._rooms.at(request.room, self._now)
        room.ask(peer, request, decode.generation)
        self._rooms.doubtful.discard(request.room)
        decode.rooms.add(request.room)
        if room.phase is Phase.HANDSHAKE:
            room.phase = room.phase.to(Phase.TRANSFERRING if room.chunks else Phase.REQUESTED)
        room.ends_at = self._lease_end(request.room) if room.chunks else room.asked_until(self._now)
        for chunk in room.chunks[: room.published]:
            self._effects.send(peer, replace(chunk, attempt=request.attempt))
            self._rooms.read.add(request.room)

    def _dropped(self, drop: messages.DropRoom) -> None:
        """Ends a room that a decode will not ask for, unless all its readers have."""
        known = self._rooms.by_name.get(drop.room)
        if known is None or (drop.room in self._rooms.open and not known.full):
            failure = Failure("decode", drop.reason, "abort")
            self._fail(drop.room, self._rooms.at(drop.room, self._now), failure)

    def _reject_reason(
        self, peer: bytes, request: messages.ReadRequest, decode: Decode
    ) -> str | None:
        """Why a decode may not read a room."""
        room = self._rooms.by_name.get(request.room)
        if room is not None and room.failure is not None:
            room.told = room.told.also([decode.generation], request.readers)
            return room.failure.reason
        forgotten = self._rooms.forgotten.untold(request, decode.generation, self._now)
        if forgotten is not None:
            return forgotten
        if len(decode.rooms) >= MAX_REQUESTED:
            return f"a decode may ask for at most {MAX_REQUESTED} rooms at once."
        if room is not None:
            return room.reject_reason(peer, request)
        if len(self._rooms.unsent) >= MAX_UNSENT:
            return f"{MAX_UNSENT} rooms are asked for of which nothing is computed."
        return None

    def _done(self, peer: bytes, done: messages.ReadDone, room: PrefillRoom | None) -> None:
        leased = room is not None and room.failure is None and room.whole
        if room is not None and leased:
            room.done.add(peer)
            if room.complete and done.room in self._rooms.open:
                room.phase = room.phase.to(Phase.SUCCESS)
                self._close(done.room, room)
        self._effects.send(
            peer, messages.ReleaseAck(done.generation, done.room, done.attempt, leased)
        )

    def _lose(self, lost: LostPeer | None) -> None:
        """The rooms fail that a lost peer has asked for and is not done with."""
        if lost is None:
            return
        for name in list(lost.rooms):
            room = self._rooms.by_name.get(name)
            reads = room and lost.peer in room.requests and lost.peer not in room.done
            if room and reads and name in self._rooms.open:
                self._fail(name, room, lost.failure, except_peer=lost.peer)

    def _fail(
        self, name: Room, room: PrefillRoom, failure: Failure, except_peer: bytes | None = None
    ) -> None:
        room.failure = failure
        room.phase = room.phase.to(Phase.FAILED)
        room.told = room.told.also(room.generations, room.readers)
        self._close(name, room)
        for peer, request in room.requests.items():
            if peer != except_peer:
                abort = messages.Abort(self.hello.generation, name, request.attempt, failure.reason)
                self._effects.send(peer, abort)

    def _close(self, name: Room, room: PrefillRoom) -> None:
        self._rooms.end(name, room, self._now)
        self._effects.append(RoomEnded(name))
        seconds = self._now - room.opened_at
        self.totals.add(RoomMetrics(chunks=len(room.chunks), total_seconds=seconds), room.failure)
        if room.failure is not None:
            facts = {"generation": self.hello.generation, "seconds": round(seconds, 6)}
            log_failure(room.failure, room=name, **room.facts(), **facts)
        for peer, request in room.requests.items():
            self._ended_attempts.add(peer, request)
            if peer in self.peers.alive:
                self.peers.alive[peer].rooms.discard(name)

    def _publish_ready_chunks(self, name: Room, room: PrefillRoom) -> None:
        """Tells readers of the chunks that the device has computed."""
        while room.unpublished:
            event = room.unpublished[0]
            try:
                computed = event is None or event.query()
            except Exception as error:  # whatever a device's event raises is this room's alone
                self._fail(name, room, Failure("prefill", f"its device failed: {error}", "device"))
                return
            if not computed:
                break
            ready = room.chunks[room.published]
            room.unpublished.pop(0)
            for peer, request in room.requests.items():
                self._effects.send(peer, replace(ready, attempt=request.attempt))
                self._rooms.read.add(name)
        waiting = self._rooms.unpublished
        (waiting.add if room.unpublished else waiting.discard)(name)

    def _lease_end(self, name: Room) -> float | None:
        lease = self._lease_of(name)
        return None if lease is math.inf else self._now + lease

    def _lease_of(self, name: Room) -> float:
        """Seconds; those after which a silent peer is dead where none may ask any more."""
        lease = math.inf if self._lease is None else self._lease
        return min(lease, self.hello.timeout) if name in self._rooms.doubtful else lease
