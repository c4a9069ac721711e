"""One rank's side of the hand-off.

    prefill = PrefillEndpoint(pool.layout, create_engine("local"), bind="tcp://127.0.0.1:*")
    prefill.send(room, address, tokens=range(0, n), last=True, aux={"first_token": 7})

    decode = DecodeEndpoint(pool.layout, create_engine("local"))
    decode.connect([prefill.address])
    decode.receive(room, address)
    decode.wait(room)                   # KVPoll.Success, or Failed with decode.failure(room)

An endpoint takes its engine over: it registers the layout's memory and closes the engine with
itself. The pool, whose memory peers read and reads write, must outlive it.

`peer_timeout` (seconds): a peer that is silent for longer is dead; its rooms fail by name, and it
is greeted again when it returns. `keys`: a file of `kvpool keys`, the same on both sides; with it,
control messages are encrypted and nobody else may connect.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from operator import index
from typing import TYPE_CHECKING

import zmq

from disagg.digest.digest import from_wire
from disagg.digest.digester import Digester, Verification
from disagg.engines.base import Engine
from disagg.protocol.decode import DecodeRooms
from disagg.protocol.decode_state import Link, Read
from disagg.protocol.messages import MAX_MESSAGE, Aux, DigestRequest, Message, Room, room_name
from disagg.protocol.metrics import RoomMetrics, Snapshot
from disagg.protocol.prefill import PrefillRooms
from disagg.protocol.status import KVPoll
from disagg.runtime.io_thread import CLOSE_LINGER_SECONDS, Driver
from disagg.runtime.reader import Reader
from disagg.runtime.staging import LEAST_STAGING, stage_for
from kvpool.layout import PoolLayout, RequestAddress

if TYPE_CHECKING:
    from kvpool.device import Event

PEER_TIMEOUT = 10.0
LEASE = 300.0
READ_TIMEOUT = 30.0
STAGING = 16 << 20

__all__ = ["DecodeEndpoint", "HandshakeRefused", "KVPoll", "PrefillEndpoint"]


class HandshakeRefused(RuntimeError):
    """Prefill and decode cannot work together; the message gives all the reasons."""


class PrefillEndpoint(Driver):
    """Offers what one prefill rank computes. `address` is what decode connects to.

    A room is Bootstrapping until somebody wants it. `abort` frees its pages at once. A lease runs
    out `lease` seconds after the room's last chunk or want (None: never): the room fails, its pages
    are free, and a reader that is late is told that what he has read is worth nothing.
    """

    _rooms: PrefillRooms

    def __init__(
        self,
        layout: PoolLayout,
        engine: Engine,
        bind: str = "tcp://127.0.0.1:*",
        *,
        peer_timeout: float = PEER_TIMEOUT,
        lease: float | None = LEASE,
        keys: str | os.PathLike[str] | None = None,
    ) -> None:
        if lease is not None and not lease > 0:
            raise ValueError(f"lease={lease!r}: a number of seconds above 0, or None.")
        super().__init__(layout, engine, peer_timeout, keys, serves=True)
        self._rooms = PrefillRooms(self._hello, lease)
        self._digester = Digester()
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
        after: Event | None = None,
    ) -> None:
        """Offers positions `tokens` (default: all not yet sent) of a request to who wants `room`.

        As many chunks as one likes, in order; `aux` travels with the last. Where a device computes
        them, `after=pool.device.record()` offers them once its work has ended; without, it must
        have. From the first chunk on the pages are leased: reuse none before `poll(room)` says
        Success or Failed.
        Raises ValueError where the chunk does not follow the one before.
        """
        with self._calling():
            name = room_name(room)
            start = self._rooms.computed(name)
            reach = range(start, address.num_tokens) if tokens is None else tokens
            self._rooms.send(name, address, reach, last, aux or {}, after)

    def refusals(self) -> list[str]:
        """Reasons of the decodes, the latest hundred, that could not work with this prefill."""
        with self._lock:
            return list(self._rooms.decodes.refusals)

    def snapshot(self) -> Snapshot:
        """Numbers of now, and since the endpoint was made, for `disagg.prometheus`."""
        with self._lock:
            rooms, engine = self._rooms, self.engine.name
            now = len(rooms.open_rooms()), len(rooms.decodes.alive), rooms.leases()
            return Snapshot(rooms.totals.copy(), *now, engine, self._telemetry)

    def _take(self, socket: zmq.Socket[bytes], frames: list[bytes], message: Message) -> None:
        self._rooms.receive(frames[0], message)

    def _refuse(self, socket: zmq.Socket[bytes], frames: list[bytes], reason: str) -> None:
        self._rooms.decodes.refuse(frames[0], reason)

    def _farewell(self) -> None:
        self._rooms.decodes.farewell()

    def _patience(self) -> float:
        return self.engine.progress_seconds

    def _flush(self) -> None:
        outbox, self._rooms.outbox = self._rooms.outbox, []
        for peer, data in outbox:
            problem = self._send(self._router, [peer, data])
            if problem is not None:
                self._rooms.decodes.lost(peer, f"decode: {problem}")
        checks, self._rooms.checks = self._rooms.checks, []
        for peer, check, address in checks:
            self._check(peer, check, address)

    def _check(self, peer: bytes, check: DigestRequest, address: RequestAddress) -> None:
        def answer(values: bytes | None, problem: str) -> None:
            with self._lock:
                self._rooms.checked(peer, check, values or b"", problem)

        try:
            pieces = from_wire(check.pieces)
        except ValueError as error:
            self._rooms.decodes.refuse(peer, str(error))
            return
        if check.each and 16 * sum(len(piece.entries) for piece in pieces) > MAX_MESSAGE:
            answer(None, "so many digests are not sent at once.")
            return
        self._digester.add(self.layout, address, pieces, check.each, answer)

    def _work(self) -> bool:
        super()._work()
        return self._digester.step()


class DecodeEndpoint(Driver):
    """Pulls what one decode rank needs; `ranks` decode ranks read each room.

    `abort` stops a room's reads; its pages may be reused once `reading(room)` is false. A part of a
    read that takes longer than `read_timeout` seconds has failed. `verify="checksum"` compares
    digests of everything that was read with prefill's before a room succeeds. `allow_missing` names
    owners or roles that prefill may lack altogether (`"draft"`): their memory is left as it is.
    `staging` bytes (0: none) are for runs that are small, and close together at prefill's: they are
    read as long ones and scattered from there (docs/engines.md).
    """

    _rooms: DecodeRooms

    def __init__(
        self,
        layout: PoolLayout,
        engine: Engine,
        *,
        ranks: int = 1,
        peer_timeout: float = PEER_TIMEOUT,
        read_timeout: float = READ_TIMEOUT,
        verify: str | None = None,
        allow_missing: Collection[str] = (),
        staging: int = STAGING,
        keys: str | os.PathLike[str] | None = None,
    ) -> None:
        if verify not in (None, "checksum"):
            raise ValueError(f"verify={verify!r}: 'checksum', or None.")
        if not read_timeout > 0:
            raise ValueError(f"read_timeout={read_timeout!r}: a number of seconds above 0.")
        if staging and not staging >= LEAST_STAGING:
            raise ValueError(
                f"staging={staging!r}: {LEAST_STAGING:,} bytes or more, or 0 for none."
            )
        stage = stage_for(layout, engine, staging)
        super().__init__(layout, engine, peer_timeout, keys, serves=False, more=stage.slabs)
        self._rooms = DecodeRooms(
            self._hello,
            self.layout,
            ranks,
            verify is not None,
            allow_missing=allow_missing,
        )
        ends = self._wanted, self._failed, self._ended
        self._reader = Reader(engine, read_timeout, *ends, stage=stage)
        self._digester = Digester()
        self._dialled: dict[int, zmq.Socket[bytes]] = {}
        self._leaving: deque[tuple[float, zmq.Socket[bytes]]] = deque()
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        self._ranks: dict[zmq.Socket[bytes], int] = {}
        self._thread.start()

    def connect(self, addresses: Sequence[str], timeout: float | None = None) -> Link:
        """Says hello to all ranks of one prefill, given their endpoints' addresses.

        With `timeout` (seconds), waits until they have answered and everything is planned; raises
        IncompatibleLayouts or HandshakeRefused with all the reasons, or TimeoutError.
        Without, returns at once: rooms wait in Bootstrapping, for `peer_timeout` at most.
        """
        if isinstance(addresses, str) or not addresses:
            raise ValueError(f"connect: a list of one or more addresses, got {addresses!r}.")
        with self._calling():
            dealers = [self._dealer(address) for address in addresses]
            link = self._rooms.links.connect(addresses)
            self._dialled.update(enumerate(dealers, link.first))
        if timeout is not None:
            self.handshake(link, timeout)
        return link

    def handshake(self, link: Link, timeout: float) -> None:
        """Waits as `connect` does."""
        if not self._wait(lambda: link.settled, timeout):
            self._check_open()
            silent = [a for a, hello in zip(link.addresses, link.hellos) if hello is None]
            raise TimeoutError(
                f"no answer from {', '.join(silent)} within {timeout} s. Is it there, and are keys "
                "the same on both sides?"
            )
        if link.error is not None:
            raise link.error
        if link.refusal is not None:
            raise HandshakeRefused(link.refusal)

    def disconnect(self, link: Link) -> None:
        """Gives a prefill up for good; its rooms fail."""
        with self._calling():
            if link not in self._rooms.links.links:
                raise ValueError("the link is another endpoint's, or it was disconnected.")
            self._rooms.links.disconnect(link, "decode has disconnected.")

    def receive(
        self,
        room: Room,
        address: RequestAddress,
        *,
        start: int = 0,
        link: Link | None = None,
        aux: Collection[str] = (),
    ) -> None:
        """Wants a room: positions `start` (the first that is lacking) to the end, into `address`.

        `link` names the prefill, where several are connected. `aux` are the names of values
        without which the room fails. The pages are leased until the room has ended and
        `reading(room)` is false. Slots and rings come whole, whatever `start` is. Make room with
        `Allocator.extend(..., received=True)`, which knows what is dead and will not come.
        """
        if isinstance(aux, str):
            raise ValueError(f"aux={aux!r}: a list of names.")
        with self._calling():
            name = room_name(room)
            links = self._rooms.links.links
            if link is None:
                if len(links) != 1:
                    raise ValueError(f"room {room!r}: {len(links)} prefills, name one.")
                link = links[0]
            self._rooms.want(name, address, index(start), link, aux)

    def reading(self, room: Room) -> bool:
        """Whether a read may still write to the room's pages."""
        with self._lock:
            return self._rooms.reading(room_name(room))

    def snapshot(self) -> Snapshot:
        """Numbers of now, and since the endpoint was made, for `disagg.prometheus`."""
        with self._lock:
            rooms, links, engine = self._rooms, self._rooms.links, self.engine.name
            totals = rooms.totals.copy()
            totals.planned(links.plan_seconds)
            now = len(rooms.open_rooms()), links.live(), rooms.leases()
            plans = {"hit": links.plans.hits, "miss": links.plans.misses}
            return Snapshot(totals, *now, engine, self._telemetry, plans)

    def aux(self, room: Room) -> Aux:
        """The values that prefill sent along. Raises ValueError before the room has succeeded."""
        with self._lock:
            return self._rooms.aux(room_name(room))

    def metrics(self, room: Room) -> RoomMetrics:
        """What has been moved so far, and what that took."""
        with self._lock:
            return replace(self._rooms.metrics(room_name(room)))

    def _take(self, socket: zmq.Socket[bytes], frames: list[bytes], message: Message) -> None:
        self._rooms.receive(self._ranks[socket], message)

    def _refuse(self, socket: zmq.Socket[bytes], frames: list[bytes], reason: str) -> None:
        at = self._rooms.links.at(self._ranks[socket])
        if at is not None:
            self._rooms.links.refuse(*at, reason)

    def _flush(self) -> None:
        links = self._rooms.links
        while links.dials:
            at = links.at(rank := links.dials.pop())
            if at is not None and rank not in self._dialled:
                link, source = at
                self._dialled[rank] = self._dealer(link.addresses[source])
        while self._dialled:
            self._plug(*self._dialled.popitem())
        outbox, links.outbox = links.outbox, []
        for rank, data in outbox:
            problem = self._send(self._dealers[rank], [data])
            if problem is not None:
                self._rooms.lost(rank, problem)
        for rank in [rank for rank in self._dealers if links.at(rank) is None]:
            self._unplug(rank)
        while self._leaving and self._leaving[0][0] < time.monotonic():
            self._leaving.popleft()[1].close(linger=0)
        while links.partings:
            self._reader.part(*links.partings.pop())
        for read in self._rooms.reads:
            self._reader.add(read)
        self._rooms.reads.clear()
        for check in self._rooms.checks:
            self._digester.add(
                self.layout, check.address, check.pieces, check.each, partial(self._checked, check)
            )
        self._rooms.checks.clear()

    def _dealer(self, address: str) -> zmq.Socket[bytes]:
        """A socket that the thread takes over at its next turn."""
        dealer = self._socket(zmq.DEALER)
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            dealer.close(linger=0)
            raise ValueError(f"connect: address {address!r}: {error}.") from None
        return dealer

    def _plug(self, rank: int, dealer: zmq.Socket[bytes]) -> None:
        """Puts a new socket in the place of a rank's old one, and with it a new identity."""
        if rank in self._dealers:
            self._unplug(rank)
        self._dealers[rank] = dealer
        self._ranks[dealer] = rank
        self._poller.register(dealer, zmq.POLLIN)

    def _unplug(self, rank: int) -> None:
        dealer = self._dealers.pop(rank)
        del self._ranks[dealer]
        self._poller.unregister(dealer)
        self._leaving.append((time.monotonic() + CLOSE_LINGER_SECONDS, dealer))

    def _work(self) -> bool:
        super()._work()
        more = self._reader.step()
        return self._digester.step() or more

    def _wanted(self, read: Read) -> RoomMetrics | None:
        with self._lock:
            return self._rooms.metrics(read.room) if self._rooms.wanted(read) else None

    def _failed(self, read: Read, problem: str) -> None:
        with self._lock:
            self._rooms.read_failed(read, problem)

    def _ended(self, read: Read, problem: str | None) -> None:
        with self._lock:
            self._rooms.read_ended(read, problem)

    def _checked(self, check: Verification, values: bytes | None, problem: str) -> None:
        with self._lock:
            self._rooms.checked(check, values, problem)

    def _release(self) -> None:
        super()._release()
        self._reader.stop()
