"""The messages between endpoints: msgpack maps, typed, versioned, bounded, never pickled.

Every message after the hello names the generation of the prefill endpoint that it belongs to, and
every message about a room the attempt. Numbers and sizes are bounded here; what they mean is
checked against layouts where they are used. docs/protocol.md has every field.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from operator import index
from typing import Annotated, Any, SupportsIndex

import msgspec
import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from disagg.errors import RoomError, WireError
from disagg.protocol.rooms.offered import LayerRange
from kvpool.layout import RequestAddress, Span
from kvpool.layout.request_address import MAX_TOKENS
from kvpool.layout.sentences import PRINTABLE, is_name, one_line
from kvpool.layout.types import MAX_NAME, MAX_PARTS, MAX_REASON, Name

PROTOCOL = 7
MAX_MESSAGE = 64 << 20
MAX_AUX = 1 << 20
MAX_TEXT = 1 << 16
MAX_ROOM_NAME = 256
MAX_CONVENTIONS = 64
MAX_CONVENTION = 256
MIN_TIMEOUT, MAX_TIMEOUT = 0.05, 86_400.0

Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
"""What a person reads. A message has it as one line without escape codes, whoever wrote it."""
Seconds = Annotated[float, Meta(ge=MIN_TIMEOUT, le=MAX_TIMEOUT)]
Room = (
    Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    | Annotated[str, Meta(min_length=1, max_length=MAX_ROOM_NAME, pattern=PRINTABLE)]
)
Aux = dict[str, Any]
"""Small named values of one request: numbers, text, bytes, lists and maps (whose keys are text or
numbers), `AUX_DEPTH` deep.
"""
AUX_DEPTH = 8
Convention = (
    Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    | Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
    | Annotated[str, Meta(max_length=MAX_CONVENTION, pattern=PRINTABLE)]
)
"""What one side says of what its bytes mean beside their layout: a number or a short text."""


class _OfGeneration(Struct, frozen=True, forbid_unknown_fields=True):
    generation: Name


class _OfRoom(_OfGeneration, frozen=True):
    room: Room
    attempt: Name


class Hello(Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """Either side's first message: which endpoint it is, its layout, and how to read its memory.

    Of decode's layout owners and roles, see `wanted_layout`; of prefill's only what decode has
    regions for, see `prefill_peers.shared_part`.
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
    """What its bytes mean beside their layout, see `differences`."""


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
        force_setattr(self, "reasons", [one_line(reason, MAX_TEXT) for reason in self.reasons])

    @property
    def why(self) -> str:
        """All reasons, as one line."""
        return " ".join(self.reasons)[:MAX_TEXT]


class Disconnect(Struct, frozen=True, tag="disconnect", forbid_unknown_fields=True):
    """Decode hangs up: prefill forgets it."""


class DropRoom(Struct, frozen=True, tag="drop_room", forbid_unknown_fields=True):
    """A room has failed on decode before prefill was asked for it: nobody will read its pages. It
    may come from a decode that prefill does not serve, as that is refused.
    """

    room: Room
    reason: Text

    def __post_init__(self) -> None:
        force_setattr(self, "reason", one_line(self.reason, MAX_REASON))


class ReadRequest(_OfRoom, frozen=True, tag="read_request"):
    """Decode asks for positions `start` to `num_tokens`; `readers` decode ranks will ask for the
    room.
    """

    start: Count
    num_tokens: Count
    readers: Annotated[int, Meta(ge=1, le=1 << 16)]
    timeout: Seconds | None = None
    """Seconds in which decode waits for a chunk (None: for ever)."""


class WireSpan(Struct, frozen=True, forbid_unknown_fields=True):
    """A Span: ids as little-endian int64."""

    ids: bytes
    first_item: Count


class ChunkReady(_OfRoom, frozen=True, tag="chunk_ready"):
    """Prefill has computed positions `start` to `stop`, of `layers` or of all; `spans` is its block
    table, `last` ends the room.
    """

    start: Count
    stop: Count
    last: bool
    num_tokens: Count
    spans: Annotated[dict[Name, WireSpan], Meta(max_length=MAX_PARTS)]
    aux: bytes
    """A msgpack map of names to values, see `Aux`."""
    layers: LayerRange | None = None

    def address(self) -> RequestAddress:
        """The block table, validated."""
        spans = {}
        for name, span in self.spans.items():
            if len(span.ids) % 8:
                raise WireError(f"ids of space {name}: {len(span.ids)} bytes, not a multiple of 8.")
            spans[name] = Span(np.frombuffer(span.ids, dtype="<i8"), span.first_item)
        return RequestAddress(self.num_tokens, spans)


class ReadDone(_OfRoom, frozen=True, tag="read_done"):
    """Decode has read everything that it asked for."""


class DigestRequest(_OfRoom, frozen=True, tag="digest_request"):
    """Decode asks for digests of what it has read: of each piece, or of each entry of each."""

    each: bool
    pieces: bytes
    """See disagg.digest.digest."""


class Digests(_OfRoom, frozen=True, tag="digests"):
    """The answer to a DigestRequest, in order, as little-endian uint64; or why there is none."""

    each: bool
    values: bytes
    problem: Text

    def __post_init__(self) -> None:
        force_setattr(self, "problem", one_line(self.problem, MAX_REASON))


class ReleaseAck(_OfRoom, frozen=True, tag="release_ack"):
    """The answer to ReadDone: whether the pages stayed leased until then."""

    leased: bool


class Abort(_OfRoom, frozen=True, tag="abort"):
    """The room has failed on the sender's side."""

    reason: Text

    def __post_init__(self) -> None:
        force_setattr(self, "reason", one_line(self.reason, MAX_REASON))


ToPrefill = (
    Hello | Refuse | Disconnect | Ping | DropRoom | ReadRequest | DigestRequest | ReadDone | Abort
)
ToDecode = Hello | Refuse | Pong | UnknownPeer | ChunkReady | Digests | ReleaseAck | Abort
Message = ToPrefill | ToDecode


class _AnyHello(Struct, tag="hello"):
    """A hello of any protocol, as far as it is read to refuse it by its number, and to say whose it
    is.
    """

    protocol: int
    generation: msgspec.Raw = msgspec.Raw(b"\xa0")


_fields = msgspec.msgpack.Decoder(dict[Name, msgspec.Raw])
_MAPS, _LISTS = {*range(0x80, 0x90), 0xDE, 0xDF}, {*range(0x90, 0xA0), 0xDC, 0xDD}
_map = msgspec.msgpack.Decoder(dict[str | int, msgspec.Raw])
_list = msgspec.msgpack.Decoder(list[msgspec.Raw])
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Bytes of one frame; raises RoomError if no peer would take them."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE:
        raise RoomError(f"a message of {len(data)} bytes: at most {MAX_MESSAGE} are sent.")
    return data


def decode(data: bytes) -> Message:
    """A message from untrusted bytes; raises WireError with the reason."""
    if len(data) > MAX_MESSAGE:
        raise WireError(f"a message of {len(data)} bytes: at most {MAX_MESSAGE} are read.")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        other = _other_protocol(data)
        if other is not None:
            return other
        raise WireError(f"malformed message: {_said(error)}") from None


def _other_protocol(data: bytes) -> Hello | None:
    """A hello of another protocol, which is good for a refusal only; None for what is none."""
    try:
        other = msgspec.msgpack.decode(data, type=_AnyHello)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if other.protocol == PROTOCOL:
        return None
    try:
        generation = one_line(msgspec.msgpack.decode(other.generation, type=str), MAX_NAME)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        generation = ""
    return Hello(other.protocol, generation, "", b"", b"", MIN_TIMEOUT)


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


def pack_aux(aux: Aux) -> bytes:
    """`aux` as it is sent; raises RoomError for values that cannot be."""
    try:
        data = _encoder.encode(aux)
        unpack_aux(data)
    except (msgspec.MsgspecError, WireError, TypeError, OverflowError) as error:
        raise RoomError(f"aux: {error}. Send numbers, text, bytes, lists or maps.") from None
    return data


def unpack_aux(data: bytes) -> Aux:
    """The values, from untrusted bytes; raises WireError."""
    if len(data) > MAX_AUX:
        raise WireError(f"aux of {len(data)} bytes: at most {MAX_AUX} travel with a room.")
    try:
        return {name: _value(raw, AUX_DEPTH) for name, raw in _fields.decode(data).items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"malformed aux: {_said(error)}") from None


def _value(raw: msgspec.Raw, depth: int) -> Any:
    """One value; keys of maps are text or integers, as others could be made to have one hash."""
    head = bytes(memoryview(raw)[:1])[0]
    is_map, is_list = head in _MAPS, head in _LISTS
    if not is_map and not is_list:
        return msgspec.msgpack.decode(raw)
    if not depth:
        raise msgspec.DecodeError(f"maps and lists more than {AUX_DEPTH} deep")
    if is_list:
        return [_value(each, depth - 1) for each in _list.decode(raw)]
    return {key: _value(each, depth - 1) for key, each in _map.decode(raw).items()}


def _said(error: Exception) -> str:
    """What a decoder says of untrusted bytes, which it may quote."""
    printable = str(error).replace(f"matching regex {PRINTABLE!r}", "of printable characters")
    return one_line(printable, MAX_REASON)


def handshake_problems(own: Hello, other: Hello) -> list[str]:
    """Why two endpoints cannot work together, whatever their layouts."""
    if own.protocol != other.protocol:
        return [f"protocol {own.protocol} here, {other.protocol} there. Run the same kvpool."]
    if own.engine != other.engine:
        return [f"engine {own.engine!r} here, {other.engine!r} there. Use the same on both sides."]
    return []


def checked_conventions(given: Mapping[str, Convention]) -> dict[str, Convention]:
    """What a caller says of its bytes, as it is sent; raises ValueError for what cannot be."""
    if not isinstance(given, Mapping):
        raise ValueError(f"conventions={given!r}: names, each with a number or a short text.")
    for name, value in given.items():
        if not is_name(name, MAX_NAME):
            raise ValueError(f"conventions: name {name!r}: 1 to {MAX_NAME} printable characters.")
        try:
            msgspec.convert(value, Convention)
        except msgspec.ValidationError:
            raise ValueError(
                f"conventions: {name}={value!r}: a number, or a text of at most {MAX_CONVENTION} "
                "printable characters."
            ) from None
    if len(given) > MAX_CONVENTIONS:
        raise ValueError(f"conventions: {len(given)} names, at most {MAX_CONVENTIONS} are sent.")
    return dict(given)


def differences(prefill: Mapping[str, Convention], decode: Mapping[str, Convention]) -> list[str]:
    """Why prefill's bytes do not mean the same to decode: names of which both say something, and
    not the same.
    """
    return [
        f"{name}: {value!r} on prefill, {decode[name]!r} on decode. Run the same model with the "
        "same settings on both sides."
        for name, value in sorted(prefill.items())
        if name in decode and decode[name] != value
    ]
