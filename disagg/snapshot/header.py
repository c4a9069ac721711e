"""The header of a file: safetensors' tensors, and what kvpool says of them in `__metadata__`.

All of it is untrusted. What the tensors are follows from the layout and the number of tokens; the
rest is covered by a checksum.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from disagg.errors import PeerError
from disagg.portable.layout import data_bytes, live_pieces, portable
from disagg.protocol.messages import Convention, checked_conventions
from kvpool.layout import Key, LayoutError, PoolLayout
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.layout.text import is_name
from kvpool.layout.types import MAX_NAME, MAX_REASON

VERSION = 1
"""Rises with the version of layouts, and with how digests are computed, too."""
MAX_HEADER = 8 << 20
"""Bytes of a header."""
MAX_TOKENS = 1 << 24
"""Tokens of a file."""
LENGTH = struct.Struct("<Q")

_METADATA = "__metadata__"
_MARK = "kvpool_snapshot"
_COVERED = (_MARK, "tokens", "request", "conventions", "layout", "digests")
_TYPES = {
    "bool": "BOOL",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
}
"""safetensors' names of dtypes; of what not all its readers know, bytes."""
Tensor = dict[str, str | list[int]]


class SnapshotRefused(PeerError, ValueError):
    """A file that is no snapshot, is damaged, or is not of this model or request. Unless the
    message says otherwise, nothing was written to the pool.
    """


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds: `tokens` tokens of a rank's state, by a layout whose pointers are offsets
    in its data.

    `request` names the request; the ranks' files are its parts. `conventions` are those of the
    engine (`disagg.connectors.conventions`). `digests` are of all live bytes of regions with any.
    """

    tokens: int
    layout: PoolLayout
    request: str = ""
    conventions: Mapping[str, Convention] = field(default_factory=dict)
    digests: Mapping[Key, int] = field(default_factory=dict)

    @property
    def data_bytes(self) -> int:
        return data_bytes(self.layout)

    def encode(self) -> bytes:
        """Length and header, equally long for any digests. Raises ValueError above `MAX_HEADER`."""
        names = {region.key: region.buffer for region in self.layout.regions}
        digests = {names[key]: f"{value:016x}" for key, value in self.digests.items()}
        covered = {
            _MARK: str(VERSION),
            "tokens": str(self.tokens),
            "request": self.request,
            "conventions": _json(dict(sorted(self.conventions.items()))),
            "layout": self.layout.to_json(),
            "digests": _json(digests),
        }
        document = {_METADATA: covered | {"checksum": _checksum(covered)}, **tensors(self.layout)}
        text = _json(document).encode()
        text += b" " * (-len(text) % LENGTH.size)
        if len(text) > MAX_HEADER:
            raise ValueError(f"a header of {len(text)} bytes: at most {MAX_HEADER} are read back.")
        return LENGTH.pack(len(text)) + text


def header_bytes(start: bytes, size: int) -> int:
    """Bytes of the header of a file of `size` bytes, by its first 8. Raises SnapshotRefused."""
    if len(start) < LENGTH.size:
        raise SnapshotRefused(f"{size} bytes: too short for a safetensors file.")
    (length,) = LENGTH.unpack(start)
    if length > min(MAX_HEADER, size - LENGTH.size):
        raise SnapshotRefused(
            f"its header would be {length} bytes: at most {MAX_HEADER} are read, and the file has "
            f"{size}. It is no safetensors file, or was cut off."
        )
    return int(length)


def decode(data: bytes, size: int) -> Header:
    """Reads a header without its length, of `size` bytes of data. Raises SnapshotRefused."""
    try:
        return _decode(data, size)
    except ValueError as error:
        what = "layout: " if isinstance(error, LayoutError) else ""
        raise SnapshotRefused(f"{what}{error}"[:MAX_REASON]) from None  # it may quote megabytes
    except RecursionError:
        raise SnapshotRefused("header: nested too deeply.") from None


def _decode(data: bytes, size: int) -> Header:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise SnapshotRefused(f"header: {error}.") from None
    document = _object(text, "header")
    metadata = document.pop(_METADATA, {})
    if not isinstance(metadata, dict) or _MARK not in metadata:
        raise SnapshotRefused(f"not a kvpool snapshot: its {_METADATA} has no {_MARK}.")
    if metadata[_MARK] != str(VERSION):
        raise SnapshotRefused(
            f"{_MARK} version {metadata[_MARK]!r}: this kvpool reads version {VERSION}. Load it "
            "with the kvpool that saved it."
        )
    _same_names(metadata, (*_COVERED, "checksum"), _METADATA)
    if wrong := [name for name, value in metadata.items() if not isinstance(value, str)]:
        raise SnapshotRefused(f"{_METADATA} {wrong[0]}: a text, got {metadata[wrong[0]]!r}.")
    checksum, text = metadata["checksum"], metadata["tokens"]
    if checksum != (own := _checksum(metadata)):
        raise SnapshotRefused(
            f"{_METADATA} checksum {checksum!r}: its values have {own!r}. The header is damaged."
        )
    if not re.fullmatch("[1-9][0-9]{0,8}", text) or int(text) > MAX_TOKENS:
        raise SnapshotRefused(f"tokens {text!r}: 1 to {MAX_TOKENS}.")
    tokens = int(text)
    layout = PoolLayout.from_json(metadata["layout"])
    conventions = checked_conventions(_object(metadata["conventions"], "conventions"))
    request = checked_request(metadata["request"])
    expected = portable(layout, tokens)
    _same(json.loads(layout.to_json()), json.loads(expected.to_json()), "layout")
    _same(document, tensors(layout), "tensors")
    if size != data_bytes(layout):
        raise SnapshotRefused(
            f"{size} bytes of data, its tensors have {data_bytes(layout)}. The file was cut off, "
            "or bytes were added."
        )
    digests = _digests(_object(metadata["digests"], "digests"), layout, tokens)
    return Header(
        tokens=tokens, layout=layout, request=request, conventions=conventions, digests=digests
    )


def checked_request(name: str) -> str:
    """The name of a request, which must be short and printable; else raises ValueError."""
    if not (name == "" or is_name(name, MAX_NAME)):
        raise ValueError(f"request {name!r}: at most {MAX_NAME} printable characters.")
    return name


def tensors(layout: PoolLayout) -> dict[str, Tensor]:
    """A file's tensors by name: `[item, axes..., element]`, with an axis of entries if several."""
    by_name: dict[str, Tensor] = {}
    for region in layout.regions:
        buffer, entry = layout.buffer_of(region), region.axis("entry")
        grid = [buffer.items] if entry is None or entry.size == 1 else [buffer.items, entry.size]
        size = ITEMSIZE[region.dtype] if region.dtype in _TYPES else 1
        by_name[buffer.name] = {
            "dtype": _TYPES.get(region.dtype, "U8"),
            "shape": [*grid, *(axis.size for axis in region.inner_axes), region.width // size],
            "data_offsets": [buffer.base, buffer.end],
        }
    return by_name


def _same_names(names: Iterable[str], wanted: Iterable[str], part: str) -> None:
    names, wanted = set(names), set(wanted)
    for what, differing in (("unknown", names - wanted), ("missing", wanted - names)):
        if differing:
            raise SnapshotRefused(f"{part}: {what} {', '.join(map(repr, sorted(differing)))}.")


def _same(value: Any, wanted: Any, part: str) -> None:
    """Refuses JSON that is not what follows from the rest, by the name of the part that differs."""
    if isinstance(value, dict) and isinstance(wanted, dict):
        _same_names(value, wanted, part)
        for name in wanted:
            _same(value[name], wanted[name], f"{part} {name}")
    elif isinstance(value, list) and isinstance(wanted, list) and len(value) == len(wanted):
        for number, parts in enumerate(zip(value, wanted)):
            _same(*parts, f"{part} {number}")
    elif type(value) is not type(wanted) or value != wanted:  # not equal to True or 1.0 either
        raise SnapshotRefused(f"{part}: {value!r}, in a file of these tokens {wanted!r}.")


def _digests(texts: Mapping[str, Any], layout: PoolLayout, tokens: int) -> dict[Key, int]:
    keys = {layout.region_by_key[p.key].buffer: p.key for p in live_pieces(layout, tokens)}
    _same_names(texts, keys, "digests")
    digests = {}
    for name, key in keys.items():
        text = texts[name]
        if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{16}", text):
            raise SnapshotRefused(f"digest of {name}: 16 hex digits, got {text!r}.")
        digests[key] = int(text, 16)
    return digests


def _object(text: str, what: str) -> dict[str, Any]:
    """A JSON object, no name of it twice."""

    def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise SnapshotRefused(f"{what}: {twice!r} is there twice.")
        return values

    try:
        value = json.loads(text, object_pairs_hook=once)
    except SnapshotRefused:
        raise
    except ValueError as error:
        raise SnapshotRefused(f"{what}: malformed JSON: {error}.") from None
    if not isinstance(value, dict):
        raise SnapshotRefused(f"{what}: a JSON object, got {type(value).__name__}.")
    return value


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _checksum(metadata: Mapping[str, str]) -> str:
    """SHA-256 of the values that are not to be derived from others."""
    return hashlib.sha256(_json([metadata[name] for name in _COVERED]).encode()).hexdigest()
