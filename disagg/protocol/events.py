"""What a machine is told, and what it wants done: effects, in the order in which they happen."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import TYPE_CHECKING

from msgspec import Struct

from disagg.digest.arrived import ArrivedDigests
from disagg.digest.digest import Piece
from disagg.protocol.codec import Aux, encode
from disagg.protocol.messages import Hello, Message, Room
from disagg.protocol.metrics import RoomSpan, Shares
from disagg.protocol.peers.link import Link, PrefillRank, Read
from disagg.protocol.rooms.offered import LayerRange
from disagg.protocol.versions import PROTOCOL, excess, lacks, spoken
from kvpool.layout import RequestAddress

if TYPE_CHECKING:
    from kvpool.device import Event as DeviceEvent

Peer = bytes | int
"""A connection as the transport names it: prefill's by the identity of the decode that dialled,
decode's by the number of the rank that it dialled.
"""


class Received(Struct, frozen=True):
    """A message of a peer; with a hello its `origin`, as far as the transport knows."""

    peer: Peer
    message: Message
    origin: str = ""


class Malformed(Struct, frozen=True):
    """A peer sent what cannot be read, or what cannot be served."""

    peer: Peer
    reason: str


class Unreachable(Struct, frozen=True):
    """A message could not be sent to a peer."""

    peer: Peer
    reason: str


class Tick(Struct, frozen=True):
    """Time has passed."""


class DigestComputed(Struct, frozen=True):
    """The answer to `ComputeDigest`: little-endian uint64, or None and the reason."""

    key: Hashable
    values: bytes | None
    problem: str = ""


class AbortRoom(Struct, frozen=True):
    room: Room
    reason: str


class RejectRoom(AbortRoom, frozen=True):
    """Prefill's caller ends a room, known to a decode or not."""


class ForgetRoom(Struct, frozen=True):
    room: Room


class AbortAll(Struct, frozen=True):
    """Every open room ends; with `closing`, peers learn that the endpoint is gone."""

    reason: str
    closing: bool = False


class Drain(Struct, frozen=True):
    """From now on no new rooms; those that are open end as they would. With `stopped`, those end at
    once for which the caller still has something to do.
    """

    stopped: bool = False


class EngineRenewed(Struct, frozen=True):
    """What decodes are connected to by prefill's engine is gone; they connect by `metadata`."""

    reason: str
    metadata: bytes


class OfferChunk(Struct, frozen=True, kw_only=True):
    """Prefill's caller offers positions `tokens` of a request, of `layers` or of all, once the
    device has done the work before `after`.
    """

    room: Room
    table: RequestAddress
    tokens: range
    last: bool
    aux: Aux = {}
    after: DeviceEvent | None = None
    layers: LayerRange | None = None


class ConnectLink(Struct, frozen=True):
    """Decode's caller adds a prefill."""

    link: Link


class DisconnectLink(Struct, frozen=True):
    """Decode's caller removes a prefill."""

    link: Link


class RequestRoom(Struct, frozen=True, kw_only=True):
    """Decode's caller asks for positions `start` to the end of `table`, or with `at_most` to one
    before it, and for the aux values `expected`; or (`declined`) that prefill's pages come back.
    Its spans belong to `traceparent`.
    """

    room: Room
    table: RequestAddress
    start: int
    link: Link
    expected: Collection[str] = ()
    declined: bool = False
    at_most: bool = False
    traceparent: str | None = None


class EngineConnected(Struct, frozen=True):
    """The answer to `ConnectEngine`, also if it went wrong: the first read tries again."""

    rank: PrefillRank


class ReadBegun(Struct, frozen=True):
    """A read was bound, in so many seconds, and has its turn; again if it is bound once more."""

    read: Read
    begun: float
    bind_seconds: float
    shares: Shares


class ReadMoved(Struct, frozen=True):
    """More bytes of a read have arrived, in parts that took so many seconds in all."""

    read: Read
    nbytes: int
    seconds: float


class ReadFailed(Struct, frozen=True):
    """A read has failed and its bytes may still land; `ReadEnded` follows."""

    read: Read
    problem: str


class ReadEnded(Struct, frozen=True):
    """A read has ended, with a problem or without: none of its bytes can land any more."""

    read: Read
    problem: str | None


CommonEvent = (
    Received
    | Malformed
    | Unreachable
    | Tick
    | DigestComputed
    | AbortRoom
    | ForgetRoom
    | AbortAll
    | Drain
)
PrefillEvent = CommonEvent | EngineRenewed | OfferChunk | RejectRoom
ReaderEvent = EngineConnected | ReadBegun | ReadMoved | ReadFailed | ReadEnded
DecodeEvent = CommonEvent | ConnectLink | DisconnectLink | RequestRoom | ReaderEvent


class Send(Struct, frozen=True):
    peer: Peer
    data: bytes


class Connect(Struct, frozen=True):
    """End the peer's connection, and open one to an endpoint address unless that is None."""

    peer: int
    address: str | None


class DropPeer(Struct, frozen=True):
    """Give up all reads from a rank."""

    rank: PrefillRank


class ConnectEngine(Struct, frozen=True):
    """Connect the engine to a rank, before anything is read from it."""

    rank: PrefillRank
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
    table: RequestAddress
    pieces: list[Piece]
    each: bool
    arrived: ArrivedDigests | None = None
    """Of pieces that have arrived and are not in memory."""


class RoomEnded(Struct, frozen=True):
    """A room has ended: callers that wait for it may go on, and its `span` is recorded."""

    room: Room
    span: RoomSpan | None = None


Effect = (
    Send | Connect | DropPeer | ConnectEngine | StartRead | CancelReads | ComputeDigest | RoomEnded
)


class Effects(list[Effect]):
    """The effects of one event, collected by the machine and its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.protocols: dict[Peer, int] = {}
        """What is spoken with each peer; with those that have not said, the lowest number."""

    def send(self, peer: Peer, message: Message) -> None:
        """Sends a message, unless the peer's protocol lacks it. Raises RoomError if no peer would
        take it.
        """
        protocol = self.protocols.get(peer, spoken(PROTOCOL)[0])
        if not lacks(message, protocol):
            # encoded now, so that values that cannot travel are the caller's error and not the
            # loop's
            self.append(Send(peer, encode(message, protocol)))

    def excess(self, peer: Peer, message: Message) -> str | None:
        """Why a peer cannot have sent a message in the protocol that is spoken with it."""
        number = message.protocol if isinstance(message, Hello) else self.protocols.get(peer)
        return None if number is None else excess(message, number)

    def drain(self) -> list[Effect]:
        """All effects, which are then no longer here."""
        taken = list(self)
        self.clear()
        return taken
