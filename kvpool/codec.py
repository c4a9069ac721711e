"""Layouts as msgpack, as JSON and as a fingerprint. Decoders take untrusted input."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace

import msgspec

from kvpool.layout import VERSION, Axis, Buffer, LayoutError, PoolLayout, Region, Space

MAX_BYTES = 8 << 20
MAX_PARTS = 1 << 16


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
    return _decode(text.encode() if isinstance(text, str) else text, msgspec.json.decode)


def fingerprint(layout: PoolLayout) -> str:
    """SHA-256 of all but bases, device numbers, generation and the order of declaration."""
    anonymous = [replace(b, base=0, memory=b.memory.partition(":")[0]) for b in layout.buffers]
    parts = (
        layout.version,
        sorted(anonymous, key=lambda buffer: buffer.name),
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


def _decode(data: bytes, decode: Callable[..., object]) -> PoolLayout:
    _bounded(data)
    try:
        version = decode(data, type=_Versioned).version  # type: ignore[attr-defined]
        if version != VERSION:
            raise LayoutError(
                f"layout version {version}: this kvpool reads version {VERSION}. Run the same "
                "kvpool on both sides."
            )
        raw = decode(data)
        _check_shape(raw)
        return msgspec.convert(raw, PoolLayout)
    except LayoutError:
        raise
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LayoutError(f"malformed layout: {error}") from None


def _check_shape(raw: object) -> None:
    """Counts are bounded and no field is unknown: what we would not check we do not accept."""
    if not isinstance(raw, Mapping):
        raise LayoutError("malformed layout: expected a map.")
    _known(raw, PoolLayout, "layout")
    for name, kind in (("buffers", Buffer), ("regions", Region), ("spaces", Space)):
        parts = raw.get(name)
        if not isinstance(parts, list):
            raise LayoutError(f"malformed layout: {name} must be a list.")
        if len(parts) > MAX_PARTS:
            raise LayoutError(
                f"a layout of {len(parts)} {name}: at most {MAX_PARTS} are supported."
            )
        for part in parts:
            _known(part, kind, name)
            axes = part.get("axes", ()) if isinstance(part, Mapping) else ()
            for axis in axes if isinstance(axes, list) else ():
                _known(axis, Axis, "axes")


def _known(raw: object, kind: type, where: str) -> None:
    if isinstance(raw, Mapping):
        unknown = set(raw) - {field.name for field in fields(kind)}
        if unknown:
            raise LayoutError(
                f"malformed layout: {where} has unknown fields {sorted(map(str, unknown))}."
            )
