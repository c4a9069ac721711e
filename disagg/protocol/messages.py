"""The messages between endpoints: msgpack maps, typed, versioned, bounded, never pickled.

Every message after the hello names the generation of the prefill endpoint that it belongs to, and
every message about a room the attempt. Numbers and sizes are bounded here; what they mean is
checked against layouts where they are used. docs/protocol.md has every field.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from operator import index
from typing import Annotated, Any, SupportsIndex, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from disagg.errors import RoomError, WireError
from disagg.protocol.rooms.offered import LayerRange
from disagg.protocol.trace_context import Traceparent
from kvpool.layout import RequestAddress, Span
from kvpool.layout.request_address import MAX_TOKENS
from kvpool.layout.text import PRINTABLE, is_name, one_line
from kvpool.layout.types import MAX_NAME, MAX_PARTS, MAX_REASON, Name

MAX_TEXT = 1 << 16
MAX_ROOM_NAME = 256
MIN_TIMEOUT, MAX_TIMEOUT = 0.05, 86_400.0
MAX_CONVENTIONS = 1024
MAX_CONVENTION = 256

Position = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
"""Text for people. A message from any peer has it as one line without escape codes."""
Seconds = Annotated[float, Meta(ge=MIN_TIMEOUT, le=MAX_TIMEOUT)]
Room = (
    Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    | Annotated[str, Meta(min_length=1, max_length=MAX_ROOM_NAME, pattern=PRINTABLE)]
)
Convention = (
    Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    | Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
    | Annotated[str, Meta(max_length=MAX_CONVENTION, pattern=PRINTABLE)]
)
"""What bytes mean beside their layout: a number or short text, which each side says of its own
state, by name, and the handshake compares.
"""

OfRoom = TypeVar("OfRoom", bound="_OfRoom")


class _OfGeneration(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    generation: Name


class _OfRoom(_OfGeneration, frozen=True, kw_only=True):
    room: Room
    attempt: Name

    def answer(self, kind: type[OfRoom], **fields: Any) -> OfRoom:
        """A message about the same attempt."""
        return kind(generation=self.generation, room=self.room, attempt=self.attempt, **fields)


class Hello(Struct, frozen=True, kw_only=True, tag="hello", forbid_unknown_fields=True):
    """Either side's first message: which endpoint it is, its layout, and how to read its memory. Of
    layouts, decode's has owners and roles (`wanted_layout`), prefill's what decode has regions for
    (`prefill_peers.shared_part`).
    """

    protocol: int
    generation: Name
    engine: Name
    layout: bytes
    metadata: bytes
    """The engine's; empty from decode, whose memory no peer reads."""
    timeout: Seconds
    """Seconds of silence after which it takes the other side for dead."""
    conventions: Annotated[dict[Name, Convention], Meta(max_length=MAX_CONVENTIONS)] = {}


class Ping(_OfGeneration, frozen=True, tag="ping"):
    """Decode is alive, and asks whether prefill is."""


class Pong(_OfGeneration, frozen=True, tag="pong"):
    """Prefill is alive."""


class UnknownPeer(_OfGeneration, frozen=True, tag="unknown_peer"):
    """Prefill does not know the sender, or has another generation: decode must say hello again."""


class Refuse(Struct, frozen=True, tag="refuse", forbid_unknown_fields=True, omit_defaults=True):
    """The sender does not serve the receiver, with all reasons: never (`final`: the two cannot work
    together), or not now (a peer that is overloaded, a message that cannot be served).
    """

    reasons: list[Text]
    final: bool = True
    """Left out where it is true, so that an endpoint of any protocol reads why it is refused."""

    def __post_init__(self) -> None:
        # `why` shows no more, and escaping costs the receiver more than sending costs the peer
        lines, left = [], MAX_TEXT
        for reason in self.reasons:
            if left <= 0:
                break
            lines.append(one_line(reason, left))
            left -= len(lines[-1]) + 1
        force_setattr(self, "reasons", lines)

    @property
    def why(self) -> str:
        """All reasons, as one line."""
        return " ".join(self.reasons)[:MAX_TEXT]


class Disconnect(Struct, frozen=True, tag="disconnect", forbid_unknown_fields=True):
    """Decode hangs up: prefill forgets it."""


class DropRoom(Struct, frozen=True, tag="drop_room", forbid_unknown_fields=True):
    """A room has failed on decode before prefill was asked for it: no reader needs its pages. It
    may come from a decode that prefill does not serve, as that is refused.
    """

    room: Room
    reason: Text

    def __post_init__(self) -> None:
        force_setattr(self, "reason", one_line(self.reason, MAX_REASON))


class ReadRequest(_OfRoom, frozen=True, kw_only=True, tag="read_request"):
    """Decode asks for positions `start` to `num_tokens`, as one of `readers` decode ranks."""

    start: Position
    num_tokens: Position
    readers: Annotated[int, Meta(ge=1, le=1 << 16)]
    timeout: Seconds | None = None
    """Seconds in which decode waits for a chunk (None: without limit)."""
    traceparent: Traceparent | None = None
    """Of the request, if its caller has one."""


class WireSpan(Struct, frozen=True, forbid_unknown_fields=True):
    """A Span: ids as little-endian int64."""

    ids: bytes
    first_item: Position


class ChunkReady(_OfRoom, frozen=True, kw_only=True, tag="chunk_ready"):
    """Prefill has computed positions `start` to `stop`, of `layers` or all; `last` ends a room."""

    start: Position
    stop: Position
    last: bool
    num_tokens: Position
    spans: Annotated[dict[Name, WireSpan], Meta(max_length=MAX_PARTS)]
    """Its block table."""
    aux: bytes
    """A msgpack map of names to values, see `codec`."""
    layers: LayerRange | None = None

    def block_table(
        self, earlier: ChunkReady | None = None, earlier_table: RequestAddress | None = None
    ) -> RequestAddress:
        """The block table, validated. What it lists as an `earlier` chunk did is taken from
        `earlier_table`.
        """
        spans = {}
        for name, span in self.spans.items():
            if earlier_table and earlier and earlier.spans.get(name) == span:
                spans[name] = earlier_table.spans[name]
                continue
            if len(span.ids) % 8:
                raise WireError(f"ids of space {name}: {len(span.ids)} bytes, not a multiple of 8.")
            spans[name] = Span(np.frombuffer(span.ids, dtype="<i8"), span.first_item)
        return RequestAddress(self.num_tokens, spans)


class ReadDone(_OfRoom, frozen=True, kw_only=True, tag="read_done"):
    """Decode has read everything that it asked for."""


class DigestRequest(_OfRoom, frozen=True, kw_only=True, tag="digest_request"):
    """Decode asks for digests of what it has read: of each piece, or of each entry of each."""

    each: bool
    pieces: bytes
    """See disagg.digest.digest."""


class Digests(_OfRoom, frozen=True, kw_only=True, tag="digests"):
    """The answer to a DigestRequest, in order, as little-endian uint64; or why there is none."""

    each: bool
    values: bytes
    problem: Text

    def __post_init__(self) -> None:
        force_setattr(self, "problem", one_line(self.problem, MAX_REASON))


class ReleaseAck(_OfRoom, frozen=True, kw_only=True, tag="release_ack"):
    """The answer to ReadDone: whether the pages stayed leased until then."""

    leased: bool


class Abort(_OfRoom, frozen=True, kw_only=True, tag="abort"):
    """The room has failed on the sender's side."""

    reason: Text

    def __post_init__(self) -> None:
        force_setattr(self, "reason", one_line(self.reason, MAX_REASON))


ToPrefill = (
    Hello | Refuse | Disconnect | Ping | DropRoom | ReadRequest | DigestRequest | ReadDone | Abort
)
ToDecode = Hello | Refuse | Pong | UnknownPeer | ChunkReady | Digests | ReleaseAck | Abort
Message = ToPrefill | ToDecode


def room_name(name: object) -> Room:
    """A room's name as it is sent, a number from 0 to 2**63-1 or a short text; else RoomError."""
    if isinstance(name, str) and is_name(name, MAX_ROOM_NAME):
        return name
    if type(name) is int and 0 <= name < 1 << 63:
        return name
    if isinstance(name, SupportsIndex) and not isinstance(name, bool):
        number = index(name)
        if 0 <= number < 1 << 63:
            return number
    raise RoomError(
        f"room {name!r}: a number from 0 to 2**63-1, or 1 to {MAX_ROOM_NAME} printable characters."
    )


def spans_of(address: RequestAddress) -> dict[str, WireSpan]:
    """A block table as it is sent."""
    return {
        name: WireSpan(span.ids.astype("<i8").tobytes(), span.first_item)
        for name, span in address.spans.items()
    }


def checked_conventions(conventions: Mapping[str, Convention]) -> dict[str, Convention]:
    """What a caller says of its bytes, as it is sent; raises ValueError for what cannot be."""
    if not isinstance(conventions, Mapping):
        raise ValueError(f"conventions={conventions!r}: names, each with a number or a short text.")
    for name, value in conventions.items():
        if not is_name(name, MAX_NAME):
            raise ValueError(f"conventions: name {name!r}: 1 to {MAX_NAME} printable characters.")
        try:
            msgspec.convert(value, Convention)
        except msgspec.ValidationError:
            raise ValueError(
                f"conventions: {name}={value!r}: a number, or a text of at most {MAX_CONVENTION} "
                "printable characters."
            ) from None
    if (count := len(conventions)) > MAX_CONVENTIONS:
        raise ValueError(f"conventions: {count} names, at most {MAX_CONVENTIONS} are sent.")
    return dict(conventions)
