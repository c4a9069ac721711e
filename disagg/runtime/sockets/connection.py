"""Messages as frames of one non-blocking stream: a length, then the message. Which streams can be
read or written now, by epoll. And what peers can make a process hold, and for how long: memory is
taken for what has arrived, never for what a length announces.
"""

from __future__ import annotations

import resource
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from disagg.host import system_calls
from disagg.protocol.codec import MAX_MESSAGE
from disagg.protocol.events import Peer
from disagg.runtime.sockets.address import DialledAddress
from disagg.runtime.sockets.tls import Session

IN, OUT = select.EPOLLIN, select.EPOLLOUT
LENGTH = struct.Struct(">I")
MESSAGES_A_TURN = 1000
QUEUED = 100_000
"""Messages that wait for one peer before it is given up as one that does not read."""
MAX_UNSENT = 256 << 20
"""Bytes that wait for one peer."""
MAX_UNREAD = 256 << 20
"""Bytes of unfinished messages, of all connections together."""
MAX_UNFINISHED = 30
"""Looks, a second apart, at an unfinished message: a process that was stopped did not look."""
MAX_SILENT = 5
"""Looks in which nothing at all has come of a peer that has dialled in: it says hello at once."""
MAX_UNSENT_BY_ALL = 1 << 30
"""Bytes that wait for all peers together."""
MAX_CONNECTIONS = 4096
"""At once; at most half of the files that this process may open."""

MAX_OPENING = 16
ENDED = "its connection has ended."
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_PIECE = 64 << 10
"""Bytes that are sent at once, and that are read at once from TLS, whose buffers grow to that."""


@dataclass(eq=False, slots=True)
class Connection:
    """A stream to one peer. `dial` is what this side dials; None for a peer that has dialled in.
    `opening` is what was sent to a dialled peer that has sent nothing yet: if it hangs up, the
    next one that answers there gets it too.
    """

    peer: Peer
    dial: DialledAddress | None = None
    stream: socket.socket | None = None
    session: Session | None = None
    """TLS, once the stream is connected."""
    up: bool = False
    """Whether messages can go: the stream is connected, and TLS if it has that."""
    heard: bool = False
    """Whether a message has come."""
    problem: str | None = None
    """Why it has ended."""
    mask: int = 0
    """What epoll watches it for."""
    age: int = 0
    """Seconds for which a message is unfinished."""
    more: bool = False
    """Whether `unread` may hold another whole message."""
    leaving: bool = False
    """Whether it was given up: what was sent still leaves, what arrives is dropped."""
    unread: bytearray = field(default_factory=bytearray)
    unsent: deque[bytes | memoryview] = field(default_factory=deque)
    opening: list[bytes] | None = None
    _queued_bytes: int = 0
    _piece: bytes = b""

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the stream has not taken yet."""
        sealed = 0 if self.session is None else self.session.sealed.pending
        return self._queued_bytes + len(self._piece) + sealed

    @property
    def waiting(self) -> bool:
        """Whether the stream has not taken all that it is to take now."""
        sealed = self.session is not None and self.session.sealed.pending
        return bool(self._piece or sealed or (self.up and self.unsent))

    def send(self, data: bytes) -> str | None:
        """Queues a message; returns what is wrong with the peer, if anything."""
        if self.problem is not None:
            return f"it cannot be reached: {self.problem}"
        frame = LENGTH.pack(len(data)) + data
        if len(self.unsent) >= QUEUED or self.unsent_bytes + len(frame) > MAX_UNSENT:
            waiting = f"{len(self.unsent):,} messages ({self.unsent_bytes:,} bytes)"
            return f"it does not read what is sent: {waiting} wait for it."
        if self.opening is not None:
            self.opening.append(frame)
            if len(self.opening) > MAX_OPENING:
                self.opening = None
        self.unsent.append(frame)
        self._queued_bytes += len(frame)
        return None

    def flush(self) -> None:
        """Sends what is queued, as far as the stream takes it."""
        if self.stream is None:
            return
        try:
            while self.waiting:
                self._piece = self._piece or self._next_piece()
                sent = system_calls.send(self.stream.fileno(), self._piece, _FLAGS)
                self._piece = self._piece[sent:]
        except BlockingIOError:
            return
        except OSError:  # no message may follow; what the peer said last is still read
            self.unsent.clear()
            self._queued_bytes, self._piece = 0, b""
            with suppress(OSError):
                self.stream.shutdown(socket.SHUT_RDWR)

    def receive(self, scratch: system_calls.Scratch) -> int | None:
        """Bytes of the stream in `scratch` now; None if it has none, 0 at its end: `problem`."""
        if self.stream is None:
            return None
        most = len(scratch.view) if self.session is None else _PIECE
        try:
            count = scratch.receive(self.stream.fileno(), most, _FLAGS)
        except BlockingIOError:
            return None
        except OSError as error:
            self.problem = self.problem or f"its connection broke ({error.strerror})."
            return 0
        if not count:
            self.problem = self.problem or ENDED
        return count

    def read(self, scratch: system_calls.Scratch) -> memoryview:
        """What has arrived for messages, in `scratch`. Raises ValueError for a fault of its TLS."""
        count = self.receive(scratch) or 0
        if self.session is not None and (count or self.session.incoming.pending):
            count = self.session.unseal(scratch.view[:count], scratch.view)
            if self.session.ended:
                self.problem = ENDED
        return scratch.view[:count]

    def take_messages(self, data: memoryview) -> list[bytes]:
        """The messages that are complete with `data`, at most MESSAGES_A_TURN. Raises ValueError
        for a length that no message has, when all messages before it were taken.
        """
        if self.unread:
            self.unread += data
            with memoryview(self.unread) as view:
                messages, end, self.more = _split(view)
            del self.unread[:end]
        else:
            messages, end, self.more = _split(data)
            self.unread += data[end:]
        if messages:
            self.heard, self.opening, self.age = True, None, 0
        return messages

    def restart(self) -> None:
        """Prepares to dial again: the next stream begins as the last one did."""
        self.problem, self.up, self.more, self.age = None, False, False, 0
        self.session, self._piece = None, b""
        self.unread.clear()
        self.unsent = deque(self.opening or ())
        self._queued_bytes = sum(map(len, self.unsent))

    def _next_piece(self) -> bytes:
        if self.session is None:
            return self._next_frames()
        if not self.session.sealed.pending:
            self.session.seal(self._next_frames())
        return self.session.sealed.read()

    def _next_frames(self) -> bytes:
        frames, left = [], _PIECE
        while self.unsent and left:
            frame = self.unsent.popleft()
            if len(frame) > left:
                self.unsent.appendleft(memoryview(frame)[left:])
                frame = memoryview(frame)[:left]
            left -= len(frame)
            frames.append(frame)
        self._queued_bytes -= _PIECE - left
        return b"".join(frames)


def _split(data: memoryview) -> tuple[list[bytes], int, bool]:
    """Whole messages, the bytes that they and their lengths take, and whether more may follow."""
    messages: list[bytes] = []
    start, end = 0, len(data)
    while end - start >= LENGTH.size:
        if len(messages) == MESSAGES_A_TURN:
            return messages, start, True
        (size,) = LENGTH.unpack_from(data, start)
        if not 0 < size <= MAX_MESSAGE:
            if messages:
                return messages, start, True
            raise ValueError(
                f"it sent what is no message: a length of {size:,} bytes, where 1 to "
                f"{MAX_MESSAGE:,} are possible. TLS, and ZeroMQ of an older kvpool with keys, read "
                "as such a length: are keys set on one side only? Do both run the same kvpool?"
            )
        body, stop = start + LENGTH.size, start + LENGTH.size + size
        if stop > end:
            break
        messages.append(bytes(data[body:stop]))
        start = stop
    return messages, start, False


Excess = tuple[Connection, str]
"""A connection to be closed, and why."""


class Watch:
    """An epoll set of connections by file number, of a listener and of a file to be woken by."""

    def __init__(self) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = files == resource.RLIM_INFINITY
        self._most = MAX_CONNECTIONS if unlimited else min(MAX_CONNECTIONS, files // 2)
        self._epoll = select.epoll()
        self._ready = system_calls.ReadyFiles(self._epoll.fileno())
        self._connections: dict[int, Connection] = {}
        self._wake: int | None = None

    def add_stream(self, connection: Connection, stream: socket.socket) -> None:
        """Gives a connection its stream."""
        connection.stream = stream
        connection.mask = IN if connection.up or connection.session else OUT
        self._connections[stream.fileno()] = connection
        self._epoll.register(stream, connection.mask)

    def flush(self, connection: Connection) -> None:
        """Sends what is queued as far as the stream takes it, and watches for room for the rest."""
        connection.flush()
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
        self._ready.watch(listener.fileno(), IN if accepting else 0)

    def ready(self) -> Iterator[tuple[Connection | None, int]]:
        """Connections with what they are ready for, and None if the listener is."""
        for number, mask in self._ready.take():
            if number != self._wake:
                yield self._connections.get(number), mask

    def wait(self, timeout: float, wake: int | None = None) -> None:
        """Waits at most `timeout` seconds, or until something is ready or `wake` can be read.
        Another thread may use all this meanwhile.
        """
        if wake is not None:
            if wake != self._wake and self._wake is not None:
                with suppress(OSError):
                    self._epoll.unregister(self._wake)
            self._wake = wake
            # also if it is the same: another file may have got the number of one that was closed
            self._ready.watch(wake, IN)
        if timeout >= 0.001:
            self._epoll.poll(timeout)
        elif timeout > 0:
            time.sleep(timeout)  # epoll waits for whole milliseconds

    def close_all(self, *, shared: bool = False) -> None:
        """Closes everything; in a forked child (`shared`) this process's copies only."""
        for connection in list(self._connections.values()):
            if shared and connection.stream is not None:
                connection.stream.close()
            else:
                self.close(connection)
        self._epoll.close()

    def excesses(self) -> Iterator[Excess]:
        """Connections that take too long over a message, or have too much unsent; once a second."""
        connections = list(self._connections.values())
        if sum(connection.unsent_bytes for connection in connections) > MAX_UNSENT_BY_ALL:
            most = max(connections, key=lambda connection: connection.unsent_bytes)
            yield most, f"{most.unsent_bytes:,} bytes wait for it, the most of all peers."
        for connection in connections:
            if connection.unread or (connection.dial is None and not connection.heard):
                connection.age += 1
                if connection.age > MAX_UNFINISHED:
                    yield connection, f"a message was not finished within {MAX_UNFINISHED} s."
                elif connection.age > MAX_SILENT and not connection.unread:
                    silent = "said nothing" if connection.up else "did not finish its TLS handshake"
                    yield connection, f"it {silent} within {MAX_SILENT} s."

    def one_too_many(self, newest: Connection) -> Excess | None:
        """If too many are open, the oldest of a peer that has dialled in and sent no message."""
        if len(self._connections) <= self._most:
            return None
        strangers = (
            connection for connection in self._connections.values() if connection.dial is None
        )
        silent = (
            connection for connection in strangers if not (connection.leaving or connection.heard)
        )
        return next(silent, newest), f"{self._most} connections are open already."

    def too_much_unread(self) -> Excess | None:
        """The connection that holds most of unfinished messages, if all hold too much of them."""
        connections = self._connections.values()
        if sum(len(connection.unread) for connection in connections) <= MAX_UNREAD:
            return None
        most = max(connections, key=lambda connection: len(connection.unread))
        return most, f"{len(most.unread):,} bytes of an unfinished message, the most of all peers."
