"""What carries messages between endpoints. A message is one `bytes`. Messages of one connection
arrive in order, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from disagg.protocol.effects import Peer


class Lost(NamedTuple):
    """Instead of a message: the peer's connection has ended, or was refused."""

    reason: str


class Transport(Protocol):
    """Connections by peer: a peer that dials in is known by bytes that the transport chooses, one
    that was dialled by the number that the caller gave. One thread at a time uses it, but any may
    `connect`, and one may be in `wait` while another one uses the rest.
    """

    def bind(self, address: str) -> str:
        """Listens at an endpoint address; returns the one to dial. Raises ValueError."""

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
