"""What carries messages between endpoints, and one that does so inside a process. A message is one
`bytes`. Messages of one connection arrive in order, or not at all.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from disagg.protocol.events import Peer


class Lost(NamedTuple):
    """Instead of a message: the peer's connection has ended, or was refused."""

    reason: str


class Transport(Protocol):
    """Connections by peer: a peer that dials in is known by bytes that the transport chooses, one
    that was dialled by the number that the caller gave. One thread at a time uses it, but any may
    `connect`, and one may be in `wait` while another one uses the rest.
    """

    def bind(self, address: str) -> str:
        """Listens at an endpoint address; returns where: the port that was free, or all addresses
        of the host. Raises ValueError.
        """

    def connect(self, peer: int, address: str | None) -> None:
        """Opens a connection in place of the peer's old one; None only closes that. What was sent
        over the old one still leaves. Raises ValueError for what is no address.
        """

    def send(self, peer: Peer, data: bytes) -> str | None:
        """Takes a message, which leaves with `flush` or `poll`, if not before; returns what is
        wrong with the peer, if anything. Never blocks.
        """

    def flush(self) -> None:
        """Sends what was taken, without blocking."""

    def wait(self, timeout: float, wake: int | None = None) -> None:
        """Waits, `timeout` seconds at most, until `poll` has work or `wake` can be read."""

    def poll(self) -> Iterable[tuple[Peer, bytes | Lost]]:
        """Messages that have arrived, each with its peer; never waits. A transport that notices the
        end of a connection yields Lost after its last message, unless `connect` has replaced it.
        """

    def where(self, peer: Peer) -> str:
        """Where a peer is, in words, for a log; empty if that is not known (any more)."""
        return ""


@dataclass(eq=False, slots=True)
class MemoryConnection:
    """A connection of a MemoryNetwork, which the listener knows by `identity`."""

    dialler: MemoryTransport
    peer: int
    address: str
    identity: bytes
    closed: bool = False


class MemoryNetwork:
    """The listeners of one process, by address. It delivers at once; subclasses may be worse."""

    def __init__(self) -> None:
        self.listeners: dict[str, MemoryTransport] = {}
        self._numbers = itertools.count(1)

    def dial(self, dialler: MemoryTransport, peer: int, address: str) -> MemoryConnection:
        """Opens a connection."""
        return MemoryConnection(dialler, peer, address, self.identity())

    def identity(self) -> bytes:
        """A name that no connection has had."""
        return f"peer {next(self._numbers)}".encode()

    def hang_up(self, connection: MemoryConnection) -> None:
        """Closes a connection."""
        connection.closed = True

    def carry(self, connection: MemoryConnection, way: Literal["up", "down"], data: bytes) -> None:
        """Takes a message to the listener (`up`) or to the side that dialled (`down`)."""
        self.deliver(connection, way, data)

    def deliver(
        self, connection: MemoryConnection, way: Literal["up", "down"], data: bytes
    ) -> None:
        """Hands a message over; without a receiver it is lost."""
        if way == "up" and connection.address in self.listeners:
            self.listeners[connection.address].accept(connection, data)
        elif way == "down" and not connection.closed:
            connection.dialler.inbox.append((connection.peer, data))


class MemoryTransport(Transport):
    """See Transport. It sends at once; `poll` takes what is in the inbox when it begins."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.inbox: deque[tuple[Peer, bytes]] = deque()
        self.connections: dict[Peer, MemoryConnection] = {}
        self._network = network

    def bind(self, address: str) -> str:
        self._network.listeners[address] = self
        return address

    def connect(self, peer: int, address: str | None) -> None:
        old = self.connections.pop(peer, None)
        if old is not None:
            self._network.hang_up(old)
        if address is not None:
            self.connections[peer] = self._network.dial(self, peer, address)

    def accept(self, connection: MemoryConnection, data: bytes) -> None:
        """A message has come over a connection that the peer has dialled."""
        self.connections[connection.identity] = connection
        self.inbox.append((connection.identity, data))

    def send(self, peer: Peer, data: bytes) -> str | None:
        connection = self.connections.get(peer)
        if connection is None or connection.closed:
            return "it cannot be reached."
        self._network.carry(connection, "down" if isinstance(peer, bytes) else "up", data)
        return None

    def poll(self) -> Iterator[tuple[Peer, bytes]]:
        for _ in range(len(self.inbox)):
            yield self.inbox.popleft()
