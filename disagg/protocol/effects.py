"""What a machine wants done: one list, in the order in which it happens."""

from __future__ import annotations

from collections.abc import Hashable

from msgspec import Struct

from disagg.digest.digest import Piece
from disagg.protocol.codec import encode
from disagg.protocol.messages import Hello, Message, Room
from disagg.protocol.peers.link import Link, Read
from kvpool.layout import RequestAddress

Peer = bytes | int
"""A connection as the transport names it: prefill's by the identity of who dialled, decode's by the
number of the rank that it dialled.
"""


class Send(Struct, frozen=True):
    """Send a message."""

    peer: Peer
    data: bytes


class Connect(Struct, frozen=True):
    """End the peer's connection, and open one to an endpoint address unless that is None."""

    peer: int
    address: str | None


class DropPeer(Struct, frozen=True):
    """Give up all reads from a rank."""

    link: Link
    source: int


class ConnectEngine(Struct, frozen=True):
    """Connect the engine to a rank, before anything is read from it."""

    link: Link
    source: int
    hello: Hello


class StartRead(Struct, frozen=True):
    """Read a chunk; `ReadEnded` answers."""

    read: Read


class CancelReads(Struct, frozen=True):
    """Post nothing more of an attempt's reads."""

    attempt: str


class ComputeDigest(Struct, frozen=True):
    """Make digests of pieces of a request; `DigestComputed` answers with `key`."""

    key: Hashable
    address: RequestAddress
    pieces: list[Piece]
    each: bool


class RoomEnded(Struct, frozen=True):
    """A room has ended: who waits for that may go on."""

    room: Room


Effect = (
    Send | Connect | DropPeer | ConnectEngine | StartRead | CancelReads | ComputeDigest | RoomEnded
)


class Effects(list[Effect]):
    """The effects of one event, collected by the machine and its parts."""

    def send(self, peer: Peer, message: Message) -> None:
        """Sends a message. Raises RoomError if no peer would take it."""
        # encoded now, so that values that cannot travel are the caller's error and not the loop's
        self.append(Send(peer, encode(message)))

    def drain(self) -> list[Effect]:
        """All effects, which are then no longer here."""
        taken = list(self)
        self.clear()
        return taken
