"""Which connections can be read or written now: epoll, and what it watches each for."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

from disagg.host import brief
from disagg.runtime.sockets.connection import Connection

IN, OUT = select.EPOLLIN, select.EPOLLOUT


class Watch:
    """An epoll set of connections by file number, of a listener and of a file to be woken by."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._ready = brief.ReadyFiles(self._epoll.fileno())
        self._connections: dict[int, Connection] = {}
        self._wake: int | None = None

    def __len__(self) -> int:
        return len(self._connections)

    def connections(self) -> list[Connection]:
        """All that are watched."""
        return list(self._connections.values())

    def add(self, connection: Connection, stream: socket.socket) -> None:
        """Gives a connection its stream."""
        connection.stream = stream
        connection.mask = IN if connection.up or connection.session else OUT
        self._connections[stream.fileno()] = connection
        self._epoll.register(stream, connection.mask)

    def update(self, connection: Connection) -> None:
        """Watches for room to write where something is queued."""
        mask = IN | OUT if connection.waiting else IN
        if connection.stream is not None and mask != connection.mask:
            connection.mask = mask
            self._epoll.modify(connection.stream, mask)

    def close(self, connection: Connection) -> None:
        """Closes a connection's stream, for both sides: a forked child may hold it open."""
        stream = connection.stream
        if stream is None:
            return
        connection.stream, connection.up = None, False
        del self._connections[stream.fileno()]
        with suppress(OSError):
            self._epoll.unregister(stream)
        with suppress(OSError):
            stream.shutdown(socket.SHUT_RDWR)
        stream.close()

    def listen(self, listener: socket.socket, accepting: bool = True) -> None:
        """Watches for connections to accept, or stops to for a time."""
        mask = IN if accepting else 0
        try:
            self._epoll.modify(listener, mask)
        except FileNotFoundError:
            self._epoll.register(listener, mask)

    def wait(self, timeout: float, wake: int | None) -> Iterator[tuple[Connection | None, int]]:
        """Waits at most `timeout` seconds, or until `wake` can be read. Yields connections with
        what they are ready for, and None if the listener is.
        """
        if wake is not None:
            self._heed(wake)
        ready = self._epoll.poll(timeout) if timeout >= 0.001 else self._ready.take()
        if not ready and 0 < timeout < 0.001:
            time.sleep(timeout)  # epoll waits for whole milliseconds
        for number, mask in ready:
            if number != self._wake:
                yield self._connections.get(number), mask

    def pause(self, timeout: float, wake: int | None) -> None:
        """Waits as `wait` does, while another thread may use all this."""
        if wake is not None:
            self._heed(wake)
        if timeout >= 0.001:
            self._epoll.poll(timeout)
        elif timeout > 0:
            time.sleep(timeout)

    def end(self, *, shared: bool = False) -> None:
        """Closes everything. If it is `shared` with the process that this one was forked from,
        only this process's copies.
        """
        for connection in self.connections():
            if shared and connection.stream is not None:
                connection.stream.close()
            else:
                self.close(connection)
        self._epoll.close()

    def _heed(self, wake: int) -> None:
        if wake != self._wake and self._wake is not None:
            with suppress(OSError):
                self._epoll.unregister(self._wake)
        self._wake = wake
        self._ready.watch(wake, IN)  # another file may have got the number of one that was closed
