"""Messages over stream sockets: unix sockets within a host, TLS over TCP between hosts.

A peer that dials in is named by random bytes, not by what it claims. Over a unix socket the kernel
says whose process it is, and only this user's and root's are served; over TCP its certificate says
which side it is. What peers can make this process hold is bounded.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterator

from disagg.host.system_calls import Scratch
from disagg.host.unix_sockets import new_path
from disagg.log import log
from disagg.protocol.events import Peer
from disagg.protocol.status import Side
from disagg.runtime.sockets.address import EXHAUSTED, Address, DialledAddress, Listener, origin
from disagg.runtime.sockets.connection import OUT, Connection, Watch
from disagg.runtime.sockets.lifecycle import CLOSE_LINGER_SECONDS, STEPS_A_TURN, Lifecycle
from disagg.runtime.sockets.listen_address import ListenAddress
from disagg.runtime.sockets.tls import TLSCredentials
from disagg.runtime.transport import Lost

ACCEPT_SECONDS = 0.1
"""For which nothing is accepted after files or memory have run out."""
CHECK_SECONDS = 1.0
WARN_SECONDS = 10.0
ACCEPTS_A_TURN = 64
READ_BYTES = 256 << 10
"""Read from one connection in one turn, so that none starves the others."""


class SocketTransport:
    """See Transport. Addresses to bind: ListenAddress; `ipc://*` is a new path that only this user
    can open. Those to dial: `ipc://PATH`, `tcp://HOST:PORT`. TCP carries TLS with `credentials`,
    nothing else. Without them TCP is refused, unless `insecure`: then any process may connect.
    """

    def __init__(self, insecure: bool = False, credentials: TLSCredentials | None = None) -> None:
        self._insecure, self._credentials = insecure, credentials
        self._watch = Watch()
        self._scratch = Scratch(READ_BYTES)
        self._listener: Listener | None = None
        self._peers: dict[Peer, Connection] = {}
        self._requests: deque[tuple[int, Address | None]] = deque()
        self._lives = Lifecycle(self._watch, self._scratch, credentials)
        self._again: dict[Connection, None] = {}
        self._unflushed: dict[Connection, None] = {}
        self._ended: deque[Connection] = deque()
        self._accept_at = 0.0
        self._check_at, self._warn_at = time.monotonic() + CHECK_SECONDS, 0.0
        self._exposed: set[str] = set()
        self._closed = False

    def bind(self, address: str) -> str:
        try:
            if address == "ipc://*":
                address = f"ipc://{new_path()}"
            place = ListenAddress.parse(address)
            if not place.path:
                self._allow_tcp(str(place), "prefill")
            listener = Listener(place)
        except (OSError, ValueError) as error:
            raise ValueError(f"bind {address!r}: {str(error).rstrip('.')}.") from None
        if self._listener is not None:
            self._listener.close()
        for peer in [peer for peer in self._peers if isinstance(peer, bytes)]:
            self._lives.leave(self._peers.pop(peer))
        self._listener = listener
        self._watch.listen(listener.socket)
        return listener.address

    def connect(self, peer: int, address: str | None) -> None:
        # until a peer answers, it dials again and again
        parsed = None
        if address is not None:
            try:
                parsed = Address.parse(address)
                if not parsed.path:
                    self._allow_tcp(parsed.text, "decode")
            except ValueError as error:
                raise ValueError(f"connect: address {address!r}: {error}.") from None
        self._requests.append((peer, parsed))

    def send(self, peer: Peer, data: bytes) -> str | None:
        self._plug()
        connection = self._peers.get(peer)
        if connection is None:
            return "it cannot be reached: its connection has ended."
        problem = connection.send(data)
        if problem is None:
            self._unflushed[connection] = None
        elif connection.problem is None:
            self._drop(connection, problem)
        return problem

    def flush(self) -> None:
        self._plug()
        unflushed, self._unflushed = self._unflushed, {}
        for connection in unflushed:
            if connection.up:
                self._watch.flush(connection)

    def where(self, peer: Peer) -> str:
        connection = self._peers.get(peer)
        return origin(connection.stream) if connection and connection.stream else ""

    def poll(self) -> Iterator[tuple[Peer, bytes | Lost]]:
        self.flush()
        self._lives.tend()
        now = time.monotonic()
        if self._accept_at and self._accept_at <= now and self._listener is not None:
            self._accept_at = 0.0
            self._watch.listen(self._listener.socket)
        if self._check_at <= now:
            self._check_at = now + CHECK_SECONDS
            for connection, problem in self._watch.excesses():
                self._refuse(connection, problem)
        ended, self._ended = self._ended, deque()
        for connection in ended:
            peer = connection.peer
            if isinstance(peer, bytes) or self._peers.get(peer) is connection:
                yield peer, Lost(connection.problem or "")
        for connection in self._turn():
            for message in self._read(connection):
                yield connection.peer, message

    def wait(self, timeout: float, wake: int | None = None) -> None:
        if self._requests or self._again or self._ended:
            return
        due = [time for time in (self._lives.due, self._accept_at) if time]
        if due:
            timeout = min(timeout, min(due) - time.monotonic())
        self._watch.wait(timeout, wake)

    def close(self) -> None:
        """Gives up all connections, once what was sent has had time to leave."""
        if self._closed:
            return
        self._closed = True
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in list(self._peers.values()):
            self._lives.leave(connection)
        until = time.monotonic() + CLOSE_LINGER_SECONDS
        while self._lives.due and (left := until - time.monotonic()) > 0:
            self._watch.wait(left)
            self._turn()
        self._watch.close_all()

    def abandon(self) -> None:
        """In a forked child: closes this process's copies of what stays the parent's."""
        self._closed = True
        self._watch.close_all(shared=True)
        if self._listener is not None:
            self._listener.socket.close()

    def _allow_tcp(self, address: str, side: Side) -> None:
        """Raises ValueError without what TCP needs on this `side`."""
        if self._credentials is not None:
            if self._credentials.side != side:
                raise ValueError(f"these are {self._credentials.side}'s keys")
        elif not self._insecure:
            raise ValueError(
                "TCP needs keys on both sides (kvpool keys FOLDER; keys=... or tls=...). Within "
                "this host use ipc://PATH, or say insecure=True"
            )
        elif address not in self._exposed:
            self._exposed.add(address)
            log.warning(
                "%s: control messages without keys (insecure=True): anyone who reaches this "
                "address can read them and pose as a peer.",
                address,
            )

    def _plug(self) -> None:
        """Puts new connections in the place of old ones."""
        while self._requests:
            peer, address = self._requests.popleft()
            old = self._peers.pop(peer, None)
            if old is not None:
                self._lives.leave(old)
            if address is not None:
                connection = Connection(peer, DialledAddress(address), opening=[])
                self._peers[peer] = connection
                if old is not None and old.problem is not None:
                    self._lives.dial_later(connection)  # or a loop with one that hangs up
                else:
                    self._lives.dial(connection)

    def _turn(self) -> list[Connection]:
        """Accepts, sends what is queued; returns connections to read from."""
        ready, self._again = self._again, {}
        self._lives.steps = STEPS_A_TURN
        for connection, mask in self._watch.ready():
            if connection is None:
                if self._listener is not None:
                    self._accept(self._listener)
            elif connection.leaving:
                self._lives.see_off(connection)
            elif connection.session is None and not connection.up:
                if (problem := self._lives.reached(connection)) is not None:
                    self._refuse(connection, problem)
            else:
                if mask & OUT:
                    self._watch.flush(connection)
                if mask & ~OUT:
                    ready[connection] = None
        return list(ready)

    def _read(self, connection: Connection) -> list[bytes]:
        """One read from a connection, and the messages that it has completed."""
        if connection.stream is None or connection.leaving:
            return []  # it has ended meanwhile
        try:
            more, data = connection.more, self._scratch.view[:0]
            # the first message may come with the end of the handshake
            if not more and (connection.up or self._lives.go_on(connection)):
                data = connection.read(self._scratch)
            messages = connection.take_messages(data) if data or more else []
        except ValueError as error:
            self._refuse(connection, str(error))
            return []
        if connection.more:
            self._again[connection] = None
        elif connection.problem is not None:
            self._end(connection, connection.problem)
        if connection.unread and (excess := self._watch.too_much_unread()):
            self._refuse(*excess)
        return messages

    def _accept(self, listener: Listener) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                self._add(listener.socket.accept()[0])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    continue  # that one has left meanwhile
                self._warn(f"{listener.address}: no connection is accepted: {error.strerror}.")
                self._accept_at = time.monotonic() + ACCEPT_SECONDS
                self._watch.listen(listener.socket, accepting=False)
                return

    def _add(self, stream: socket.socket) -> None:
        """A connection that was accepted. Raises OSError if it has ended."""
        connection = Connection(secrets.token_bytes(16))
        try:
            problem = self._lives.begin(connection, stream)
        except ValueError:  # of this side's files: the credentials have logged it
            stream.close()
            return
        self._peers[connection.peer] = connection
        self._watch.add_stream(connection, stream)
        # before it speaks: a stranger must not take the place of a peer
        if problem is not None:
            self._refuse(connection, problem)
        elif excess := self._watch.one_too_many(connection) or self._lives.one_too_many():
            self._refuse(*excess)

    def _end(self, connection: Connection, problem: str) -> None:
        """A connection has ended. If it was dialled and ended without a word, that was not the
        peer, or not yet: it is dialled again. Of any other that has spoken `poll` tells the end.
        """
        if connection.opening is not None:
            self._watch.close(connection)
            connection.restart()
            self._lives.dial_later(connection)
            return
        self._drop(connection, problem)
        if connection.dial is not None or connection.heard:
            self._ended.append(connection)

    def _refuse(self, connection: Connection, problem: str) -> None:
        """Ends a connection that must not go on."""
        if connection.stream is None:
            return
        who = "a connection" if connection.dial is None else connection.dial.address.text
        self._warn(f"{who} was closed: {problem}")
        connection.opening = None
        self._end(connection, problem)

    def _drop(self, connection: Connection, problem: str) -> None:
        """Closes a connection. What is sent to a dialled peer is refused from now on."""
        if connection.session is not None and connection.session.refused:
            self._lives.leave(connection)  # with an alert, which says why
        else:
            self._lives.discard(connection)
            self._watch.close(connection)
        connection.problem, connection.more = problem, False
        connection.unread.clear()
        if connection.dial is None:
            self._peers.pop(connection.peer, None)

    def _warn(self, text: str) -> None:
        """Not more often than WARN_SECONDS: strangers must not fill the log."""
        level = logging.DEBUG
        if time.monotonic() >= self._warn_at:
            level, self._warn_at = logging.WARNING, time.monotonic() + WARN_SECONDS
        log.log(level, "%s", text)
