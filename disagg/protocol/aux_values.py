"""Small named values of one request, which travel with its last chunk: the first token,
log-probabilities, hidden states of a draft.
"""

from __future__ import annotations

from typing import Any

import msgspec

from disagg.errors import RoomError, WireError
from disagg.protocol.codec import decoder_reason
from kvpool.layout.types import Name

MAX_AUX = 1 << 20
"""Bytes of all values of a room."""
AUX_DEPTH = 8

Aux = dict[str, Any]
"""Numbers, text, bytes, lists and maps (whose keys are text or numbers), `AUX_DEPTH` deep."""

# first bytes of msgpack's maps and lists
_MAPS, _LISTS = {*range(0x80, 0x90), 0xDE, 0xDF}, {*range(0x90, 0xA0), 0xDC, 0xDD}
_fields = msgspec.msgpack.Decoder(dict[Name, msgspec.Raw])
_map = msgspec.msgpack.Decoder(dict[str | int, msgspec.Raw])
_list = msgspec.msgpack.Decoder(list[msgspec.Raw])


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
