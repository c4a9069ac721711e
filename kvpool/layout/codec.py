"""Layouts as msgpack, as JSON and as a fingerprint. Decoders take untrusted input."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from kvpool.layout import VERSION, PoolLayout
from kvpool.layout.types import (
    MAX_AXES,
    MAX_PARTS,
    MAX_REASON,
    Axis,
    Buffer,
    LayoutError,
    Region,
    Space,
)

MAX_BYTES = 8 << 20


def _strict(kind: type, **lists: Any) -> Any:
    """A struct of a dataclass's fields that refuses unknown ones, and lists that are too long."""
    hints = get_type_hints(kind) | lists
    rows = [
        (f.name, hints[f.name], *([] if f.default is MISSING else [f.default]))
        for f in fields(kind)
    ]
    return msgspec.defstruct(kind.__name__, rows, forbid_unknown_fields=True)


def _list(kind: Any, most: int) -> Any:
    return Annotated[list[kind], Meta(max_length=most)]


_Region = _strict(Region, axes=_list(_strict(Axis), MAX_AXES))
_Layout = _strict(
    PoolLayout,
    buffers=_list(_strict(Buffer), MAX_PARTS),
    regions=_list(_Region, MAX_PARTS),
    spaces=_list(_strict(Space), MAX_PARTS),
)


class _Versioned(msgspec.Struct):
    version: int


def to_msgpack(layout: PoolLayout) -> bytes:
    """Encodes a layout; at most `MAX_BYTES`, or no decoder would take it."""
    return _bounded(msgspec.msgpack.encode(layout))


def to_json(layout: PoolLayout) -> str:
    """Encodes a layout as JSON."""
    return _bounded(msgspec.json.encode(layout)).decode()


def from_msgpack(data: bytes) -> PoolLayout:
    """Reads a layout, or raises LayoutError: too large, malformed, another version, untrue."""
    return _decode(data, msgspec.msgpack.decode)


def from_json(text: str | bytes) -> PoolLayout:
    """As `from_msgpack`, for JSON."""
    try:
        data = text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError as error:
        raise LayoutError(f"malformed layout: {error}") from None
    return _decode(data, msgspec.json.decode)


def fingerprint(layout: PoolLayout) -> str:
    """SHA-256 of all but bases, device numbers, generation and the order of declaration."""
    parts = (
        layout.version,
        sorted(
            (b.name, b.space, b.item_stride, b.item_bytes, b.items, b.memory.partition(":")[0])
            for b in layout.buffers
        ),
        sorted(layout.regions, key=lambda region: region.key),
        sorted(layout.spaces, key=lambda space: space.name),
        layout.total_kv_layers,
        layout.model,
    )
    return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_BYTES:
        raise LayoutError(f"a layout of {len(data)} bytes: at most {MAX_BYTES} are exchanged.")
    return data


def _decode(data: bytes, decode: Callable[..., Any]) -> PoolLayout:
    _bounded(data)
    try:
        version = decode(data, type=_Versioned).version
        if version != VERSION:
            raise LayoutError(
                f"layout version {version}: this kvpool reads version {VERSION}. "
                "Run the same kvpool on both sides."
            )
        return msgspec.convert(decode(data, type=_Layout), PoolLayout, from_attributes=True)
    except LayoutError:
        raise
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # the reason quotes what may be megabytes
        raise LayoutError(f"malformed layout: {str(error)[:MAX_REASON]}") from None
