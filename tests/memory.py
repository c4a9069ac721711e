"""Messages inside a process, for endpoints that a test turns; a subclass of MemoryNetwork may be a
worse network.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from disagg.protocol.effects import Peer


@dataclass(eq=False, slots=True)
class MemoryConnection:
    """A connection of a MemoryNetwork, which the listener knows by `identity`."""

    dialler: MemoryTransport
    peer: int
    address: str
    identity: bytes
    closed: bool = False


class MemoryNetwork:
    """Who listens where. It delivers at once."""

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


class MemoryTransport:
    """A `disagg.Transport`. It sends at once; `poll` takes what is in the inbox when it begins."""

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
        """A message has come over a connection that somebody else has dialled."""
        self.connections[connection.identity] = connection
        self.inbox.append((connection.identity, data))

    def send(self, peer: Peer, data: bytes) -> str | None:
        connection = self.connections.get(peer)
        if connection is None or connection.closed:
            return "it cannot be reached."
        self._network.carry(connection, "down" if isinstance(peer, bytes) else "up", data)
        return None

    def flush(self) -> None:
        """Nothing is held back."""

    def wait(self, timeout: float, wake: int | None = None) -> None:
        """What comes is there already."""

    def poll(self) -> Iterator[tuple[Peer, bytes]]:
        for _ in range(len(self.inbox)):
            yield self.inbox.popleft()

    def where(self, peer: Peer) -> str:
        return ""
