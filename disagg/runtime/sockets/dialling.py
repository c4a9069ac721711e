"""Connections to peers that nobody has reached yet: tried again and again, without a word."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator

from disagg.runtime.sockets.connection import Connection
from disagg.runtime.sockets.handshakes import Handshakes
from disagg.runtime.sockets.listener import distrust, tune
from disagg.runtime.sockets.watch import Watch

RETRY_SECONDS = 0.1


class Dialling:
    """Dials, every RETRY_SECONDS while nobody answers."""

    def __init__(self, watch: Watch, handshakes: Handshakes) -> None:
        self._watch, self._handshakes = watch, handshakes
        self._waiting: dict[Connection, float] = {}

    @property
    def due(self) -> float | None:
        """When the next one is dialled."""
        return min(self._waiting.values(), default=None)

    def add_later(self, connection: Connection) -> None:
        """Dials in a while."""
        self._waiting[connection] = time.monotonic() + RETRY_SECONDS

    def discard(self, connection: Connection) -> None:
        """Dials it no more."""
        self._waiting.pop(connection, None)

    def dial_due(self) -> Iterator[tuple[Connection, str]]:
        """Dials all whose time has come. Yields peers that are refused, with the reason."""
        now = time.monotonic()
        for connection in [waiting for waiting, due in self._waiting.items() if due <= now]:
            if (problem := self.dial(connection)) is not None:
                yield connection, problem

    def dial(self, connection: Connection) -> str | None:
        """Tries once; returns why the peer is refused, if it is."""
        self.add_later(connection)
        place = connection.dial and connection.dial.next_place(time.monotonic())
        if not place:
            return None
        try:
            stream = socket.socket(place[0], socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:
            return None
        failed = stream.connect_ex(place[1])
        if failed not in (0, errno.EINPROGRESS):
            stream.close()
            return None
        self.discard(connection)
        self._watch.add(connection, stream)
        return self.reached(connection) if not failed else None

    def reached(self, connection: Connection) -> str | None:
        """The stream is connected, or has failed to; returns why the peer is refused, if it is."""
        stream = connection.stream
        if stream is None:
            return None
        unix, problem = stream.family == socket.AF_UNIX, None
        try:
            failed = stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or (
                # by chance TCP connects a port on which nobody listens to itself
                not unix and stream.getsockname() == stream.getpeername()
            )
            tune(stream)
            if not failed and unix:
                problem = distrust(stream)
            if not failed and problem is None:
                self._handshakes.begin(connection, stream.family)
        except (OSError, ValueError):  # of this side's files: the credentials have logged it
            failed = True
        if failed:
            self._watch.close(connection)
            self.add_later(connection)
            return None
        if problem is not None:
            return problem
        connection.flush()
        self._watch.update(connection)
        return None
