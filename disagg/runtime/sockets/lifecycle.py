"""Connections: dialled until a peer answers, encrypted a few steps a turn, and closed."""

from __future__ import annotations

import errno
import socket
import time
from contextlib import suppress

from disagg.host.system_calls import Scratch
from disagg.runtime.sockets.address import distrust, tune
from disagg.runtime.sockets.connection import Connection, Excess, Watch
from disagg.runtime.sockets.tls import Session, TLSCredentials

RETRY_SECONDS = 0.1
CLOSE_LINGER_SECONDS = 0.03
"""Time for the last messages to leave."""
STEPS_A_TURN = 8
"""Of handshakes, so that rooms go on beside them. Each is half of one: about 0.5 ms (P-256)."""
MAX_ACCEPTED = 1024
"""Handshakes of peers that have dialled in, at once: OpenSSL keeps 47 KiB for each, and 131 KiB
more for a message that is announced.
"""


class Lifecycle:
    """Of the connections of one transport. Where a peer is refused, methods return why."""

    def __init__(self, watch: Watch, scratch: Scratch, credentials: TLSCredentials | None) -> None:
        self._watch, self._scratch, self._credentials = watch, scratch, credentials
        self._due: dict[Connection, float] = {}
        """When each is dialled, or closed if it leaves."""
        self._accepted: dict[Connection, None] = {}
        """Those that go on with the handshake of a peer that has dialled in."""
        self.steps = 0
        """Of handshakes, that may be taken in this turn."""

    @property
    def due(self) -> float | None:
        """When the next one is dialled, or closed."""
        return min(self._due.values(), default=None)

    def tend(self) -> None:
        """Dials and closes those whose time has come."""
        now = time.monotonic()
        for connection in [waiting for waiting, due in self._due.items() if due <= now]:
            if connection.leaving:
                del self._due[connection]
                self._watch.close(connection)
            else:
                self.dial(connection)

    def discard(self, connection: Connection) -> None:
        """Dials it no more, nor goes on with its handshake."""
        self._due.pop(connection, None)
        self._accepted.pop(connection, None)

    def dial_later(self, connection: Connection) -> None:
        self._due[connection] = time.monotonic() + RETRY_SECONDS

    def dial(self, connection: Connection) -> None:
        """Tries once, and again later if no peer answers."""
        self.dial_later(connection)
        place = connection.dial and connection.dial.next_place(time.monotonic())
        if not place:
            return
        try:
            stream = socket.socket(place[0], socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:
            return
        if stream.connect_ex(place[1]) not in (0, errno.EINPROGRESS):
            stream.close()
            return
        del self._due[connection]
        self._watch.add_stream(connection, stream)

    def reached(self, connection: Connection) -> str | None:
        """The stream that was dialled is connected, or has failed to."""
        stream, problem = connection.stream, None
        if stream is None:
            return None
        try:
            failed = stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or (
                # TCP may by chance connect a port without a listener to itself
                stream.family != socket.AF_UNIX and stream.getsockname() == stream.getpeername()
            )
            if not failed:
                problem = self.begin(connection, stream)
        except (OSError, ValueError):  # of this side's files: the credentials have logged it
            failed = True
        if failed:
            self._watch.close(connection)
            self.dial_later(connection)
        elif problem is None:
            self._watch.flush(connection)
        return problem

    def begin(self, connection: Connection, stream: socket.socket) -> str | None:
        """Begins a handshake over a connected stream; without credentials, and over a unix socket,
        the connection is up, unless another user is at the other end: returns why that is refused.
        Raises OSError, and ValueError while the credentials' files are not good.
        """
        tune(stream)
        unix = stream.family == socket.AF_UNIX
        if unix and (problem := distrust(stream)) is not None:
            return problem
        if unix or self._credentials is None:
            connection.up = True
            return None
        connection.session = Session(self._credentials)
        if connection.dial is None:
            self._accepted[connection] = None
        else:
            self._step(connection, connection.session, self._scratch.view[:0])
        return None

    def one_too_many(self) -> Excess | None:
        """The oldest handshake of a peer that has dialled in, where there are too many."""
        if len(self._accepted) <= MAX_ACCEPTED:
            return None
        return next(iter(self._accepted)), f"{MAX_ACCEPTED} TLS handshakes are under way already."

    def go_on(self, connection: Connection) -> bool:
        """Takes a step with what has come; whether the connection is up. Sets `problem` at the end
        of the stream; raises ValueError for a peer at fault, which an alert tells so.
        """
        if not self.steps or connection.session is None:
            return False  # epoll names it again in the next turn
        count = connection.receive(self._scratch)
        if count:
            self.steps -= 1
            self._step(connection, connection.session, self._scratch.view[:count])
        return connection.up

    def _step(self, connection: Connection, session: Session, data: memoryview) -> None:
        try:
            connection.up = session.shake(data)
        finally:
            self._watch.flush(connection)
        if connection.up:
            self._accepted.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        """Closes a connection: at once if no peer was reached, else when the peer has done so too,
        or after CLOSE_LINGER_SECONDS.
        """
        self.discard(connection)
        if not connection.up and connection.session is None:
            self._watch.close(connection)
            return
        connection.unread.clear()
        connection.leaving = True
        self._due[connection] = time.monotonic() + CLOSE_LINGER_SECONDS
        self.see_off(connection)

    def see_off(self, connection: Connection) -> None:
        """Sends what is left, then the end; drops what has come."""
        connection.flush()
        if connection.session is not None and not connection.waiting:
            connection.session.end()
        self._watch.flush(connection)
        if connection.stream is not None and not connection.waiting:
            with suppress(OSError):
                connection.stream.shutdown(socket.SHUT_WR)
        # closed with bytes unread, TCP would take back what was sent
        if connection.receive(self._scratch) == 0:
            del self._due[connection]
            self._watch.close(connection)
