"""Connections that were given up: what was sent still leaves, what comes is nobody's."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

from disagg.host.brief import Scratch
from disagg.runtime.sockets.connection import Connection
from disagg.runtime.sockets.watch import Watch

CLOSE_LINGER_SECONDS = 0.03
"""Time for the last messages to leave."""


class Leaving:
    """Sees connections off, each for CLOSE_LINGER_SECONDS at most."""

    def __init__(self, watch: Watch, scratch: Scratch) -> None:
        self._watch, self._scratch = watch, scratch
        self._until: dict[Connection, float] = {}

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._until

    @property
    def due(self) -> float | None:
        """When the next one is closed."""
        return min(self._until.values(), default=None)

    def add(self, connection: Connection) -> None:
        """Closes a connection: at once if nobody was reached, else when the peer has done so too,
        or its time is over.
        """
        if not connection.up and connection.session is None:
            self._watch.close(connection)
            return
        connection.unread.clear()
        self._until[connection] = time.monotonic() + CLOSE_LINGER_SECONDS
        self.see_off(connection)

    def see_off(self, connection: Connection) -> None:
        """Sends what is left, then the end; drops what has come."""
        connection.flush()
        if connection.session is not None and not connection.waiting:
            connection.session.end()
            connection.flush()
        self._watch.update(connection)
        if connection.stream is not None and not connection.waiting:
            with suppress(OSError):
                connection.stream.shutdown(socket.SHUT_WR)
        # closed with bytes unread, TCP would take back what was sent
        if connection.receive(self._scratch) == 0:
            self._close(connection)

    def close_due(self, now: float) -> None:
        """Closes those whose time is over."""
        for connection in [leaving for leaving, until in self._until.items() if until <= now]:
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        del self._until[connection]
        self._watch.close(connection)
