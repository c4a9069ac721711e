"""Mutations of msgpack that know where its values begin, so that a document keeps most of its form.

Every edit is a pure function of the data and three numbers, which a seed can choose.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import NamedTuple

import msgspec

EDGES = sorted(
    {
        sign * (1 << bits) + more
        for bits in (0, 3, 7, 8, 15, 16, 22, 31, 32, 40, 47, 48, 53, 61, 62, 63)
        for more in (-1, 0, 1)
        for sign in (1, -1)
    }
    | {(1 << 64) - 1}
)
NUMBERS = [msgspec.msgpack.encode(n) for n in EDGES if -(1 << 63) <= n < 1 << 64]
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
TOKENS = 800
"""Values of a document that are found at most."""


class Token(NamedTuple):
    """One value: where it begins, where its own bytes end, and where its children end."""

    start: int
    head: int
    stop: int
    parent: int
    kind: str
    """`int`, `bin`, `array`, `map` or `other`."""


def tokens(data: bytes) -> list[Token]:
    """The first values of a document; a truncated or invalid value ends the list."""
    found: list[Token] = []
    open_: list[list[int]] = []  # token, and its remaining children
    at = 0
    while at < len(data) and len(found) < TOKENS:
        head, children, kind = _header(data, at)
        if head > len(data):
            break
        parent = open_[-1][0] if open_ else -1
        found.append(Token(at, head, head, parent, kind))
        at = head
        if children:
            open_.append([len(found) - 1, children])
            continue
        while open_:
            open_[-1][1] -= 1
            if open_[-1][1]:
                break
            closed = open_.pop()[0]
            found[closed] = found[closed]._replace(stop=at)
        if not open_:
            break
    for index, _ in open_:
        found[index] = found[index]._replace(stop=at)
    return found


def _header(data: bytes, at: int) -> tuple[int, int, str]:
    """Where the value's own bytes end, its number of children, and its kind."""
    first = data[at]
    if first < 0x80 or first >= 0xE0:
        return at + 1, 0, "int"
    if first < 0x90:
        return at + 1, 2 * (first & 15), "map"
    if first < 0xA0:
        return at + 1, first & 15, "array"
    if first < 0xC0:
        return at + 1 + (first & 31), 0, "other"
    if first in _FIXED:
        size, kind = _FIXED[first]
        return at + 1 + size, 0, kind
    if first in _SIZED:
        width, more, kind = _SIZED[first]
        length = int.from_bytes(data[at + 1 : at + 1 + width], "big")
        end = at + 1 + width
        if kind in ("array", "map"):
            return end, length * (2 if kind == "map" else 1), kind
        return end + length + more, 0, kind
    return at + 1, 0, "other"


_FIXED = {0xCA: (4, "other"), 0xCB: (8, "other")}
_FIXED |= {0xCC + n: (1 << n, "int") for n in range(4)}
_FIXED |= {0xD0 + n: (1 << n, "int") for n in range(4)}
_FIXED |= {0xD4 + n: (1 + (1 << n), "other") for n in range(5)}
_SIZED = {0xC4 + n: (1 << n, 0, "bin") for n in range(3)}
_SIZED |= {0xC7 + n: (1 << n, 1, "other") for n in range(3)}
_SIZED |= {0xD9 + n: (1 << n, 0, "other") for n in range(3)}
_SIZED |= {0xDC: (2, 0, "array"), 0xDD: (4, 0, "array"), 0xDE: (2, 0, "map"), 0xDF: (4, 0, "map")}


def edit(data: bytes, kind: int, place: int, value: int) -> bytes:
    """`data` with one edit, chosen by three numbers of 0 or more."""
    if not data:
        return OTHERS[value % len(OTHERS)]
    return _EDITS[kind % len(_EDITS)](data, place, value)


def mutate(data: bytes, source: random.Random, most: int) -> bytes:
    """`data` with a few edits, at most `most` bytes."""
    most = min(most, source.choice((1024, 4096, 4096, most)))
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        kind, place, value = (source.getrandbits(32) for _ in range(3))
        data = edit(data, kind, place, value)[:most]
    return data


def _flip(data: bytes, place: int, value: int) -> bytes:
    at = place % len(data)
    return data[:at] + bytes([data[at] ^ (1 + value % 255)]) + data[at + 1 :]


def _insert(data: bytes, place: int, value: int) -> bytes:
    at = place % (len(data) + 1)
    return data[:at] + bytes([value % 256]) + data[at:]


def _delete(data: bytes, place: int, value: int) -> bytes:
    at = place % len(data)
    return data[:at] + data[at + 1 + value % 4 :]


def _truncate(data: bytes, place: int, value: int) -> bytes:
    return data[: place % len(data)]


def _put(data: bytes, place: int, new: bytes, kind: str = "") -> bytes:
    """Replaces a value, one of a kind if there is one."""
    values = tokens(data)
    chosen = [token for token in values if token.kind == kind] or values
    if not chosen:
        return data + new
    token = chosen[place % len(chosen)]
    return data[: token.start] + new + data[token.stop :]


def _number(data: bytes, place: int, value: int) -> bytes:
    """Replaces an integer by one at a bound."""
    return _put(data, place, NUMBERS[value % len(NUMBERS)], "int")


def _nudge(data: bytes, place: int, value: int) -> bytes:
    """Makes an integer slightly larger or smaller, so that others may still fit it."""
    ints = [token for token in tokens(data) if token.kind == "int"]
    if not ints:
        return _flip(data, place, value)
    return _put(data, place, _changed(data, ints[place % len(ints)], value), "int")


def _everywhere(data: bytes, place: int, value: int) -> bytes:
    """Changes all integers of one value alike: a page size, a width, a number of items."""
    ints = [token for token in tokens(data) if token.kind == "int"]
    if not ints:
        return _flip(data, place, value)
    chosen = ints[place % len(ints)]
    old = data[chosen.start : chosen.stop]
    new = _changed(data, chosen, value)
    parts, at = [], 0
    for token in ints:
        if data[token.start : token.stop] == old:
            parts += [data[at : token.start], new]
            at = token.stop
    return b"".join([*parts, data[at:]])


def _changed(data: bytes, token: Token, value: int) -> bytes:
    old: int = msgspec.msgpack.decode(data[token.start : token.stop])
    changes = (old + 1, old - 1, 2 * old, old // 2, 3 * old, old + 64, 4 * old, old + 256)
    new = changes[value % len(changes)]
    return msgspec.msgpack.encode(new if -(1 << 63) <= new < 1 << 64 else old)


def _copy(data: bytes, place: int, value: int) -> bytes:
    """Replaces a value by another one of the document."""
    values = tokens(data)
    if not values:
        return data
    token = values[value % len(values)]
    return _put(data, place, data[token.start : token.stop])


def _swap_type(data: bytes, place: int, value: int) -> bytes:
    return _put(data, place, OTHERS[value % len(OTHERS)])


def _wrong_length(data: bytes, place: int, value: int) -> bytes:
    """Replaces a value by a length without content."""
    values = tokens(data)
    wrong = WRONG_LENGTHS[value % len(WRONG_LENGTHS)]
    if not values:
        return data + wrong
    token = values[place % len(values)]
    rest = data[token.stop :] if value // len(WRONG_LENGTHS) % 2 else b""
    return data[: token.start] + wrong + rest


def _nest(data: bytes, place: int, value: int) -> bytes:
    """Nests a value in lists or maps."""
    values = tokens(data)
    if not values:
        return data
    start = values[place % len(values)].start
    shell = (b"\x91", b"\x81\xa1a")[value % 2]
    return data[:start] + shell * DEPTHS[value // 2 % len(DEPTHS)] + data[start:]


def _repeat(data: bytes, place: int, value: int) -> bytes:
    """Repeats or removes a child of a list or map (with its key), with a correct count."""
    held = tokens(data)
    lists = [n for n, token in enumerate(held) if token.kind in ("array", "map")]
    if not lists:
        return data + data
    number = lists[place % len(lists)]
    owner = held[number]
    children = [token for token in held if token.parent == number]
    step = 2 if owner.kind == "map" else 1
    parts = [
        data[children[n].start : children[min(n + step, len(children)) - 1].stop]
        for n in range(0, len(children), step)
    ]
    if not parts:
        parts = [b"\xa1a\xc0" if owner.kind == "map" else b"\xc0"]
    which = place // len(lists) % len(parts)
    times = (0, *SIZES)[value % (1 + len(SIZES))]
    parts[which : which + 1] = [parts[which]] * times
    head = (0xDD if owner.kind == "array" else 0xDF, len(parts))
    return data[: owner.start] + struct.pack(">BI", *head) + b"".join(parts) + data[owner.stop :]


def _text(data: bytes, place: int, value: int) -> bytes:
    """Replaces a value by long text or bytes."""
    size = SIZES[value % len(SIZES)]
    filled = "x" * size if value // len(SIZES) % 2 else b"\x07" * size
    return _put(data, place, msgspec.msgpack.encode(filled))


def _inner(data: bytes, place: int, value: int) -> bytes:
    """Edits a document inside bytes, with a correct length."""
    held = [token for token in tokens(data) if token.kind == "bin" and token.stop - token.start > 3]
    if not held:
        return _number(data, place, value)
    token = held[place % len(held)]
    payload = msgspec.msgpack.decode(data[token.start : token.stop])
    kind, value = value % 64, value // 64
    new = edit(payload, kind, place // len(held), value)
    return data[: token.start] + msgspec.msgpack.encode(new) + data[token.stop :]


_EDITS: tuple[Callable[[bytes, int, int], bytes], ...] = (
    _flip,
    _insert,
    _delete,
    _truncate,
    *[_number] * 3,
    *[_nudge] * 5,
    *[_everywhere] * 5,
    *[_copy] * 3,
    _swap_type,
    _wrong_length,
    _nest,
    *[_repeat] * 2,
    _text,
    *[_inner] * 4,
)
