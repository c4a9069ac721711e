"""TLS handshakes that are under way: a few steps a turn, so that rooms go on beside them."""

from __future__ import annotations

import socket

from disagg.host.brief import Scratch
from disagg.runtime.sockets.connection import Connection
from disagg.runtime.sockets.credentials import TLSCredentials
from disagg.runtime.sockets.tls import Session
from disagg.runtime.sockets.watch import Watch

STEPS_A_TURN = 8
"""Each is half of a handshake, and takes about 0.5 ms (P-256)."""
MAX_ACCEPTED = 1024
"""Of peers that have dialled in, at once: OpenSSL keeps 47 KiB for each, and 131 KiB more for a
message that is announced.
"""


class Handshakes:
    """Those of the connections of one transport."""

    def __init__(self, watch: Watch, scratch: Scratch, credentials: TLSCredentials | None) -> None:
        self._watch, self._scratch, self._credentials = watch, scratch, credentials
        self._accepted: dict[Connection, None] = {}
        self._steps = 0

    def begin_turn(self) -> None:
        """Allows as many steps again."""
        self._steps = STEPS_A_TURN

    def begin(self, connection: Connection, family: int) -> None:
        """Begins one over a connected stream, if it has credentials and is no unix socket's; else
        the connection is up. Raises ValueError while the credentials' files are not good.
        """
        if self._credentials is None or family == socket.AF_UNIX:
            connection.up = True
            return
        connection.session = Session(self._credentials)
        if connection.dial is None:
            self._accepted[connection] = None
        else:
            self._step(connection, connection.session, self._scratch.view[:0])

    def crowded_out(self) -> Connection | None:
        """The oldest of those that peers have begun, where there are too many."""
        return next(iter(self._accepted)) if len(self._accepted) > MAX_ACCEPTED else None

    def discard(self, connection: Connection) -> None:
        """The connection has ended."""
        self._accepted.pop(connection, None)

    def go_on(self, connection: Connection) -> bool:
        """Takes a step with what has come; whether the connection is up. Sets its `problem` where
        the stream has ended, and raises ValueError for what is wrong with the peer, which is told
        so by an alert.
        """
        if not self._steps or connection.session is None:
            return False  # epoll names it again in the next turn
        count = connection.receive(self._scratch)
        if count:
            self._steps -= 1
            self._step(connection, connection.session, self._scratch.view[:count])
        return connection.up

    def _step(self, connection: Connection, session: Session, data: memoryview) -> None:
        try:
            connection.up = session.shake(data)
        finally:
            connection.flush()
            self._watch.update(connection)
        if connection.up:
            self.discard(connection)
