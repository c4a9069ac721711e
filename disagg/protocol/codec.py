"""One message as the bytes of one frame, and back from untrusted bytes. What decode's hello says of
layouts: the owners and roles whose regions prefill shows. And aux values: small named values
of one request (the first token, log-probabilities), which travel with its last chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from disagg.errors import RoomError, WireError
from disagg.protocol.messages import MIN_TIMEOUT, Hello, Message
from disagg.protocol.versions import PROTOCOL, fields_lacked, spoken, tag_of
from kvpool.layout import VERSION, PoolLayout, Region, Space
from kvpool.layout.codec import MAX_BYTES
from kvpool.layout.text import PRINTABLE, one_line
from kvpool.layout.types import MAX_NAME, MAX_PARTS, MAX_REASON, SCALE, Name

MAX_MESSAGE = 64 << 20
MAX_AUX = 1 << 20
"""Bytes of all values of a room."""
AUX_DEPTH = 8

Aux = dict[str, Any]
"""Numbers, text, bytes, lists and maps (whose keys are text or numbers), `AUX_DEPTH` deep."""

Pair = tuple[str, str]
"""An owner and a role."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
# first bytes of msgpack's maps and lists
_MAPS, _LISTS = {*range(0x80, 0x90), 0xDE, 0xDF}, {*range(0x90, 0xA0), 0xDC, 0xDD}
_fields = msgspec.msgpack.Decoder(dict[Name, msgspec.Raw])
_map = msgspec.msgpack.Decoder(dict[str | int, msgspec.Raw])
_list = msgspec.msgpack.Decoder(list[msgspec.Raw])


class _Named(Struct):
    owner: Name
    role: Name


class _WireLayout(Struct):
    """A layout, as far as prefill reads decode's."""

    version: int
    regions: Annotated[list[_Named], Meta(max_length=MAX_PARTS)] = []


_wanted = msgspec.msgpack.Decoder(_WireLayout)


class _AnyHello(Struct, tag="hello"):
    """A hello of any protocol, as far as a refusal by its number needs it."""

    protocol: int
    generation: msgspec.Raw = msgspec.Raw(b"\xa0")


def encode(message: Message, protocol: int = PROTOCOL) -> bytes:
    """Bytes of one frame for a peer of that protocol, without the fields that it does not know.
    Raises RoomError if no peer would take them.
    """
    data = _encoder.encode(message)
    if protocol != PROTOCOL and (lacked := fields_lacked(tag_of(message), protocol)):
        fields = _fields.decode(data)
        data = _encoder.encode({name: fields[name] for name in fields if name not in lacked})
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
        if hello := _other_protocol(data):
            return hello
        raise WireError(f"malformed message: {decoder_reason(error)}") from None


def _other_protocol(data: bytes) -> Hello | None:
    """A hello of another protocol, which is good for a refusal only; None for what is none."""
    try:
        hello = msgspec.msgpack.decode(data, type=_AnyHello)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if hello.protocol in spoken(PROTOCOL):
        return None
    generation = ""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        generation = one_line(msgspec.msgpack.decode(hello.generation, type=str), MAX_NAME)
    return Hello(
        protocol=hello.protocol,
        generation=generation,
        engine="",
        layout=b"",
        metadata=b"",
        timeout=MIN_TIMEOUT,
    )


def decoder_reason(error: Exception) -> str:
    """What a decoder says of untrusted bytes, which it may quote."""
    printable = str(error).replace(f"matching regex {PRINTABLE!r}", "of printable characters")
    return one_line(printable, MAX_REASON)


def pairs_of(regions: Iterable[Region | _Named]) -> frozenset[Pair]:
    return frozenset((region.owner, region.role) for region in regions)


def wanted_layout(layouts: Iterable[PoolLayout], casts: bool = False) -> bytes:
    """The owners and roles of a decode rank, or of all ranks of its group, as they are sent. With
    `casts`, prefill may have scales beside any of them.
    """
    pairs = frozenset[Pair]().union(*(pairs_of(layout.regions) for layout in layouts))
    if casts:
        pairs |= {(owner, role + SCALE) for owner, role in pairs if not role.endswith(SCALE)}
    regions = [_Named(owner=owner, role=role) for owner, role in sorted(pairs)]
    return msgspec.msgpack.encode(_WireLayout(version=VERSION, regions=regions))


def layout_for(layout: PoolLayout, protocol: int) -> bytes:
    """A layout as peers of that protocol read it. Raises ValueError for what they cannot."""
    lacked, data = fields_lacked("space", protocol), layout.to_msgpack()
    if not lacked:
        return data
    for space in layout.spaces:
        usual = Space(name=space.name)
        for name in lacked:
            if (value := getattr(space, name)) != getattr(usual, name):
                raise ValueError(
                    f"space {space.name}: {name}={value!r}, which protocol {protocol} cannot say. "
                    "Run the same release on both sides."
                )
    fields = msgspec.msgpack.decode(data)
    fields["spaces"] = [
        {name: space[name] for name in space if name not in lacked} for space in fields["spaces"]
    ]
    return msgspec.msgpack.encode(fields)


def wanted_pairs(layout: bytes) -> frozenset[Pair]:
    """What `wanted_layout` made, or a whole layout, from untrusted bytes. Raises ValueError."""
    if len(layout) > MAX_BYTES:
        raise ValueError(f"a layout of {len(layout)} bytes: at most {MAX_BYTES} are exchanged.")
    try:
        wanted = _wanted.decode(layout)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"malformed layout: {one_line(str(error), MAX_REASON)}") from None
    if wanted.version != VERSION:
        raise ValueError(
            f"layout version {wanted.version}: this kvpool reads version {VERSION}. Run the same "
            "kvpool on both sides."
        )
    return pairs_of(wanted.regions)


def pack_aux(aux: Aux) -> bytes:
    """`aux` as it is sent; raises RoomError for values that cannot be."""
    try:
        data = msgspec.msgpack.encode(aux)
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
        raise WireError(f"malformed aux: {decoder_reason(error)}") from None


def _value(raw: msgspec.Raw, depth: int) -> Any:
    """One value, decoded level by level: a depth bounds the stack that a sender can make us use,
    and keys that are neither text nor integers could be made to share one hash.
    """
    head = bytes(memoryview(raw)[:1])[0]
    is_map, is_list = head in _MAPS, head in _LISTS
    if not is_map and not is_list:
        return msgspec.msgpack.decode(raw)
    if not depth:
        raise msgspec.DecodeError(f"maps and lists more than {AUX_DEPTH} deep")
    if is_list:
        return [_value(item, depth - 1) for item in _list.decode(raw)]
    return {key: _value(item, depth - 1) for key, item in _map.decode(raw).items()}
