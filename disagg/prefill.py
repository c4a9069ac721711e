"""Prefill's side of the hand-off as a state machine: messages and calls in, messages out, no
sockets.

A room's pages are leased from the first `send` until every reader is done, or until either side
aborts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from disagg.room import Failure, KVPoll
from disagg.wire import (
    PROTOCOL,
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
    pack_aux,
    spans_of,
)
from kvpool.layout import RequestAddress

Peer = bytes


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
        self.outbox: list[tuple[Peer, Message]] = []
        self.peers: dict[Peer, Hello] = {}
        self.refused: dict[Peer, list[str]] = {}
        self._rooms: dict[Room, PrefillRoom] = {}

    def send(
        self, name: Room, address: RequestAddress, tokens: range, last: bool, aux: Aux
    ) -> None:
        """Offers positions `tokens`; raises ValueError where they do not follow the last chunk."""
        room = self._rooms.get(name) or PrefillRoom()
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
            tokens.start,
            tokens.stop,
            last,
            end,
            spans_of(address),
            pack_aux(aux),
        )
        self._rooms[name] = room
        room.chunks.append(ready)
        if room.failure is None:
            self.outbox.extend((peer, ready) for peer in room.wants)

    def computed(self, name: Room) -> int:
        """Positions of a room that were offered so far."""
        room = self._rooms.get(name)
        return room.computed if room else 0

    def abort(self, name: Room, reason: str) -> None:
        """Ends a room that has not ended; its pages are free at once."""
        room = self._rooms.setdefault(name, PrefillRoom())
        if room.failure is None and not room.complete:
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
        if self.poll(name) not in (KVPoll.Success, KVPoll.Failed):
            raise ValueError(f"room {name!r} has not ended. Abort it first.")
        self._rooms.pop(name, None)

    def open_rooms(self) -> list[Room]:
        """Rooms that have not ended."""
        ended = (KVPoll.Success, KVPoll.Failed)
        return [name for name in self._rooms if self.poll(name) not in ended]

    def receive(self, peer: Peer, message: Message) -> None:
        """Takes one message of a peer."""
        if isinstance(message, Hello):
            self._greet(peer, message)
        elif isinstance(message, Refuse):
            self.refused[peer] = message.reasons
            self._drop(peer, Failure("decode", "\n".join(message.reasons)))
        elif not isinstance(message, (Want, Done, Abort)):
            self.outbox.append((peer, Refuse([f"{type(message).__name__} is not prefill's."])))
        elif peer not in self.peers or message.generation != self.hello.generation:
            reason = f"unknown generation {message.generation!r}: say hello again."
            self.outbox.append((peer, Abort(message.generation, message.room, reason)))
        elif isinstance(message, Want):
            self._want(peer, message)
        elif isinstance(message, Done):
            self._done(peer, message)
        else:
            room = self._rooms.get(message.room)
            if room and peer in room.wants and room.failure is None and not room.complete:
                self._fail(message.room, room, Failure("decode", message.reason), but=peer)

    def _greet(self, peer: Peer, hello: Hello) -> None:
        reasons = greeting_problems(self.hello, hello)
        if reasons:
            self.outbox.append((peer, Refuse(reasons)))
            return
        self.peers[peer] = hello
        self.outbox.append((peer, self.hello))

    def _want(self, peer: Peer, want: Want) -> None:
        room = self._rooms.setdefault(want.room, PrefillRoom())
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
            self.outbox.append((peer, Abort(want.generation, want.room, problem)))
            return
        room.wants[peer] = want
        self.outbox.extend((peer, chunk) for chunk in room.chunks)

    def _done(self, peer: Peer, done: Done) -> None:
        room = self._rooms.get(done.room)
        leased = room is not None and room.failure is None and room.closed and peer in room.wants
        if leased and room is not None:
            room.done.add(peer)
        self.outbox.append((peer, Released(done.generation, done.room, leased)))

    def _drop(self, peer: Peer, failure: Failure) -> None:
        self.peers.pop(peer, None)
        for name, room in self._rooms.items():
            if peer in room.wants and room.failure is None and not room.complete:
                self._fail(name, room, failure, but=peer)

    def _fail(
        self, name: Room, room: PrefillRoom, failure: Failure, but: Peer | None = None
    ) -> None:
        room.failure = failure
        abort = Abort(self.hello.generation, name, failure.reason)
        self.outbox.extend((peer, abort) for peer in room.wants if peer != but)


def greeting_problems(own: Hello, other: Hello) -> list[str]:
    """Why two endpoints cannot talk, whatever their layouts."""
    pairs: Mapping[str, tuple[object, object]] = {
        "protocol": (own.protocol, other.protocol),
        "engine": (own.engine, other.engine),
    }
    problems = [
        f"{what} {ours!r} here, {theirs!r} there. Use the same on both sides."
        for what, (ours, theirs) in pairs.items()
        if ours != theirs
    ]
    if own.protocol != PROTOCOL:
        problems.append(f"protocol {own.protocol}: this version speaks {PROTOCOL}.")
    return problems
