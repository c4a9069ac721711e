"""Documents as trees, with names that are there twice, lists of any length, and any depth.

A valid sample is grown at one place; how large it gets follows from a number.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

Grower = Callable[[int], bytes]
"""An input that is `count` times as large as a sample in one respect."""
Encode = Callable[[Any], bytes]
Path = tuple[int, ...]


class Pairs(list[tuple[str, Any]]):
    """A map: its names, which may be there twice, and their values."""


class Raw(bytes):
    """A value that is encoded already."""


def tree(value: Any) -> Any:
    if isinstance(value, dict):
        return Pairs((name, tree(each)) for name, each in value.items())
    return [tree(each) for each in value] if isinstance(value, list) else value


def to_json(value: Any) -> bytes:
    if isinstance(value, Raw):
        return value
    if isinstance(value, Pairs):
        parts = (json.dumps(name).encode() + b":" + to_json(each) for name, each in value)
        return b"{" + b",".join(parts) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(to_json, value)) + b"]"
    return json.dumps(value).encode()


def to_msgpack(value: Any) -> bytes:
    if isinstance(value, Raw):
        return value
    if isinstance(value, Pairs):
        parts = (msgspec.msgpack.encode(name) + to_msgpack(each) for name, each in value)
        return struct.pack(">BI", 0xDF, len(value)) + b"".join(parts)
    if isinstance(value, list):
        return struct.pack(">BI", 0xDD, len(value)) + b"".join(map(to_msgpack, value))
    return msgspec.msgpack.encode(value)


def growers(sample: Any, encode: Encode) -> Iterator[tuple[str, Grower]]:
    """Every way to grow a sample, by what is grown and how. Of places that differ in the numbers of
    list elements only, the first, and of a map's values of one type.
    """
    seen: set[object] = set()
    for path, kind in places(sample):
        value = at(sample, path)
        alike: object = kind
        if not isinstance(value, list):
            alike = kind.rpartition(".")[0], type(value)
        if alike not in seen:
            seen.add(alike)
            for how, grow in _WAYS.items():
                if grow(value, 1, encode) is not None:
                    yield f"{kind or 'all'}: {how}", _grower(sample, path, grow, encode)


def _grower(sample: Any, path: Path, grow: Callable[..., Any], encode: Encode) -> Grower:
    return lambda count: encode(put(sample, path, grow(at(sample, path), count, encode)))


def at(value: Any, path: Path) -> Any:
    for index in path:
        value = value[index][1] if isinstance(value, Pairs) else value[index]
    return value


def put(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    first, *rest = path
    again = type(value)(value)
    part = value[first]
    if isinstance(value, Pairs):
        again[first] = part[0], put(part[1], tuple(rest), new)
    else:
        again[first] = put(part, tuple(rest), new)
    return again


def places(value: Any, path: Path = (), kind: str = "") -> Iterator[tuple[Path, str]]:
    """All places, and what each is: the names on the way to it."""
    yield path, kind
    if isinstance(value, list):
        for index, part in enumerate(value):
            name, child = part if isinstance(value, Pairs) else ("*", part)
            yield from places(child, (*path, index), f"{kind}.{name}".lstrip("."))


def _repeated(value: Any, count: int, encode: Encode) -> Any:
    """All children again and again."""
    return type(value)(value * count) if isinstance(value, list) and value else None


def _numbered(value: Any, count: int, encode: Encode) -> Any:
    """The same, with other names and numbers each time."""
    if not isinstance(value, list) or not value:
        return None
    return type(value)([_other(part, number) for number in range(count) for part in value])


def _twice_at_last(value: Any, count: int, encode: Encode) -> Any:
    """The same, and the last child once more."""
    grown = _numbered(value, count, encode)
    return None if grown is None else type(value)([*grown, grown[-1]])


def _nested(value: Any, count: int, encode: Encode) -> Any:
    """The value in lists."""
    empty = encode([])
    if empty == b"[]":
        return Raw(b"[" * count + encode(value) + b"]" * count)
    return Raw(b"\x91" * count + encode(value)) if empty[:1] == b"\xdd" else None


def _long(value: Any, count: int, encode: Encode) -> Any:
    """Longer text, or more digits."""
    if isinstance(value, str | bytes):
        return (value or (b"x" if isinstance(value, bytes) else "x")) * count
    if encode([]) == b"[]" and type(value) is int:
        return Raw(b"9" * count)
    return None


def _other(part: Any, number: int) -> Any:
    """A value with other names, texts and numbers all over."""
    if isinstance(part, tuple):
        return f"{part[0]}{number}", part[1]
    if isinstance(part, list):
        again = [(p[0], _other(p[1], number)) if isinstance(p, tuple) else p for p in part]
        return type(part)(again)
    if isinstance(part, str):
        return f"{part}{number}"
    return part + number if type(part) is int else part


_WAYS: dict[str, Callable[[Any, int, Encode], Any]] = {
    "repeated": _repeated,
    "numbered": _numbered,
    "twice at last": _twice_at_last,
    "nested": _nested,
    "long": _long,
}
