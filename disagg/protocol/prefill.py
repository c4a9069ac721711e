"""Prefill's side of the hand-off as a state machine: messages, calls and time in, messages and
digests to be made out; no sockets.

A room's pages are leased from the first `send` until every reader is done, either side aborts, a
reader dies, or the lease runs out; what comes after that is answered with no.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from disagg.protocol.liveness import LOOKS, Leases, items
from disagg.protocol.messages import (
    Abort,
    Aux,
    ChunkReady,
    DigestRequest,
    Digests,
    Hello,
    Message,
    ReadDone,
    ReadRequest,
    ReleaseAck,
    Room,
    encode,
    pack_aux,
    reason_text,
    spans_of,
)
from disagg.protocol.metrics import RoomMetrics, Totals, log_failure
from disagg.protocol.prefill_peers import Decodes
from disagg.protocol.prefill_state import Decode, Peer, PrefillRoom
from disagg.protocol.status import Failure, KVPoll
from kvpool.layout import RequestAddress

if TYPE_CHECKING:
    from kvpool.device import Event

MAX_WANTED = 1 << 14
"""Rooms that one peer may want at once."""
MAX_UNSENT = 1 << 16
"""Open rooms of which nothing was sent yet."""
MAX_FAILED_UNSENT = 10_000
"""Rooms that were wanted and have failed before anything was sent: the latest are kept."""
KEPT_ATTEMPTS = 1000
"""Attempts of rooms that have ended: the latest are kept."""


class PrefillRooms:
    """All rooms of one prefill endpoint. Calls append to `outbox` and `checks`; a driver sends what
    is in the one, and answers the other with `checked`.

    A peer that is silent for longer than the hello's time-out is dead. A lease lasts `lease`
    seconds from the last chunk or want of a room, `None` for ever.
    """

    def __init__(
        self,
        hello: Hello,
        lease: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hello = hello
        self.outbox: list[tuple[Peer, bytes]] = []
        self.checks: list[tuple[Peer, DigestRequest, RequestAddress]] = []
        self.decodes = Decodes(hello, self._post, self._gone, clock)
        self._lease, self._clock = lease, clock
        self._rooms: dict[Room, PrefillRoom] = {}
        self._open: set[Room] = set()
        self._unsent: set[Room] = set()
        self._strays: deque[tuple[Room, PrefillRoom]] = deque()
        self._unshown: set[Room] = set()
        self._spent: OrderedDict[tuple[Peer, str], None] = OrderedDict()
        self._next_look = 0.0
        self.totals = Totals()

    def send(
        self,
        name: Room,
        address: RequestAddress,
        tokens: range,
        last: bool,
        aux: Aux,
        after: Event | None = None,
    ) -> None:
        """Offers positions `tokens`, once the work before `after` has ended; raises ValueError
        where they do not follow the last chunk.

        Chunks of a room that has failed go nowhere.
        """
        problem = self._rooms.get(name, PrefillRoom()).misfit(address, tokens, last)
        if aux and not last:
            problem = "aux values travel with the last chunk."
        if problem is not None:
            raise ValueError(f"room {name!r}: {problem}")
        ready = ChunkReady(
            self.hello.generation,
            name,
            "",
            tokens.start,
            tokens.stop,
            last,
            address.num_tokens,
            spans_of(address),
            pack_aux(aux),
        )
        encode(ready)  # what cannot travel is refused before anything is kept
        room = self._room(name)
        self._unsent.discard(name)
        room.chunks.append(ready)
        room.addresses.append(address)
        if room.failure is None:
            self._renew(room)
            room.events.append(after)
            self._show(name, room)

    def computed(self, name: Room) -> int:
        """Positions of a room that were offered so far."""
        room = self._rooms.get(name)
        return room.computed if room else 0

    def abort(self, name: Room, reason: str) -> None:
        """Ends a room that has not ended; its pages are free at once."""
        room = self._room(name)
        if name in self._open:
            self._fail(name, room, Failure("prefill", reason, "abort"))

    def poll(self, name: Room) -> KVPoll:
        """The room's state."""
        room = self._rooms.get(name)
        if room is None:
            return KVPoll.Bootstrapping
        if room.failure is not None:
            return KVPoll.Failed
        if room.complete:
            return KVPoll.Success
        if not room.wants:
            return KVPoll.Bootstrapping
        return KVPoll.Transferring if room.chunks else KVPoll.WaitingForInput

    def failure(self, name: Room) -> Failure | None:
        """Why the room failed, if it did."""
        room = self._rooms.get(name)
        return room.failure if room else None

    def forget(self, name: Room) -> None:
        """Drops a room that has ended."""
        if not self.poll(name).ended:
            raise ValueError(f"room {name!r} has not ended. Abort it first.")
        del self._rooms[name]

    def open_rooms(self) -> set[Room]:
        """Rooms that have not ended."""
        return self._open

    def leases(self) -> Leases:
        """Items of open rooms."""
        rooms = (self._rooms[name] for name in self._open)
        return Leases(items(room.addresses[-1] for room in rooms if room.addresses))

    def tick(self) -> None:
        """Shows chunks that are there now; gives up peers that have been silent too long, and
        leases that have run out.
        """
        for name in list(self._unshown):
            self._show(name, self._rooms[name])
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + min(self.hello.timeout, self._lease or math.inf) / LOOKS
        self.decodes.look(now)
        over = [
            (name, room)
            for name in self._open
            if (room := self._rooms[name]).leased_until is not None and room.leased_until < now
        ]
        for name, room in over:
            missing = "nobody wanted it" if not room.wants else "not every reader was done"
            reason = f"its lease ran out: {missing} {self._lease:g} s after the last chunk or want."
            self._fail(name, room, Failure("prefill", reason, "lease"))

    def receive(self, peer: Peer, message: Message) -> None:
        """Takes one message of a peer."""
        served = self.decodes.receive(peer, message)
        if served is None:
            return
        decode, told = served
        if isinstance(told, ReadRequest):
            self._want(peer, told, decode)
        else:
            room = self._rooms.get(told.room)
            want = room.wants.get(peer) if room else None
            mine = room if want is not None and want.attempt == told.attempt else None
            if isinstance(told, ReadDone):
                self._done(peer, told, mine)
            elif isinstance(told, DigestRequest):
                self._check(peer, told, mine)
            elif mine is not None and told.room in self._open:
                failure = Failure("decode", reason_text(told.reason), "abort")
                self._fail(told.room, mine, failure, but=peer)

    def checked(self, peer: Peer, check: DigestRequest, values: bytes, problem: str = "") -> None:
        """Answers a check."""
        room = self._rooms.get(check.room)
        if room is not None:
            room.checking.discard(peer)
        answer = Digests(
            check.generation, check.room, check.attempt, check.each, values, reason_text(problem)
        )
        self._post(peer, answer)

    def _want(self, peer: Peer, want: ReadRequest, decode: Decode) -> None:
        known = self._rooms.get(want.room)
        problem = None
        if (peer, want.attempt) in self._spent or (known and known.wants.get(peer) == want):
            return  # a duplicate; pages of now must not vouch for those that were read then
        if len(decode.rooms) >= MAX_WANTED:
            problem = f"one decode may want {MAX_WANTED} rooms at once."
        elif known is None and len(self._unsent) >= MAX_UNSENT:
            problem = f"{MAX_UNSENT} rooms are wanted already that nobody has computed."
        elif known is not None:
            problem = known.unwanted(peer, want)
        if problem is not None:
            self._post(peer, Abort(want.generation, want.room, want.attempt, reason_text(problem)))
            return
        room = self._room(want.room)
        room.wants[peer] = want
        room.lives.append(decode.generation)
        decode.rooms.add(want.room)
        if room.chunks:
            self._renew(room)
        for chunk in room.chunks[: room.shown]:
            self._post(peer, replace(chunk, attempt=want.attempt))

    def _check(self, peer: Peer, check: DigestRequest, room: PrefillRoom | None) -> None:
        if room is None or room.failure is not None or not room.whole or peer in room.done:
            self.checked(peer, check, b"", "the room's pages are not leased.")
        elif peer not in room.checking:  # else a duplicate
            room.checking.add(peer)
            self.checks.append((peer, check, room.addresses[-1]))

    def _done(self, peer: Peer, done: ReadDone, room: PrefillRoom | None) -> None:
        leased = False
        if room is not None and room.failure is None and room.whole:
            leased = True
            room.done.add(peer)
            if room.complete and done.room in self._open:
                self._close(done.room, room)
        self._post(peer, ReleaseAck(done.generation, done.room, done.attempt, leased))

    def _gone(self, peer: Peer, names: set[Room], failure: Failure) -> None:
        """The rooms that a peer wanted and has not done with fail."""
        for name in list(names):
            room = self._rooms.get(name)
            if room is not None and name in self._open and peer in room.wants.keys() - room.done:
                self._fail(name, room, failure, but=peer)

    def _fail(
        self, name: Room, room: PrefillRoom, failure: Failure, but: Peer | None = None
    ) -> None:
        room.failure = failure
        self._close(name, room)
        reason = reason_text(failure.reason)
        for peer, want in room.wants.items():
            if peer != but:
                self._post(peer, Abort(self.hello.generation, name, want.attempt, reason))
        if not room.chunks:
            self._strays.append((name, room))
            if len(self._strays) > MAX_FAILED_UNSENT:
                name, room = self._strays.popleft()
                if self._rooms.get(name) is room and not room.chunks:
                    del self._rooms[name]

    def _close(self, name: Room, room: PrefillRoom) -> None:
        self._open.discard(name)
        self._unsent.discard(name)
        self._unshown.discard(name)
        seconds = self._clock() - room.opened_at
        self.totals.add(RoomMetrics(chunks=len(room.chunks), total_seconds=seconds), room.failure)
        if room.failure is not None:
            log_failure(
                room.failure,
                room=name,
                peer=", ".join(room.lives),
                generation=self.hello.generation,
                start=min((want.start for want in room.wants.values()), default=0),
                tokens=room.computed,
                bytes_moved=0,
                seconds=seconds,
            )
        for peer, want in room.wants.items():
            self._spent[peer, want.attempt] = None
            if len(self._spent) > KEPT_ATTEMPTS:
                self._spent.popitem(last=False)
            if peer in self.decodes.alive:
                self.decodes.alive[peer].rooms.discard(name)

    def _show(self, name: Room, room: PrefillRoom) -> None:
        """Tells readers of the chunks that are there."""
        try:
            while room.events and (room.events[0] is None or room.events[0].query()):
                ready = room.chunks[room.shown]
                room.events.pop(0)
                for peer, want in room.wants.items():
                    self._post(peer, replace(ready, attempt=want.attempt))
        except RuntimeError as error:  # as torch says that the device's work has failed
            self._fail(name, room, Failure("prefill", f"its device failed: {error}", "device"))
        else:
            (self._unshown.add if room.events else self._unshown.discard)(name)

    def _renew(self, room: PrefillRoom) -> None:
        if self._lease is not None:
            room.leased_until = self._clock() + self._lease

    def _room(self, name: Room) -> PrefillRoom:
        """The room of that name, opened if there is none."""
        if name not in self._rooms:
            self._rooms[name] = PrefillRoom(opened_at=self._clock())
            self._open.add(name)
            self._unsent.add(name)
        return self._rooms[name]

    def _post(self, peer: Peer, message: Message) -> None:
        """Encodes at once, so that a message that cannot travel is its sender's error."""
        self.outbox.append((peer, encode(message)))
