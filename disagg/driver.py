"""The thread of an endpoint: it alone touches the sockets and the engine.

Calls may come from any thread. They take the lock, change the state machine and wake the thread,
which hands messages to the state machine, sends what it has to say, and does the engine's work in
between.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import zmq

from disagg.engines.base import Engine
from disagg.room import Failure, KVPoll
from disagg.wire import MAX_MESSAGE, PROTOCOL, Hello, Message, Room, WireError, decode
from kvpool.layout import PoolLayout

log = logging.getLogger("disagg")

BUSY_MS = 1
IDLE_MS = 50
LINGER_MS = 200


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

    def open_rooms(self) -> list[Room]:
        """Rooms that have not ended."""


class Driver(ABC):
    """Layout, engine, thread and lock, and what both endpoints say of rooms.

    The subclass sets `_rooms` and starts the thread once it is complete.
    """

    _rooms: Rooms

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
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def poll(self, room: Room) -> KVPoll:
        """State of a room."""
        with self._lock:
            return self._rooms.poll(room)

    def wait(self, room: Room, timeout: float | None = None) -> KVPoll:
        """Blocks until the room has ended or `timeout` seconds have passed; returns its state."""
        self._wait(lambda: self._rooms.poll(room).ended, timeout)
        return self.poll(room)

    def failure(self, room: Room) -> Failure | None:
        """Why the room failed, and on whose side; None if it did not."""
        with self._lock:
            return self._rooms.failure(room)

    def abort(self, room: Room, reason: str) -> None:
        """Ends a room that has not ended; the other side is told the reason."""
        with self._lock:
            self._rooms.abort(room, reason)
        self._wake()

    def forget(self, room: Room) -> None:
        """Drops what is kept of an ended room. Raises ValueError if it has not ended."""
        with self._lock:
            self._rooms.forget(room)

    def close(self) -> None:
        """Aborts open rooms, tells peers, stops the thread and closes the engine."""
        with self._lock:
            if self._closing:
                return
            for room in self._rooms.open_rooms():
                self._rooms.abort(room, "the endpoint was closed.")
            self._closing = True
        self._wake()
        self._thread.join()
        self._context.destroy(linger=LINGER_MS)
        os.close(self._wake_read)
        os.close(self._wake_write)
        self.engine.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _take(self, socket: zmq.Socket[bytes], frames: list[bytes], message: Message) -> None:
        """Hands a message to the state machine, under the lock."""

    @abstractmethod
    def _flush(self) -> None:
        """Sends what the state machine has to say, under the lock."""

    def _work(self) -> bool:
        """One turn of the engine's work, without the lock; whether there is more to do at once."""
        self.engine.progress()
        return False

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        """A polled socket that takes no message above the bound."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wake_write, b"\0")

    def _wait(self, ended: Callable[[], bool], timeout: float | None) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(ended, timeout))

    def _run(self) -> None:
        more = False
        while True:
            with self._lock:
                closing, waiting = self._closing, bool(self._rooms.open_rooms())
            patience = 0 if closing or more else BUSY_MS if waiting else IDLE_MS
            ready = dict(self._poller.poll(patience))
            if ready.pop(self._wake_read, None):
                os.read(self._wake_read, 4096)
            for socket in ready:
                self._drain(socket)
            more = self._work()
            with self._changed:
                self._flush()
                self._changed.notify_all()
            if closing:
                return

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        with suppress(zmq.Again):
            while True:
                frames = socket.recv_multipart(zmq.NOBLOCK)
                try:
                    message = decode(frames[-1])
                except WireError as error:
                    log.warning("dropped a message: %s", error)
                    continue
                with self._lock:
                    self._take(socket, frames, message)
