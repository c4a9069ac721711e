"""Mutations of msgpack that keep most of a document's form: of its tree, or of its bytes.

Every edit is a pure function of the data and a seeded source of choices.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from tests.fuzz.trees import Pairs, Raw, at, places, put, to_msgpack, tree

EDGES = sorted(
    {
        sign * (1 << bits) + more
        for bits in (0, 3, 7, 8, 15, 16, 22, 31, 32, 40, 47, 48, 53, 61, 62, 63)
        for more in (-1, 0, 1)
        for sign in (1, -1)
    }
    | {(1 << 64) - 1}
)
NUMBERS = [number for number in EDGES if -(1 << 63) <= number < 1 << 64]
OTHERS = [
    *(b"\xc0", b"\xc2", b"\xc3", b"\x80", b"\x90", b"\xa0", b"\xc4\x00"),
    b"\xc1",  # not a type
    b"\xa2\xff\xfe",  # text that is not UTF-8
    b"\xa4\xed\xb3\xa9x",  # half a surrogate pair
    *(b"\xa3a\nb", b"\xa4\x1b[2K", b"\xa4\xe2\x80\xaeb"),  # no names
    *(b"\xcb" + struct.pack(">d", number) for number in (float("nan"), float("inf"), 1.5)),
    b"\xd4\x05\x00",  # an extension
    b"\xd7\xff" + b"\xff" * 8,  # an invalid timestamp
    b"\xd6\xff\x00\x00\x00\x01",
    b"\x81\x90\xc0",  # a map whose key is a list
    b"\x81\x80\xc0",
]
WRONG_LENGTHS = [
    bytes([head]) + b"\xff" * size
    for size, heads in ((1, b"\xd9\xc4"), (2, b"\xda\xc5\xdc\xde"), (4, b"\xdb\xc6\xdd\xdf\xc9"))
    for head in heads
]
SIZES = (1, 2, 3, 9, 40, 200, 3000)
DEPTHS = (1, 2, 5, 50, 900, 1100, 30_000)
UNREADABLE = msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, OverflowError


def mutate(data: bytes, source: random.Random, most: int) -> bytes:
    """`data` with a few edits, at most `most` bytes."""
    most = min(most, source.choice((1024, 4096, 4096, most)))
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        data = edit(data, source)[:most]
    return data


def edit(data: bytes, source: random.Random) -> bytes:
    try:
        document = tree(msgspec.msgpack.decode(data))
        if source.random() < 0.15:
            return edit_bytes(data, source)
        return to_msgpack(_edited(document, source))
    except UNREADABLE:  # no document, or none any more
        return edit_bytes(data, source)


def edit_bytes(data: bytes, source: random.Random) -> bytes:
    """One byte changed, inserted or removed, or all that follows."""
    place, byte = source.randrange(len(data) + 1), bytes([source.randrange(256)])
    rest = source.choice((byte + data[place + 1 :], byte + data[place:], data[place + 1 :], b""))
    return data[:place] + rest


def _edited(document: Any, source: random.Random) -> Any:
    how, kinds = source.choice(_EDITS)
    paths = [path for path, _ in places(document)]
    chosen = [path for path in paths if type(at(document, path)) in kinds] or paths
    path = source.choice(chosen)
    if how is _everywhere:
        return _everywhere(document, at(document, path), source)
    if how is _copy:
        return put(document, path, at(document, source.choice(paths)))
    return put(document, path, how(at(document, path), source))


def _number(value: Any, source: random.Random) -> int:
    """An integer at a bound."""
    return source.choice(NUMBERS)


def _nudge(value: Any, source: random.Random) -> Any:
    """An integer that is slightly larger or smaller, so that others may still fit it."""
    if type(value) is not int:
        return value
    changes = value + 1, value - 1, 2 * value, value // 2, 3 * value, value + 64, 4 * value
    changed = source.choice((*changes, value + 256))
    return changed if -(1 << 63) <= changed < 1 << 64 else value


def _everywhere(document: Any, old: Any, source: random.Random) -> Any:
    """Changes all integers of one value alike: a page size, a width, a number of items."""
    new = _nudge(old, source)

    def replaced(value: Any) -> Any:
        if isinstance(value, Pairs):
            return Pairs((name, replaced(part)) for name, part in value)
        if isinstance(value, list):
            return [replaced(part) for part in value]
        return new if type(value) is type(old) and value == old else value

    return replaced(document)


def _copy(value: Any, source: random.Random) -> Any:
    """Another value of the document, see `_edited`."""
    return value


def _other_type(value: Any, source: random.Random) -> Raw:
    return Raw(source.choice(OTHERS))


def _wrong_length(value: Any, source: random.Random) -> Raw:
    """A length without content."""
    return Raw(source.choice(WRONG_LENGTHS))


def _nested(value: Any, source: random.Random) -> Raw:
    """The value in lists or maps."""
    shell = source.choice((b"\x91", b"\x81\xa1a"))
    return Raw(shell * source.choice(DEPTHS) + to_msgpack(value))


def _repeated(value: Any, source: random.Random) -> Any:
    """A child of a list or map is repeated, or removed."""
    if not isinstance(value, list):
        return value
    parts = [*value] or [("a", None) if isinstance(value, Pairs) else None]
    place = source.randrange(len(parts))
    parts[place : place + 1] = parts[place : place + 1] * source.choice((0, *SIZES))
    return type(value)(parts)


def _long(value: Any, source: random.Random) -> str | bytes:
    """Long text or bytes."""
    filling: str | bytes = source.choice(("x", b"\x07"))
    return filling * source.choice(SIZES)


def _inner(value: Any, source: random.Random) -> Any:
    """A document inside bytes is edited."""
    return edit(value, source) if isinstance(value, bytes) and len(value) > 3 else value


_ANY = (int, bytes, str, list, Pairs, float, bool, type(None))
_EDITS: tuple[tuple[Callable[[Any, random.Random], Any], tuple[type, ...]], ...] = (
    *[(_number, (int,))] * 3,
    *[(_nudge, (int,))] * 5,
    *[(_everywhere, (int,))] * 5,
    *[(_copy, _ANY)] * 3,
    (_other_type, _ANY),
    (_wrong_length, _ANY),
    (_nested, _ANY),
    *[(_repeated, (list, Pairs))] * 2,
    (_long, _ANY),
    *[(_inner, (bytes,))] * 4,
)
