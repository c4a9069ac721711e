"""What a machine is told: messages of peers, calls of its own side, ends of work, time."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from disagg.protocol.effects import Peer
from disagg.protocol.link import Link
from disagg.protocol.messages import Aux, Message, Room
from disagg.protocol.read import Read
from disagg.protocol.rooms.offered import LayerRange
from kvpool.layout import RequestAddress

if TYPE_CHECKING:
    from kvpool.device import Event as DeviceEvent


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a peer; with a hello its `origin`, as far as the transport knows."""

    peer: Peer
    message: Message
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Malformed:
    """A peer sent what cannot be read, or what cannot be served."""

    peer: Peer
    reason: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A message could not be sent to a peer."""

    peer: Peer
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class DigestComputed:
    """The answer to `ComputeDigest`: little-endian uint64, or None and the reason."""

    key: Hashable
    values: bytes | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class AbortRoom:
    """The caller ends a room."""

    room: Room
    reason: str


@dataclass(frozen=True, slots=True)
class RejectRoom:
    """Prefill's caller ends a room, whether anybody has heard of it or not."""

    room: Room
    reason: str


@dataclass(frozen=True, slots=True)
class ForgetRoom:
    """The caller drops an ended room."""

    room: Room


@dataclass(frozen=True, slots=True)
class AbortAll:
    """Every open room ends; with `closing`, peers learn that the endpoint is gone."""

    reason: str
    closing: bool = False


@dataclass(frozen=True, slots=True)
class OfferChunk:
    """Prefill's caller offers positions `tokens` of a request, of `layers` or of all, once the
    device has done the work before `after`.
    """

    room: Room
    address: RequestAddress
    tokens: range
    last: bool
    aux: Aux = field(default_factory=dict)
    after: DeviceEvent | None = None
    layers: LayerRange | None = None


@dataclass(frozen=True, slots=True)
class ConnectLink:
    """Decode's caller adds a prefill."""

    link: Link


@dataclass(frozen=True, slots=True)
class DisconnectLink:
    """Decode's caller removes a prefill."""

    link: Link


@dataclass(frozen=True, slots=True)
class RequestRoom:
    """Decode's caller asks for positions `start` to the end of `address`, or with `at_most` to one
    before it, and for the aux values `expected`; or for nothing (`declined`), so that prefill's
    pages come back.
    """

    room: Room
    address: RequestAddress
    start: int
    link: Link
    expected: Collection[str] = ()
    declined: bool = False
    at_most: bool = False


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """A read has failed and its bytes may still land; `ReadEnded` follows."""

    read: Read
    problem: str


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """A read has ended, with a problem or without: none of its bytes can land any more."""

    read: Read
    problem: str | None


CommonEvent = (
    Received | Malformed | Unreachable | Tick | DigestComputed | AbortRoom | ForgetRoom | AbortAll
)
PrefillEvent = CommonEvent | OfferChunk | RejectRoom
DecodeEvent = CommonEvent | ConnectLink | DisconnectLink | RequestRoom | ReadFailed | ReadEnded
