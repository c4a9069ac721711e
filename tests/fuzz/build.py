"""Values of any type that msgspec can describe, so that a new message is fuzzed by itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import msgspec
from msgspec import inspect

from disagg.protocol import messages, trace_context

TOP = (1 << 63) - 1
BLOBS = (b"", bytes(8), b"\x01" + bytes(15), b"\x80", b"\x81\xa1x\x07")
"""Encoded ids, numbers and aux values."""


class Choices(Protocol):
    """Where numbers and bytes come from: a seed, or a fuzzer's input."""

    def number(self, low: int, high: int) -> int:
        """One of `low` to `high`."""

    def data(self, most: int) -> bytes:
        """At most `most` bytes."""


class Seeded:
    """Choices of a pseudo-random generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.number = self._random.randint

    def data(self, most: int) -> bytes:
        return self._random.randbytes(self.number(0, most))


@lru_cache
def message_types() -> dict[str, type]:
    info = inspect.type_info(messages.Message)
    kinds = info.types if isinstance(info, inspect.UnionType) else (info,)
    return {kind.cls.__name__: kind.cls for kind in kinds if isinstance(kind, inspect.StructType)}


def message(kind: type, choices: Choices, /, **fixed: object) -> dict[str, Any]:
    """A message as plain values, valid by its types; fields in `fixed` as given."""
    fields: dict[str, Any] = _build(_described(kind), choices)
    return fields | {name: value for name, value in fixed.items() if name in fields}


_described = lru_cache(inspect.type_info)


def pick(choices: Choices, options: Sequence[Any]) -> Any:
    return options[choices.number(0, len(options) - 1)]


def _build(kind: inspect.Type, choices: Choices) -> Any:
    maker = _MAKERS.get(type(kind))
    if maker is None:
        raise TypeError(f"{kind}: add a maker for this type to tests/fuzz/build.py.")
    return maker(kind, choices)


def _int(kind: inspect.IntType, choices: Choices) -> int:
    low = kind.ge if kind.ge is not None else -TOP - 1
    high = kind.le if kind.le is not None else TOP
    few = min(high, max(low, 0) + 20)
    return int(pick(choices, (low, high, choices.number(low, high), choices.number(low, few), few)))


def _float(kind: inspect.FloatType, choices: Choices) -> float:
    low = kind.ge if kind.ge is not None else -1e300
    high = kind.le if kind.le is not None else 1e300
    between = low + (high - low) * choices.number(0, 1000) / 1000
    return float(pick(choices, (low, high, min(max(between, low), high))))


def _str(kind: inspect.StrType, choices: Choices) -> str:
    if kind.pattern == trace_context.PATTERN:
        return f"00-{choices.number(1, TOP):032x}-{choices.number(1, TOP):016x}-01"
    most = 4096 if kind.max_length is None else kind.max_length
    size = pick(choices, (kind.min_length or 0, 1, 5, min(most, 5000)))
    some = ("kv", "x", "é", "%s", "a b", *(() if kind.pattern else ("\n", "\x1b[2K", "\u202e")))
    return str(pick(choices, some) * size)[: min(size, most)]


def _bytes(kind: inspect.BytesType, choices: Choices) -> bytes:
    blob: bytes = pick(choices, (pick(choices, BLOBS), choices.data(40)))
    return blob[: kind.max_length]


def _list(kind: inspect.ListType, choices: Choices) -> list[Any]:
    size = max(kind.min_length or 0, choices.number(0, min(3, kind.max_length or 3)))
    return [_build(kind.item_type, choices) for _ in range(size)]


def _dict(kind: inspect.DictType, choices: Choices) -> dict[Any, Any]:
    size = choices.number(0, min(3, kind.max_length or 3))
    pairs = [(kind.key_type, kind.value_type)] * size
    return {_build(key, choices): _build(value, choices) for key, value in pairs}


def _struct(kind: inspect.StructType, choices: Choices) -> Any:
    values = {each.encode_name: _build(each.type, choices) for each in kind.fields}
    tagged = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
    whole = {**tagged, **values}
    return list(whole.values()) if kind.array_like else whole


def _any(kind: inspect.AnyType, choices: Choices) -> Any:
    return pick(choices, (None, True, 7, -1.5, "x", b"y", [1, [2]], {"a": {"b": 3}}))


_MAKERS: dict[type, Callable[[Any, Choices], Any]] = {
    inspect.IntType: _int,
    inspect.FloatType: _float,
    inspect.StrType: _str,
    inspect.BytesType: _bytes,
    inspect.ListType: _list,
    inspect.DictType: _dict,
    inspect.StructType: _struct,
    inspect.UnionType: lambda kind, choices: _build(pick(choices, kind.types), choices),
    inspect.AnyType: _any,
    inspect.BoolType: lambda kind, choices: bool(choices.number(0, 1)),
    inspect.NoneType: lambda kind, choices: None,
}


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)
