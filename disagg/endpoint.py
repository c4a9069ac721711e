"""One rank's side of the hand-off: a thread that owns the sockets and the engine, and a state
machine.

    prefill = PrefillEndpoint(pool.layout, create_engine("local"), bind="tcp://127.0.0.1:*")
    prefill.send(room, address, tokens=range(0, n), last=True, aux={"first_token": 7})

    decode = DecodeEndpoint(pool.layout, create_engine("local"))
    decode.connect([prefill.address])
    decode.receive(room, address)
    decode.wait(room)                   # KVPoll.Success, or Failed with decode.failure(room)

Calls may come from any thread; they take a lock, change the state machine and wake the thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import zmq

from disagg.bind import Columns, CopyBatch
from disagg.decode import DecodeRooms, Link, Read
from disagg.engines.base import Engine
from disagg.metrics import RoomMetrics
from disagg.prefill import PrefillRooms
from disagg.room import Failure, KVPoll
from disagg.wire import MAX_MESSAGE, PROTOCOL, Aux, Hello, Message, Room, WireError, decode, encode
from kvpool.layout import PoolLayout, RequestAddress

__all__ = ["DecodeEndpoint", "HandshakeRefused", "KVPoll", "PrefillEndpoint"]

log = logging.getLogger("disagg")

BUSY_MS = 1
IDLE_MS = 50


class HandshakeRefused(RuntimeError):
    """Prefill and decode cannot work together; the message gives all the reasons."""


class _Endpoint(ABC):
    """What both sides share: layout, engine, thread, lock, and the hello."""

    def __init__(self, layout: PoolLayout, engine: Engine) -> None:
        self.layout = replace(layout, generation=layout.generation or uuid.uuid4().hex)
        self.engine = engine
        engine.register(self.layout.slabs())
        self._hello = Hello(
            PROTOCOL,
            self.layout.generation,
            engine.name,
            self.layout.to_msgpack(),
            engine.metadata(),
        )
        self._zmq = zmq.Context()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def close(self) -> None:
        """Aborts open rooms, tells peers, stops the thread and closes the engine."""
        with self._lock:
            if self._closing:
                return
            self._abort_all("the endpoint was closed.")
            self._closing = True
        self._wake()
        self._thread.join()
        self._zmq.destroy(linger=200)
        os.close(self._wake_read)
        os.close(self._wake_write)
        self.engine.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        """The thread: messages in, messages out, reads, until closed."""
        while True:
            with self._lock:
                closing, busy = self._closing, self._is_busy()
            ready = dict(self._poller.poll(0 if closing else BUSY_MS if busy else IDLE_MS))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            for socket in ready:
                if isinstance(socket, zmq.Socket):
                    self._drain(socket)
            self._work()
            with self._changed:
                self._flush()
                self._changed.notify_all()
            if closing:
                return

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode(frames[-1])
                with self._lock:
                    self._take(socket, frames, message)
            except WireError as error:
                log.warning("dropped a message: %s", error)

    @abstractmethod
    def _take(self, socket: zmq.Socket[bytes], frames: list[bytes], message: Message) -> None:
        """Hands a message to the state machine."""

    @abstractmethod
    def _flush(self) -> None:
        """Sends what the state machine has to say."""

    @abstractmethod
    def _is_busy(self) -> bool:
        """Whether the thread should look again soon."""

    @abstractmethod
    def _abort_all(self, reason: str) -> None:
        """Ends every open room."""

    def _work(self) -> None:
        """What else the thread does in a turn."""
        self.engine.progress()

    def _wait(self, ended: Any, timeout: float | None) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(ended, timeout))


class PrefillEndpoint(_Endpoint):
    """Offers what one prefill rank computes. `address` is what decode connects to."""

    def __init__(self, layout: PoolLayout, engine: Engine, bind: str = "tcp://127.0.0.1:*") -> None:
        super().__init__(layout, engine)
        self._rooms = PrefillRooms(self._hello)
        self._socket = self._zmq.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self._socket.bind(bind)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller.register(self._socket, zmq.POLLIN)
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
        """Offers positions `tokens` (default: all not yet sent) of a request to whoever wants
        `room`.

        As many chunks as one likes, in order; `aux` travels with the last. From the first chunk on
        the pages are leased: reuse none before `poll(room)` says Success or Failed. Raises
        ValueError where the chunk does not follow the one before.
        """
        with self._lock:
            start = self._rooms.computed(room)
            reach = range(start, address.num_tokens) if tokens is None else tokens
            self._rooms.send(room, address, reach, last, aux or {})
        self._wake()

    def poll(self, room: Room) -> KVPoll:
        """State of a room; Bootstrapping until somebody wants it."""
        with self._lock:
            return self._rooms.poll(room)

    def wait(self, room: Room, timeout: float | None = None) -> KVPoll:
        """Blocks until the room has ended or `timeout` seconds have passed; returns its state."""
        self._wait(lambda: self._rooms.poll(room).ended, timeout)
        return self.poll(room)

    def failure(self, room: Room) -> Failure | None:
        """Why the room failed; None if it did not."""
        with self._lock:
            return self._rooms.failure(room)

    def refusals(self) -> list[str]:
        """Reasons of all decodes that could not work with this prefill."""
        with self._lock:
            return ["\n".join(reasons) for reasons in self._rooms.refused.values()]

    def abort(self, room: Room, reason: str) -> None:
        """Ends a room; its pages are free at once, and whoever wanted it is told the reason."""
        with self._lock:
            self._rooms.abort(room, reason)
        self._wake()

    def forget(self, room: Room) -> None:
        """Drops what is kept of an ended room. Raises ValueError if it has not ended."""
        with self._lock:
            self._rooms.forget(room)

    def _take(self, socket: zmq.Socket[bytes], frames: list[bytes], message: Message) -> None:
        self._rooms.receive(frames[0], message)

    def _flush(self) -> None:
        outbox, self._rooms.outbox = self._rooms.outbox, []
        for peer, message in outbox:
            self._socket.send_multipart([peer, encode(message)])

    def _is_busy(self) -> bool:
        return bool(self._rooms.outbox or self._rooms.open_rooms())

    def _abort_all(self, reason: str) -> None:
        for room in self._rooms.open_rooms():
            self._rooms.abort(room, reason)


@dataclass(eq=False, slots=True)
class _Active:
    """A read that has begun: parts still to be posted, and the one that is in flight."""

    read: Read
    peer: Any
    columns: Columns
    parts: Iterator[CopyBatch]
    metrics: RoomMetrics
    in_flight: bool = False
    transfer: Any = None
    nbytes: int = 0
    started: float = 0.0


class DecodeEndpoint(_Endpoint):
    """Pulls what one decode rank needs; `ranks` decode ranks read each room."""

    def __init__(self, layout: PoolLayout, engine: Engine, *, ranks: int = 1) -> None:
        super().__init__(layout, engine)
        self._rooms = DecodeRooms(self._hello, self.layout, ranks)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._peers: dict[tuple[int, int], Any] = {}
        self._waiting: deque[Read] = deque()
        self._active: _Active | None = None
        self._columns = Columns()
        self._metrics: dict[Room, RoomMetrics] = {}
        self._new_sockets: list[str] = []
        self._thread.start()

    def connect(self, addresses: Sequence[str], timeout: float | None = None) -> Link:
        """Says hello to all ranks of one prefill, given their endpoints' addresses.

        With `timeout` (seconds), waits until they have answered and everything is planned; raises
        IncompatibleLayouts or HandshakeRefused with all the reasons, or TimeoutError.
        Without, returns at once: rooms wait in Bootstrapping.
        """
        if not addresses:
            raise ValueError("connect: at least one address.")
        with self._lock:
            link = self._rooms.connect(addresses)
            self._new_sockets.extend(addresses)
        self._wake()
        if timeout is not None:
            self.handshake(link, timeout)
        return link

    def handshake(self, link: Link, timeout: float) -> None:
        """Waits as `connect` does."""
        if not self._wait(lambda: link.settled, timeout):
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

        The pages are leased until the room has ended and `reading(room)` is false.
        """
        with self._lock:
            if link is None:
                if len(self._rooms.links) != 1:
                    raise ValueError(f"room {room!r}: {len(self._rooms.links)} prefills, name one.")
                link = self._rooms.links[0]
            self._rooms.want(room, address, start, link)
            self._metrics[room] = RoomMetrics()
        self._wake()

    def poll(self, room: Room) -> KVPoll:
        """State of a room."""
        with self._lock:
            return self._rooms.poll(room)

    def wait(self, room: Room, timeout: float | None = None) -> KVPoll:
        """Blocks until the room has ended or `timeout` seconds have passed; returns its state."""
        self._wait(lambda: self._rooms.poll(room).ended, timeout)
        return self.poll(room)

    def reading(self, room: Room) -> bool:
        """Whether a read may still write to the room's pages."""
        with self._lock:
            return self._rooms.reading(room)

    def failure(self, room: Room) -> Failure | None:
        """Why the room failed; None if it did not."""
        with self._lock:
            return self._rooms.failure(room)

    def aux(self, room: Room) -> Aux:
        """The values that prefill sent along; there once the room has succeeded."""
        with self._lock:
            return self._rooms.aux(room)

    def metrics(self, room: Room) -> RoomMetrics:
        """What has been moved so far, and what that took."""
        with self._lock:
            return replace(self._metrics[room])

    def abort(self, room: Room, reason: str) -> None:
        """Ends a room. Its pages may be reused once `reading(room)` is false."""
        with self._lock:
            self._rooms.abort(room, reason)
        self._wake()

    def forget(self, room: Room) -> None:
        """Drops what is kept of an ended room. Raises ValueError if it has not ended."""
        with self._lock:
            self._rooms.forget(room)
            del self._metrics[room]

    def close(self) -> None:
        """As for every endpoint; the engine is fenced from every peer."""
        super().close()
        self._peers.clear()

    def _take(self, socket: zmq.Socket[bytes], frames: list[bytes], message: Message) -> None:
        self._rooms.receive(self._sockets.index(socket), message)

    def _flush(self) -> None:
        while self._new_sockets:
            socket = self._zmq.socket(zmq.DEALER)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
            socket.connect(self._new_sockets.pop(0))
            self._poller.register(socket, zmq.POLLIN)
            self._sockets.append(socket)
        outbox, self._rooms.outbox = self._rooms.outbox, []
        for rank, message in outbox:
            self._sockets[rank].send(encode(message))
        self._waiting.extend(self._rooms.reads)
        self._rooms.reads.clear()

    def _is_busy(self) -> bool:
        return bool(self._active or self._waiting or self._rooms.outbox or self._rooms.open_rooms())

    def _abort_all(self, reason: str) -> None:
        for room in self._rooms.open_rooms():
            self._rooms.abort(room, reason)

    def _work(self) -> None:
        """One step of the read that is under way."""
        super()._work()
        if self._active is None:
            if not self._waiting:
                return
            self._begin(self._waiting.popleft())
        active = self._active
        if active is None:
            return
        try:
            self._step(active)
        except Exception as error:  # whatever goes wrong in one read fails that room and no other
            self._give_up(active.read)
            self._end(active.read, f"read from rank {active.read.source} of prefill: {error}")

    def _begin(self, read: Read) -> None:
        try:
            with self._lock:
                dead = self._rooms.poll(read.room) is KVPoll.Failed
                metrics = self._metrics[read.room]
            plan = read.link.plan
            if dead or plan is None:
                self._end(read, "the room has failed.")
                return
            peer = self._peer(read)
            began = time.perf_counter()
            batch = plan.bind(
                read.source,
                read.source_address,
                read.dest_address,
                tokens=read.tokens,
                columns=self._columns,
            )
            metrics.bound(batch, time.perf_counter() - began)
            parts = batch.split(self.engine.max_bytes, self.engine.max_runs)
            self._active = _Active(read, peer, self._columns, parts, metrics)
        except Exception as error:  # as in _work
            self._end(read, f"read from rank {read.source} of prefill: {error}")

    def _peer(self, read: Read) -> Any:
        key = id(read.link), read.source
        if key not in self._peers:
            hello = read.link.hellos[read.source]
            if hello is None or read.link.plan is None:
                raise RuntimeError("a read before the hello.")
            self._peers[key] = self.engine.connect(hello.metadata)
            self.engine.prepare(self._peers[key], read.link.plan)
        return self._peers[key]

    def _step(self, active: _Active) -> None:
        began = time.perf_counter()
        if not active.in_flight:
            with self._lock:
                dead = self._rooms.poll(active.read.room) is KVPoll.Failed
            part = None if dead else next(active.parts, None)
            if part is None:
                self._end(active.read, None)
                return
            active.started, active.nbytes = began, part.total
            active.transfer, active.in_flight = self.engine.read(active.peer, part), True
        if self.engine.poll(active.transfer):
            active.in_flight = False
            active.metrics.moved(active.nbytes, time.perf_counter() - active.started)

    def _give_up(self, read: Read) -> None:
        """After a failed read: nothing of it may land once its room is told; the next one
        reconnects.
        """
        peer = self._peers.pop((id(read.link), read.source), None)
        if peer is not None:
            self.engine.fence(peer)

    def _end(self, read: Read, problem: str | None) -> None:
        self._active = None
        with self._changed:
            if problem is not None:
                log.warning("room %r failed: %s", read.room, problem)
            self._rooms.read_ended(read, problem)
            self._changed.notify_all()
