"""Layouts as msgpack, as JSON and as a fingerprint. Decoders take untrusted input.

`docs/layout-format.md` describes the format field by field.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import MISSING, fields
from operator import attrgetter, index
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from kvpool.layout import VERSION, PoolLayout
from kvpool.layout.spaces import Interleave, Space
from kvpool.layout.text import one_line
from kvpool.layout.types import MAX_AXES, MAX_PARTS, MAX_REASON, Axis, Buffer, LayoutError, Region

MAX_BYTES = 8 << 20
encode = msgspec.msgpack.Encoder(enc_hook=index).encode  # numpy's integers too
encode_json = msgspec.json.Encoder(enc_hook=index).encode


def _strict(kind: type, **lists: Any) -> Any:
    """A struct of a dataclass's fields that refuses unknown fields and lists that are too long."""
    hints = get_type_hints(kind) | lists
    rows = [
        (f.name, hints[f.name], *[f.default] * (f.default is not MISSING)) for f in fields(kind)
    ]
    return msgspec.defstruct(kind.__name__, rows, forbid_unknown_fields=True)


def _list(kind: Any, most: int) -> Any:
    return Annotated[list[kind], Meta(max_length=most)]


_WireRegion = _strict(Region, axes=_list(_strict(Axis), MAX_AXES))
_WireSpace = _strict(Space, interleave=_strict(Interleave) | None)
WireLayout = _strict(
    PoolLayout,
    buffers=_list(_strict(Buffer), MAX_PARTS),
    regions=_list(_WireRegion, MAX_PARTS),
    spaces=_list(_WireSpace, MAX_PARTS),
)


class _LayoutVersion(msgspec.Struct):
    version: int


def fingerprint(layout: PoolLayout) -> str:
    """SHA-256 of a layout without device numbers, generation and the order of its parts. Of bases
    only the distance to the first of the buffers that lie side by side counts.
    """
    buffers = [
        (_shape(buffer), group[0].name, buffer.base - group[0].base)
        for group in layout.adjacent_buffers
        for buffer in group
    ]
    parts = (
        layout.version,
        sorted(buffers),
        sorted(layout.regions, key=attrgetter("owner", "layer", "role")),
        sorted(layout.spaces, key=attrgetter("name")),
        layout.total_kv_layers,
        layout.model,
    )
    return hashlib.sha256(encode(parts)).hexdigest()


def read_file(path: str | Path) -> PoolLayout | None:
    """The layout in a JSON or msgpack file; None for any other JSON object.

    Raises ValueError, which begins with the path, for other files and for inconsistent layouts.
    """
    try:
        data = Path(path).read_bytes()
        if data[:1] >= b"\x80":
            return PoolLayout.from_msgpack(data)
        names = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        return PoolLayout.from_json(data) if {"buffers", "regions"} & set(names) else None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}.") from None
    except LayoutError as error:
        raise ValueError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: neither JSON nor a msgpack layout: {error}.") from None


def _shape(buffer: Buffer) -> tuple[object, ...]:
    """All of a buffer but its base and the number of its device."""
    sizes = buffer.item_stride, buffer.item_bytes, buffer.items
    return buffer.name, buffer.space, *sizes, buffer.memory.partition(":")[0], buffer.padding


def bounded(data: bytes) -> bytes:
    """Raises LayoutError above `MAX_BYTES`."""
    if len(data) > MAX_BYTES:
        raise LayoutError(f"a layout of {len(data)} bytes: at most {MAX_BYTES} are exchanged.")
    return data


def decode(data: str | bytes, decode: Callable[..., Any]) -> PoolLayout:
    """Reads a layout; raises LayoutError: too large, malformed, another version, inconsistent."""
    try:
        data = bounded(data.encode() if isinstance(data, str) else data)
        version = decode(data, type=_LayoutVersion).version
        if version != VERSION:
            raise LayoutError(
                f"layout version {version}: this kvpool reads version {VERSION}. "
                "Run the same kvpool on both sides."
            )
        layout = msgspec.convert(decode(data, type=WireLayout), PoolLayout, from_attributes=True)
    except LayoutError:
        raise
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        # the reason may quote megabytes, and escape codes
        raise LayoutError(f"malformed layout: {one_line(str(error), MAX_REASON)}") from None
    layout.fingerprint()  # a plan with many ranks needs theirs at once
    return layout
