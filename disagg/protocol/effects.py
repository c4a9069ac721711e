"""What a machine wants done: one list, in the order in which it happens."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from disagg.digest.digest import Piece
from disagg.protocol.link import Link
from disagg.protocol.messages import Hello, Message, Room, encode
from disagg.protocol.read import Read
from kvpool.layout import RequestAddress

Peer = bytes | int
"""A connection as the transport names it: prefill's by the identity of who dialled, decode's by the
number of the rank that it dialled.
"""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message."""

    peer: Peer
    data: bytes


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a connection to an endpoint address, in place of the peer's old one."""

    peer: int
    address: str


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close a peer's connection."""

    peer: int


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Give up all reads from a rank."""

    link: Link
    source: int


@dataclass(frozen=True, slots=True)
class ConnectEngine:
    """Connect the engine to a rank, before anything is read from it."""

    link: Link
    source: int
    hello: Hello


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read a chunk; `ReadEnded` answers."""

    read: Read


@dataclass(frozen=True, slots=True)
class CancelReads:
    """Post nothing more of an attempt's reads."""

    attempt: str


@dataclass(frozen=True, slots=True)
class ComputeDigest:
    """Make digests of pieces of a request; `DigestComputed` answers with `key`."""

    key: Hashable
    address: RequestAddress
    pieces: list[Piece]
    each: bool


@dataclass(frozen=True, slots=True)
class RoomEnded:
    """A room has ended: who waits for that may go on."""

    room: Room


Effect = (
    Send
    | Dial
    | HangUp
    | DropPeer
    | ConnectEngine
    | StartRead
    | CancelReads
    | ComputeDigest
    | RoomEnded
)


class Effects(list[Effect]):
    """The effects of one event, collected by the machine and its parts."""

    def send(self, peer: Peer, message: Message) -> None:
        """Encodes at once: a message that cannot be sent is an error of the event."""
        self.append(Send(peer, encode(message)))

    def drain(self) -> list[Effect]:
        """All effects, which are then no longer here."""
        taken = list(self)
        self.clear()
        return taken
