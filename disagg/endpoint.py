"""One rank's side of the hand-off.

    prefill = PrefillEndpoint(pool.layout, create_engine("local"), bind="tcp://127.0.0.1:*")
    prefill.send(room, address, tokens=range(0, n), last=True, aux={"first_token": 7})

    decode = DecodeEndpoint(pool.layout, create_engine("local"))
    decode.connect([prefill.address])
    decode.receive(room, address)
    decode.wait(room)                   # KVPoll.Success, or Failed with decode.failure(room)

An endpoint takes its engine over: it registers the layout's memory and closes the engine with
itself. The pool, whose memory peers read and reads write, must outlive it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import index

import zmq

from disagg.decode import DecodeRooms
from disagg.decode_room import Link, Read
from disagg.driver import Driver
from disagg.engines.base import Engine
from disagg.metrics import RoomMetrics
from disagg.prefill import PrefillRooms
from disagg.reader import Reader
from disagg.room import KVPoll
from disagg.wire import Aux, Message, Room, room_name
from kvpool.layout import PoolLayout, RequestAddress

__all__ = ["DecodeEndpoint", "HandshakeRefused", "KVPoll", "PrefillEndpoint"]


class HandshakeRefused(RuntimeError):
    """Prefill and decode cannot work together; the message gives all the reasons."""


class PrefillEndpoint(Driver):
    """Offers what one prefill rank computes. `address` is what decode connects to.

    A room is Bootstrapping until somebody wants it. `abort` frees its pages at once.
    """

    _rooms: PrefillRooms

    def __init__(self, layout: PoolLayout, engine: Engine, bind: str = "tcp://127.0.0.1:*") -> None:
        super().__init__(layout, engine)
        self._rooms = PrefillRooms(self._hello)
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self._release()
            raise ValueError(f"bind {bind!r}: {error}.") from None
        self._poller.register(self._router, zmq.POLLIN)
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread.start()

    def send(
        self,
        room: Room,
        address: RequestAddress,
        *,
        tokens: range | None = None,
        last: bool = True,
        aux: Aux | None = None,
    ) -> None:
        """Offers positions `tokens` (default: all not yet sent) of a request to who wants `room`.

        As many chunks as one likes, in order; `aux` travels with the last. From the first chunk on
        the pages are leased: reuse none before `poll(room)` says Success or Failed.
        Raises ValueError where the chunk does not follow the one before.
        """
        with self._calling():
            name = room_name(room)
            start = self._rooms.computed(name)
            reach = range(start, address.num_tokens) if tokens is None else tokens
            self._rooms.send(name, address, reach, last, aux or {})

    def refusals(self) -> list[str]:
        """Reasons of the decodes, the latest hundred, that could not work with this prefill."""
        with self._lock:
            return list(self._rooms.refusals)

    def _take(self, socket: zmq.Socket[bytes], frames: list[bytes], message: Message) -> None:
        self._rooms.receive(frames[0], message)

    def _flush(self) -> None:
        outbox, self._rooms.outbox = self._rooms.outbox, []
        for peer, data in outbox:
            problem = self._send(self._router, [peer, data])
            if problem is not None:
                self._rooms.lost(peer, f"decode: {problem}")


class DecodeEndpoint(Driver):
    """Pulls what one decode rank needs; `ranks` decode ranks read each room.

    `abort` stops a room's reads; its pages may be reused once `reading(room)` is false.
    """

    _rooms: DecodeRooms

    def __init__(self, layout: PoolLayout, engine: Engine, *, ranks: int = 1) -> None:
        super().__init__(layout, engine)
        self._rooms = DecodeRooms(self._hello, self.layout, ranks)
        self._reader = Reader(engine, self._wanted, self._ended)
        self._dealers: list[zmq.Socket[bytes]] = []
        self._polled = 0
        self._metrics: dict[Room, RoomMetrics] = {}
        self._thread.start()

    def connect(self, addresses: Sequence[str], timeout: float | None = None) -> Link:
        """Says hello to all ranks of one prefill, given their endpoints' addresses.

        With `timeout` (seconds), waits until they have answered and everything is planned; raises
        IncompatibleLayouts or HandshakeRefused with all the reasons, or TimeoutError.
        Without, returns at once: rooms wait in Bootstrapping.
        """
        if isinstance(addresses, str) or not addresses:
            raise ValueError(f"connect: a list of one or more addresses, got {addresses!r}.")
        with self._calling():
            dealers = [self._dealer(address) for address in addresses]
            link = self._rooms.connect(addresses)
            self._dealers.extend(dealers)
        if timeout is not None:
            self.handshake(link, timeout)
        return link

    def handshake(self, link: Link, timeout: float) -> None:
        """Waits as `connect` does."""
        if not self._wait(lambda: link.settled, timeout):
            self._check_open()
            silent = [a for a, hello in zip(link.addresses, link.hellos) if hello is None]
            raise TimeoutError(f"no answer from {', '.join(silent)} within {timeout} s.")
        if link.error is not None:
            raise link.error
        if link.refusal is not None:
            raise HandshakeRefused(link.refusal)

    def receive(
        self, room: Room, address: RequestAddress, *, start: int = 0, link: Link | None = None
    ) -> None:
        """Wants a room: positions `start` (the first that is lacking) to the end, into `address`.

        `link` names the prefill, where several are connected. The pages are leased until the room
        has ended and `reading(room)` is false. Slots and rings come whole, whatever `start` is.
        Make room with `Allocator.extend(..., received=True)`, which knows what is dead and will
        not come.
        """
        with self._calling():
            name = room_name(room)
            if link is None:
                if len(self._rooms.links) != 1:
                    raise ValueError(f"room {room!r}: {len(self._rooms.links)} prefills, name one.")
                link = self._rooms.links[0]
            self._rooms.want(name, address, index(start), link)
            self._metrics[name] = RoomMetrics()

    def reading(self, room: Room) -> bool:
        """Whether a read may still write to the room's pages."""
        with self._lock:
            return self._rooms.reading(room_name(room))

    def aux(self, room: Room) -> Aux:
        """The values that prefill sent along. Raises ValueError before the room has succeeded."""
        with self._lock:
            return self._rooms.aux(room_name(room))

    def metrics(self, room: Room) -> RoomMetrics:
        """What has been moved so far, and what that took."""
        with self._lock:
            return replace(self._metrics[room_name(room)])

    def forget(self, room: Room) -> None:
        """Drops what is kept of an ended room. Raises ValueError while a read may write to it."""
        with self._lock:
            self._rooms.forget(room_name(room))
            del self._metrics[room_name(room)]

    def _take(self, socket: zmq.Socket[bytes], frames: list[bytes], message: Message) -> None:
        self._rooms.receive(self._dealers.index(socket), message)

    def _flush(self) -> None:
        for dealer in self._dealers[self._polled :]:
            self._poller.register(dealer, zmq.POLLIN)
        self._polled = len(self._dealers)
        outbox, self._rooms.outbox = self._rooms.outbox, []
        for rank, data in outbox:
            problem = self._send(self._dealers[rank], [data])
            if problem is not None:
                self._rooms.lost(rank, f"rank {rank} of prefill: {problem}")
        self._reader.queue.extend(self._rooms.reads)
        self._rooms.reads.clear()

    def _dealer(self, address: str) -> zmq.Socket[bytes]:
        """A socket that the thread takes over at its next turn."""
        dealer = self._socket(zmq.DEALER)
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            dealer.close(linger=0)
            raise ValueError(f"connect: address {address!r}: {error}.") from None
        return dealer

    def _work(self) -> bool:
        super()._work()
        return self._reader.step()

    def _wanted(self, read: Read) -> RoomMetrics | None:
        with self._lock:
            failed = self._rooms.poll(read.room) is KVPoll.Failed
            return None if failed else self._metrics[read.room]

    def _ended(self, read: Read, problem: str | None, quiet: bool) -> None:
        with self._lock:
            self._rooms.read_ended(read, problem, quiet)

    def _release(self) -> None:
        super()._release()
        self._reader.stop()
