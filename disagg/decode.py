"""Decode's side of the hand-off as a state machine: messages, calls and ended reads in, messages
and reads out; no sockets, no engine.

A room succeeds when every position that it lacks was read from every rank that contributes, and
every rank has answered that its pages stayed leased until then.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from disagg.decode_room import DecodeRoom, Link, Read
from disagg.plan import IncompatibleLayouts, plan
from disagg.room import Failure, KVPoll
from disagg.wire import (
    MAX_TEXT,
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
    unpack_aux,
)
from kvpool.layout import PoolLayout, RequestAddress


class DecodeRooms:
    """All rooms of one decode endpoint. Calls append to `outbox` and `reads`; a driver acts on
    them.
    """

    def __init__(self, hello: Hello, layout: PoolLayout, readers: int) -> None:
        self.hello, self.layout, self.readers = hello, layout, readers
        self.outbox: list[tuple[int, bytes]] = []
        self.reads: list[Read] = []
        self.links: list[Link] = []
        self._rooms: dict[Room, DecodeRoom] = {}
        self._open: set[Room] = set()

    def connect(self, addresses: Sequence[str]) -> Link:
        """Says hello to all ranks of one prefill."""
        first = sum(len(link.addresses) for link in self.links)
        link = Link(tuple(addresses), first, [None] * len(addresses))
        self.links.append(link)
        for rank in range(len(addresses)):
            self._post(first + rank, self.hello)
        return link

    def want(self, name: Room, address: RequestAddress, start: int, link: Link) -> None:
        """Asks for positions `start` to the end of `address`."""
        if name in self._rooms:
            raise ValueError(f"room {name!r} is wanted already. Forget it first.")
        if link not in self.links:
            raise ValueError(f"room {name!r}: the link is another endpoint's.")
        if not 0 <= start <= address.num_tokens:
            raise ValueError(f"room {name!r}: start {start} of {address.num_tokens} tokens.")
        room = self._rooms[name] = DecodeRoom(link, address, start, uuid.uuid4().hex)
        self._open.add(name)
        room.offered = [0] * len(link.addresses)
        room.closed = [False] * len(link.addresses)
        if link.refusal is not None:
            self._fail(name, room, Failure("decode", link.refusal))
        elif link.plan is not None:
            self._ask(name, room)

    def abort(self, name: Room, reason: str) -> None:
        """Ends a room that has not ended. Its pages stay leased while `reading(name)`."""
        room = self._known(name)
        if name in self._open:
            self._fail(name, room, Failure("decode", reason))

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

    def receive(self, rank: int, message: Message) -> None:
        """Takes one message of rank number `rank` (over all links)."""
        link = next(link for link in reversed(self.links) if link.first <= rank)
        source = rank - link.first
        if isinstance(message, Hello):
            self._greet(link, source, message)
        elif isinstance(message, Refuse):
            self._refuse(link, message.reasons, but=source)
        elif isinstance(message, (Ready, Released, Abort)):
            room = self._rooms.get(message.room)
            hello = link.hellos[source]
            if hello is None or hello.generation != message.generation:
                return  # of an earlier life: nothing here waits for it
            if room is None or message.room not in self._open or room.attempt != message.attempt:
                if isinstance(message, Ready):  # prefill still holds pages for us
                    reason = "decode wants this room no more."
                    stale = Abort(message.generation, message.room, message.attempt, reason)
                    self._post(rank, stale)
            elif isinstance(message, Ready):
                self._ready(room, source, message)
            elif isinstance(message, Released):
                self._released(message.room, room, source, message)
            else:
                self._fail(message.room, room, Failure("prefill", message.reason), but=source)

    def lost(self, rank: int, reason: str) -> None:
        """A rank cannot be reached any more: the rooms of its link fail."""
        link = next(link for link in reversed(self.links) if link.first <= rank)
        if link.refusal is None:
            self._refuse(link, [reason], but=rank - link.first)

    def read_ended(self, read: Read, problem: str | None, quiet: bool = True) -> None:
        """A read that was handed out has ended; `quiet` if nothing of it can still land.

        Otherwise the room's pages stay leased: `reading` stays true.
        """
        room = self._known(read.room)
        room.reading -= quiet
        if read.room not in self._open:
            return
        if problem is not None:
            self._fail(read.room, room, Failure("decode", problem))
        else:
            self._advance(read.room, room)

    def _greet(self, link: Link, source: int, hello: Hello) -> None:
        if link.settled:
            return
        problems = greeting_problems(self.hello, hello)
        if problems:
            self._refuse(link, problems)
            return
        link.hellos[source] = hello
        hellos = [each for each in link.hellos if each is not None]
        if len(hellos) < len(link.hellos):
            return
        try:
            layouts = [PoolLayout.from_msgpack(each.layout) for each in hellos]
            link.plan = plan(layouts, self.layout)
        except ValueError as error:  # LayoutError and IncompatibleLayouts among them
            link.error = error if isinstance(error, IncompatibleLayouts) else None
            self._refuse(link, [str(error)])
            return
        for name in self._open:
            if self._rooms[name].link is link:
                self._ask(name, self._rooms[name])

    def _refuse(self, link: Link, reasons: list[str], but: int | None = None) -> None:
        link.refusal = "\n".join(reasons)
        link.plan = None
        for source in range(len(link.addresses)):
            if source != but:
                self._post(link.first + source, Refuse([reason_text(r, MAX_TEXT) for r in reasons]))
        side = "prefill" if but is not None else "decode"
        for name in [name for name in self._open if self._rooms[name].link is link]:
            self._fail(name, self._rooms[name], Failure(side, link.refusal), told=False)

    def _ask(self, name: Room, room: DecodeRoom) -> None:
        room.asked = True
        for source, hello in enumerate(room.link.hellos):
            if hello is not None:
                want = Want(
                    hello.generation,
                    name,
                    room.attempt,
                    room.start,
                    room.address.num_tokens,
                    self.readers,
                )
                self._post(room.link.first + source, want)

    def _ready(self, room: DecodeRoom, source: int, ready: Ready) -> None:
        problem = None
        total = room.address.num_tokens
        if ready.start != room.offered[source] or ready.stop < ready.start or room.closed[source]:
            problem = f"chunk {ready.start} to {ready.stop} does not follow {room.offered[source]}."
        elif ready.stop > total or (ready.last and ready.stop != total):
            problem = f"prefill computed {ready.stop} tokens, decode made room for {total}."
        else:
            try:
                address, aux = ready.address(), unpack_aux(ready.aux)
            except ValueError as error:
                problem = str(error)
            else:
                clash = [
                    k
                    for k in aux
                    if k in room.aux and pack_aux({k: aux[k]}) != pack_aux({k: room.aux[k]})
                ]
                if clash:
                    problem = f"ranks send different values of aux {', '.join(clash)}."
        if problem is not None:
            reason = f"rank {source} of prefill: {problem}"
            self._fail(ready.room, room, Failure("decode", reason))
            return
        room.offered[source], room.closed[source] = ready.stop, ready.last
        room.aux.update(aux)
        tokens = range(max(ready.start, room.start), max(ready.stop, room.start))
        # slots and rings come with the last position, also where decode has all the pages
        needed = tokens or (ready.last and room.start == total)
        if room.link.plan is None or source not in room.link.plan.contributors() or not needed:
            self._advance(ready.room, room)
            return
        room.reading += 1
        self.reads.append(Read(ready.room, room.link, source, tokens, address, room.address))

    def _advance(self, name: Room, room: DecodeRoom) -> None:
        """Says done once every rank has closed the room and every read has ended."""
        if room.reading or room.announced or not all(room.closed):
            return
        room.announced = True
        self._tell(room, lambda generation: Done(generation, name, room.attempt))

    def _released(self, name: Room, room: DecodeRoom, source: int, message: Released) -> None:
        if not message.leased or not room.announced:
            reason = f"rank {source} of prefill gave its pages away before they were read."
            self._fail(name, room, Failure("prefill", reason))
            return
        room.released.add(source)
        if room.complete:
            self._open.discard(name)

    def _fail(
        self,
        name: Room,
        room: DecodeRoom,
        failure: Failure,
        but: int | None = None,
        told: bool = True,
    ) -> None:
        """Ends a room; all ranks but `but` are told, unless they know from elsewhere."""
        room.failure = failure
        self._open.discard(name)
        kept = [read for read in self.reads if read.room != name]
        room.reading -= len(self.reads) - len(kept)
        self.reads = kept
        if room.asked and told:
            reason = reason_text(failure.reason)
            self._tell(room, lambda g: Abort(g, name, room.attempt, reason), but)

    def _tell(
        self, room: DecodeRoom, message: Callable[[str], Message], but: int | None = None
    ) -> None:
        for source, hello in enumerate(room.link.hellos):
            if hello is not None and source != but:
                self._post(room.link.first + source, message(hello.generation))

    def _post(self, rank: int, message: Message) -> None:
        """Encodes at once, so that a message that cannot travel is its sender's error."""
        self.outbox.append((rank, encode(message)))

    def _known(self, name: Room) -> DecodeRoom:
        room = self._rooms.get(name)
        if room is None:
            raise KeyError(f"room {name!r} was never wanted, or is forgotten.")
        return room
