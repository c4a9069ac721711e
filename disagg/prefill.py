"""Prefill's side of the hand-off as a state machine: messages and calls in, messages out, no
sockets.

A room's pages are leased from the first `send` until every reader is done, or until either side
aborts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from msgspec.structs import replace

from disagg.room import Failure, KVPoll
from disagg.wire import (
    Abort,
    Aux,
    Done,
    Hello,
    Message,
    Ready,
    Refuse,
    Released,
    Room,
    Want,
    encode,
    greeting_problems,
    pack_aux,
    reason_text,
    spans_of,
)
from kvpool.layout import RequestAddress

Peer = bytes
KEPT_REFUSALS = 100


@dataclass(slots=True)
class PrefillRoom:
    """One request: what was computed, who wants it, who is done with it."""

    chunks: list[Ready] = field(default_factory=list)
    wants: dict[Peer, Want] = field(default_factory=dict)
    done: set[Peer] = field(default_factory=set)
    failure: Failure | None = None

    @property
    def computed(self) -> int:
        """Positions offered so far."""
        return self.chunks[-1].stop if self.chunks else 0

    @property
    def closed(self) -> bool:
        """Whether the last chunk was sent."""
        return bool(self.chunks) and self.chunks[-1].last

    @property
    def complete(self) -> bool:
        """Whether every reader is done."""
        readers = next(iter(self.wants.values())).readers if self.wants else 0
        return self.closed and 0 < readers == len(self.done)


class PrefillRooms:
    """All rooms of one prefill endpoint. Calls append to `outbox`; a driver sends what is in it."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.outbox: list[tuple[Peer, bytes]] = []
        self.refusals: deque[str] = deque(maxlen=KEPT_REFUSALS)
        self._peers: set[Peer] = set()
        self._rooms: dict[Room, PrefillRoom] = {}
        self._open: set[Room] = set()

    def send(
        self, name: Room, address: RequestAddress, tokens: range, last: bool, aux: Aux
    ) -> None:
        """Offers positions `tokens`; raises ValueError where they do not follow the last chunk.

        Chunks of a room that has failed go nowhere.
        """
        room = self._rooms.get(name, PrefillRoom())
        if room.closed:
            raise ValueError(f"room {name!r}: its last chunk was sent already.")
        if tokens.step != 1 or tokens.start != room.computed or tokens.stop < tokens.start:
            raise ValueError(
                f"room {name!r}: positions up to {room.computed} were sent, "
                f"the next chunk starts there, got {tokens}."
            )
        end = address.num_tokens
        if tokens.stop > end or (last and tokens.stop != end):
            raise ValueError(
                f"room {name!r}: the address holds {end} tokens, got {tokens} with last={last}."
            )
        if aux and not last:
            raise ValueError(f"room {name!r}: aux values travel with the last chunk.")
        ready = Ready(
            self.hello.generation,
            name,
            "",
            tokens.start,
            tokens.stop,
            last,
            end,
            spans_of(address),
            pack_aux(aux),
        )
        encode(ready)  # what cannot travel is refused before anything is kept
        room = self._room(name)
        room.chunks.append(ready)
        if room.failure is None:
            for peer, want in room.wants.items():
                self._post(peer, replace(ready, attempt=want.attempt))

    def computed(self, name: Room) -> int:
        """Positions of a room that were offered so far."""
        room = self._rooms.get(name)
        return room.computed if room else 0

    def abort(self, name: Room, reason: str) -> None:
        """Ends a room that has not ended; its pages are free at once."""
        room = self._room(name)
        if name in self._open:
            self._fail(name, room, Failure("prefill", reason))

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

    def receive(self, peer: Peer, message: Message) -> None:
        """Takes one message of a peer."""
        if isinstance(message, Hello):
            self._greet(peer, message)
        elif isinstance(message, Refuse):
            self.refusals.append("\n".join(message.reasons))
            self._drop(peer, Failure("decode", "\n".join(message.reasons)))
        elif not isinstance(message, (Want, Done, Abort)):
            self._post(peer, Refuse([f"{type(message).__name__} is not prefill's."]))
        elif peer not in self._peers or message.generation != self.hello.generation:
            reason = f"unknown generation {message.generation!r}: say hello again."
            self._post(peer, Abort(message.generation, message.room, message.attempt, reason))
        elif isinstance(message, Want):
            self._want(peer, message)
        else:
            room = self._rooms.get(message.room)
            want = room.wants.get(peer) if room else None
            mine = want is not None and want.attempt == message.attempt
            if isinstance(message, Done):
                self._done(peer, message, room if mine else None)
            elif room is not None and mine and message.room in self._open:
                self._fail(message.room, room, Failure("decode", message.reason), but=peer)

    def _greet(self, peer: Peer, hello: Hello) -> None:
        reasons = greeting_problems(self.hello, hello)
        if reasons:
            self._post(peer, Refuse(reasons))
            return
        self._peers.add(peer)
        self._post(peer, self.hello)

    def _want(self, peer: Peer, want: Want) -> None:
        room = self._room(want.room)
        problem = None
        if room.failure is not None:
            problem = room.failure.reason
        elif peer in room.wants:
            problem = "wanted twice by one reader."
        elif any(known.readers != want.readers for known in room.wants.values()):
            problem = f"its readers disagree on how many they are ({want.readers})."
        elif len(room.wants) == want.readers:
            problem = f"{want.readers} readers want it already."
        if problem is not None:
            self._post(peer, Abort(want.generation, want.room, want.attempt, reason_text(problem)))
            return
        room.wants[peer] = want
        for chunk in room.chunks:
            self._post(peer, replace(chunk, attempt=want.attempt))

    def _done(self, peer: Peer, done: Done, room: PrefillRoom | None) -> None:
        leased = False
        if room is not None and room.failure is None and room.closed:
            leased = True
            room.done.add(peer)
            if room.complete:
                self._open.discard(done.room)
        self._post(peer, Released(done.generation, done.room, done.attempt, leased))

    def lost(self, peer: Peer, reason: str) -> None:
        """A peer cannot be reached any more: the rooms that it wanted fail."""
        if peer in self._peers:
            self._drop(peer, Failure("prefill", reason))

    def _drop(self, peer: Peer, failure: Failure) -> None:
        self._peers.discard(peer)
        for name in list(self._open):
            if peer in self._rooms[name].wants:
                self._fail(name, self._rooms[name], failure, but=peer)

    def _fail(
        self, name: Room, room: PrefillRoom, failure: Failure, but: Peer | None = None
    ) -> None:
        room.failure = failure
        self._open.discard(name)
        reason = reason_text(failure.reason)
        for peer, want in room.wants.items():
            if peer != but:
                self._post(peer, Abort(self.hello.generation, name, want.attempt, reason))

    def _room(self, name: Room) -> PrefillRoom:
        """The room of that name, opened if there is none."""
        if name not in self._rooms:
            self._rooms[name] = PrefillRoom()
            self._open.add(name)
        return self._rooms[name]

    def _post(self, peer: Peer, message: Message) -> None:
        """Encodes at once, so that a message that cannot travel is its sender's error."""
        self.outbox.append((peer, encode(message)))
