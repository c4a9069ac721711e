"""One message as the bytes of one frame, and back from untrusted bytes."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from disagg.errors import RoomError, WireError
from disagg.protocol.messages import MIN_TIMEOUT, PROTOCOL, Hello, Message
from kvpool.layout.sentences import PRINTABLE, one_line
from kvpool.layout.types import MAX_NAME, MAX_REASON

MAX_MESSAGE = 64 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class _AnyHello(Struct, tag="hello"):
    """A hello of any protocol, as far as it is read to refuse it by its number, and to say whose it
    is.
    """

    protocol: int
    generation: msgspec.Raw = msgspec.Raw(b"\xa0")


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
        hello = _other_protocol(data)
        if hello is not None:
            return hello
        raise WireError(f"malformed message: {decoder_reason(error)}") from None


def _other_protocol(data: bytes) -> Hello | None:
    """A hello of another protocol, which is good for a refusal only; None for what is none."""
    try:
        hello = msgspec.msgpack.decode(data, type=_AnyHello)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if hello.protocol == PROTOCOL:
        return None
    try:
        generation = one_line(msgspec.msgpack.decode(hello.generation, type=str), MAX_NAME)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        generation = ""
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
