"""Messages over ZeroMQ with CURVE keys: a ROUTER for who dials in, a DEALER for each peer that is
dialled.

Never without keys. A ROUTER takes names that strangers claim, and one that claims the next free
name ends the process; it bounds a frame, and not a message of many frames.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

import zmq

from disagg.host.forks import keep_for_ever
from disagg.protocol.effects import Peer
from disagg.protocol.messages import MAX_MESSAGE
from disagg.runtime.keys import Keys
from disagg.runtime.sockets import connection, limits
from disagg.runtime.transport import Lost

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

CLOSE_LINGER_SECONDS = 0.03
"""Time for the last messages to leave. ZeroMQ's own linger waits for ever for a peer that goes away
just then.
"""
IN_ZEROMQ = 100
"""Messages of one peer that ZeroMQ holds each way. It counts no bytes: the others wait here, where
bytes are bounded.
"""
RETRY_SECONDS = 0.005
"""Between two tries to hand over what waits."""
SOCKETS = 16_384
MESSAGES_A_TURN = 1000


@dataclass(eq=False, slots=True)
class Backlog:
    """Messages for a peer that ZeroMQ does not take now."""

    messages: deque[bytes] = field(default_factory=deque)
    nbytes: int = 0

    def excess(self, data: bytes) -> str | None:
        """Why no more waits for the peer, if it is too much."""
        nbytes = self.nbytes + len(data)
        if len(self.messages) < connection.QUEUED and nbytes <= connection.MAX_UNSENT:
            return None
        waiting = f"{len(self.messages):,} messages ({self.nbytes:,} bytes)"
        return f"it does not read what is sent: {waiting} wait for it."


class ZmqTransport:
    """See disagg.runtime.transport.Transport. Prefill's `keys` bind and admit decode's, decode's
    dial and take answers of prefill's.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS)
        self._guard = _guard(self._context, keys.other) if keys.side == "prefill" else None
        self._poller = zmq.Poller()
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        self._peers: dict[zmq.Socket[bytes], int] = {}
        self._dialled: deque[tuple[int, zmq.Socket[bytes] | None]] = deque()
        self._leaving: deque[tuple[float, zmq.Socket[bytes]]] = deque()
        self._backlogs: dict[Peer, Backlog] = {}
        self._abandoned = False

    def bind(self, address: str) -> str:
        """See Transport."""
        if self._keys.side != "prefill":
            raise ValueError(f"bind {address!r}: these are {self._keys.side}'s keys.")
        router = self._socket(zmq.ROUTER)
        router.curve_server = True
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            router.close(linger=0)
            raise ValueError(f"bind {address!r}: {error}.") from None
        if self._router is not None:
            self._retire(self._router)
        self._router = router
        self._poller.register(router, zmq.POLLIN)
        return router.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, peer: int, address: str | None) -> None:
        """See Transport."""
        dealer = None
        if address is not None:
            if self._keys.side != "decode":
                raise ValueError(f"connect: address {address!r}: these are prefill's keys.")
            dealer = self._socket(zmq.DEALER)
            dealer.curve_serverkey = self._keys.other.encode()
            try:
                dealer.connect(address)
            except zmq.ZMQError as error:
                dealer.close(linger=0)
                raise ValueError(f"connect: address {address!r}: {error}.") from None
        self._dialled.append((peer, dealer))

    def send(self, peer: Peer, data: bytes) -> str | None:
        """See Transport."""
        self._plug()
        backlog = self._backlogs.get(peer)
        try:
            if backlog is None and self._taken(peer, data):
                return None
        except zmq.ZMQError as error:
            return f"it cannot be reached ({error})."
        backlog = self._backlogs.setdefault(peer, Backlog())
        problem = backlog.excess(data)
        if problem is not None:
            del self._backlogs[peer]
            return problem
        backlog.messages.append(data)
        backlog.nbytes += len(data)
        return None

    def poll(self, timeout: float, wake: int | None = None) -> Iterator[tuple[Peer, bytes | Lost]]:
        """See Transport. Lost is told of a peer only that does not read."""
        self._plug()
        yield from self._hand_over()
        for socket in self._ready(timeout, wake):
            with suppress(zmq.Again):
                for _ in range(MESSAGES_A_TURN):
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                    yield self._peers.get(socket, frames[0]), frames[-1]

    def wait(self, timeout: float, wake: int | None = None) -> None:
        """See Transport."""
        if not self._dialled:
            self._ready(timeout, wake)

    def _ready(self, timeout: float, wake: int | None) -> list[zmq.Socket[bytes]]:
        if self._backlogs:
            timeout = min(timeout, RETRY_SECONDS)
        if wake is not None:  # for this wait only: it is another's to close
            self._poller.register(wake, zmq.POLLIN)
        try:
            ready = dict(self._poller.poll(int(timeout * 1000)))
        finally:
            if wake is not None:
                self._poller.unregister(wake)
        if not ready and 0 < timeout < 0.001:
            time.sleep(timeout)  # zmq waits for whole milliseconds
        ready.pop(wake, None)
        return list(ready)

    def close(self) -> None:
        """Gives up all connections, once what was sent has had time to leave."""
        if self._context.closed or self._abandoned:
            return
        if self._guard is not None:
            self._guard.stop()
        self._plug()
        time.sleep(CLOSE_LINGER_SECONDS)
        self._context.destroy(linger=0)

    def abandon(self) -> None:
        """In a forked child: keeps all of ZeroMQ's objects, untouched, while the process lives.
        Their destructors wait for threads that only the parent has, and signal the parent's.
        """
        self._abandoned = True
        keep_for_ever(self)

    def _taken(self, peer: Peer, data: bytes) -> bool:
        """Whether ZeroMQ has taken a message. Raises ZMQError if the peer cannot be reached."""
        try:
            if isinstance(peer, int):
                self._dealers[peer].send(data, zmq.NOBLOCK)
            elif self._router is not None:
                self._router.send_multipart([peer, data], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _hand_over(self) -> Iterator[tuple[Peer, Lost]]:
        """Hands over what waits; the peer for which the most does is lost if it is too much for
        all.
        """
        for peer, backlog in list(self._backlogs.items()):
            try:
                while backlog.messages and self._taken(peer, backlog.messages[0]):
                    backlog.nbytes -= len(backlog.messages.popleft())
            except zmq.ZMQError:
                backlog.messages.clear()  # it has left
            if not backlog.messages:
                del self._backlogs[peer]
        while sum(each.nbytes for each in self._backlogs.values()) > limits.MAX_UNSENT_BY_ALL:
            most = max(self._backlogs, key=lambda peer: self._backlogs[peer].nbytes)
            nbytes = self._backlogs.pop(most).nbytes
            yield most, Lost(f"{nbytes:,} bytes wait for it, the most of all peers.")

    def _plug(self) -> None:
        """Puts new sockets, and with them new identities, in the place of old ones."""
        while self._dialled:
            peer, dealer = self._dialled.popleft()
            self._backlogs.pop(peer, None)
            old = self._dealers.pop(peer, None)
            if old is not None:
                del self._peers[old]
                self._retire(old)
            if dealer is not None:
                self._dealers[peer], self._peers[dealer] = dealer, peer
                self._poller.register(dealer, zmq.POLLIN)
        while self._leaving and self._leaving[0][0] < time.monotonic():
            self._leaving.popleft()[1].close(linger=0)

    def _retire(self, socket: zmq.Socket[bytes]) -> None:
        """Closes a socket once what was sent has had time to leave."""
        self._poller.unregister(socket)
        self._leaving.append((time.monotonic() + CLOSE_LINGER_SECONDS, socket))

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        """A socket that takes no message above the bound, queues few, and has the keys."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        socket.setsockopt(zmq.SNDHWM, IN_ZEROMQ)
        socket.setsockopt(zmq.RCVHWM, IN_ZEROMQ)
        socket.curve_publickey = self._keys.public.encode()
        socket.curve_secretkey = self._keys.secret.encode()
        return socket


def _guard(context: zmq.Context[zmq.Socket[bytes]], admitted: str) -> ThreadAuthenticator:
    """Lets only the holders of one key connect."""
    from zmq.auth.thread import ThreadAuthenticator

    holders = SimpleNamespace(callback=lambda domain, key: key == admitted.encode())
    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback(domain="*", credentials_provider=holders)
    return guard
