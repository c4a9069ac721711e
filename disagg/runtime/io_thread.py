"""The thread of an endpoint: it alone touches the sockets and the engine.

Calls may come from any thread. They take the lock, change the state machine and wake the thread,
which hands messages to the state machine, sends what it has to say, and does the engine's work in
between.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import zmq

from disagg.engines.base import Engine
from disagg.protocol.liveness import Leases
from disagg.protocol.messages import (
    LEAST_TIMEOUT,
    MAX_MESSAGE,
    MOST_TIMEOUT,
    PROTOCOL,
    Hello,
    Message,
    Room,
    WireError,
    decode,
    room_name,
)
from disagg.protocol.metrics import Snapshot
from disagg.protocol.status import Failure, KVPoll
from disagg.runtime.keys import Keys, read_keys
from kvpool.layout import PoolLayout, Slab

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

log = logging.getLogger("disagg")

IDLE_SECONDS = 0.05
CLOSE_LINGER_SECONDS = 0.03
"""What is sent last has so long to leave. ZeroMQ's own linger waits for ever where a peer goes away
just then.
"""
QUEUED = 100_000
"""Messages that wait for one peer before it is given up as one that does not listen."""
SOCKETS = 16_384
TELEMETRY_SECONDS = 0.5
MESSAGES_A_TURN = 1000


class EndpointClosed(RuntimeError):
    """The endpoint was closed; it takes no more calls."""


class Rooms(Protocol):
    """What a driver needs of either side's state machine."""

    def poll(self, name: Room) -> KVPoll:
        """The room's state."""

    def failure(self, name: Room) -> Failure | None:
        """Why the room failed."""

    def abort(self, name: Room, reason: str) -> None:
        """Ends a room."""

    def forget(self, name: Room) -> None:
        """Drops an ended room."""

    def open_rooms(self) -> set[Room]:
        """Rooms that have not ended."""

    def tick(self) -> None:
        """Notices what time brings."""

    def leases(self) -> Leases:
        """Items that must not be reused."""


class Driver(ABC):
    """Layout, engine, thread and lock, and what both endpoints say of rooms.

    The subclass sets `_rooms` and starts the thread once it is complete.
    """

    _rooms: Rooms

    def __init__(
        self,
        layout: PoolLayout,
        engine: Engine,
        peer_timeout: float,
        keys: str | os.PathLike[str] | None,
        serves: bool,
        more: Sequence[Slab] = (),
    ) -> None:
        if not LEAST_TIMEOUT <= peer_timeout <= MOST_TIMEOUT:
            raise ValueError(
                f"peer_timeout={peer_timeout!r}: from {LEAST_TIMEOUT} to {MOST_TIMEOUT:.0f} s."
            )
        self._keys = None if keys is None else read_keys(keys)
        self.layout = replace(layout, generation=layout.generation or uuid.uuid4().hex)
        self.engine = engine
        engine.register([*self.layout.slabs(), *more])
        self._hello = Hello(
            PROTOCOL,
            self.layout.generation,
            engine.name,
            self.layout.to_msgpack(),
            engine.metadata() if serves else b"",
            float(peer_timeout),
        )
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS)
        self._guard = None if self._keys is None else _guard(self._context, self._keys)
        self._poller = zmq.Poller()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._closing = False
        self._asked, self._telemetry = 0.0, dict(engine.telemetry())
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def poll(self, room: Room) -> KVPoll:
        """State of a room."""
        with self._lock:
            return self._rooms.poll(room_name(room))

    def wait(self, room: Room, timeout: float | None = None) -> KVPoll:
        """Blocks until the room has ended or `timeout` seconds have passed; returns its state.

        Raises EndpointClosed if the endpoint is closed before.
        """
        if not self._wait(lambda: self._rooms.poll(room_name(room)).ended, timeout):
            self._check_open()
        return self.poll(room)

    def failure(self, room: Room) -> Failure | None:
        """Why the room failed, and on whose side; None if it did not."""
        with self._lock:
            return self._rooms.failure(room_name(room))

    def abort(self, room: Room, reason: str) -> None:
        """Ends a room that has not ended; the other side is told the reason."""
        with self._calling():
            self._rooms.abort(room_name(room), reason)

    def leases(self) -> Leases:
        """Items that must not be reused now; of decode's also those in quarantine."""
        with self._lock:
            return self._rooms.leases()

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Numbers of now, and since the endpoint was made, for `disagg.prometheus`."""

    def forget(self, room: Room) -> None:
        """Drops what is kept of an ended room. Raises ValueError if it has not ended."""
        with self._lock:
            self._rooms.forget(room_name(room))

    def close(self) -> None:
        """Aborts open rooms, tells peers, stops the thread and closes the engine."""
        with self._changed:
            if self._closing:
                return
            self._abort_all("the endpoint was closed.")
            self._farewell()
            self._closing = True
            self._wake()
            self._changed.notify_all()
        self._thread.join()
        self._release()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _take(self, socket: zmq.Socket[bytes], frames: list[bytes], message: Message) -> None:
        """Hands a message to the state machine, under the lock."""

    @abstractmethod
    def _refuse(self, socket: zmq.Socket[bytes], frames: list[bytes], reason: str) -> None:
        """Drops a peer that does not keep the protocol, under the lock."""

    @abstractmethod
    def _flush(self) -> None:
        """Sends what the state machine has to say, under the lock."""

    def _work(self) -> bool:
        """One turn of the engine's work, without the lock; whether there is more to do at once."""
        self.engine.progress()
        now = time.monotonic()
        if now - self._asked > TELEMETRY_SECONDS:  # by the one thread that uses the engine
            self._asked, self._telemetry = now, dict(self.engine.telemetry())
        return False

    def _patience(self) -> float:
        """Seconds between two turns while a room is open and nothing happens."""
        return 0.001

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        """A socket that takes no message above the bound, queues many, and has the keys."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        socket.setsockopt(zmq.SNDHWM, QUEUED)
        socket.setsockopt(zmq.RCVHWM, QUEUED)
        if self._keys is not None:
            socket.curve_publickey = self._keys.public.encode()
            socket.curve_secretkey = self._keys.secret.encode()
            if kind == zmq.ROUTER:
                socket.curve_server = True
            else:
                socket.curve_serverkey = self._keys.public.encode()
        return socket

    def _send(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> str | None:
        """Sends without blocking; what is wrong with the peer, if anything."""
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return f"it has left {QUEUED} messages unread."
        except zmq.ZMQError as error:
            return f"it cannot be reached ({error})."
        return None

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """A call that changes rooms: under the lock, while open, and the thread is woken."""
        with self._lock:
            self._check_open()
            yield
            self._wake()

    def _check_open(self) -> None:
        if self._closing:
            raise EndpointClosed("the endpoint was closed.")

    def _farewell(self) -> None:
        """What peers are told before the sockets go."""

    def _abort_all(self, reason: str) -> None:
        for room in list(self._rooms.open_rooms()):
            self._rooms.abort(room, reason)

    def _release(self) -> None:
        """Gives up sockets, pipe and engine, once no thread uses them."""
        if self._guard is not None:
            self._guard.stop()
        time.sleep(CLOSE_LINGER_SECONDS)
        self._context.destroy(linger=0)
        os.close(self._wake_read)
        os.close(self._wake_write)
        self.engine.close()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wake_write, b"\0")

    def _wait(self, ended: Callable[[], bool], timeout: float | None) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or ended(), timeout)
            return ended()

    def _run(self) -> None:
        more = False
        while True:
            with self._lock:
                closing, waiting = self._closing, bool(self._rooms.open_rooms())
            patience = 0 if closing or more else self._patience() if waiting else IDLE_SECONDS
            try:
                more = self._turn(patience)
            except Exception as error:  # nothing that a room waits for may be lost in silence
                log.exception("%s: a turn failed", type(self).__name__)
                more = False
                with self._changed:
                    self._abort_all(f"the endpoint's thread failed: {error}")
                    self._changed.notify_all()
            if closing:
                return

    def _turn(self, patience: float) -> bool:
        ready = dict(self._poller.poll(int(patience * 1000)))
        if not ready and 0 < patience < 0.001:
            time.sleep(patience)  # zmq waits for whole milliseconds
        if ready.pop(self._wake_read, None):
            os.read(self._wake_read, 4096)
        for socket in ready:
            self._drain(socket)
        more = self._work()
        with self._changed:
            self._rooms.tick()
            self._flush()
            self._changed.notify_all()
        return more

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        with suppress(zmq.Again):
            for _ in range(MESSAGES_A_TURN):
                frames = socket.recv_multipart(zmq.NOBLOCK)
                try:
                    message = decode(frames[-1])
                    with self._lock:
                        if not self._closing:  # who has said goodbye greets nobody
                            self._take(socket, frames, message)
                except Exception as error:  # one peer's fault must not end what serves them all
                    log.warning(
                        "%s: a peer sent what cannot be served: %s",
                        type(self).__name__,
                        error,
                        exc_info=not isinstance(error, WireError),
                    )
                    with self._lock:
                        self._refuse(socket, frames, f"it sent what cannot be served: {error}")


def _guard(context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> ThreadAuthenticator:
    """Lets in who has the keys, and nobody else."""
    from zmq.auth.thread import ThreadAuthenticator

    class Holders:
        def callback(self, domain: str, key: bytes) -> bool:
            return key == keys.public.encode()

    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback(domain="*", credentials_provider=Holders())
    return guard
