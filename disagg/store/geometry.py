"""What the objects of a writing engine are, and whether this engine can use them.

A geometry is what the ranks of one engine write of a chunk: a part for each rank, by kind of
object, with what the bytes mean beside their layout. Its digest is in the names of its objects. A
namespace is what all sharing engines have in common: nothing in it says how state lies in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from disagg.plan import IncompatibleLayouts, TransferPlan, plan
from disagg.plan.cast.scales import scale_problems
from disagg.protocol.messages import Convention, checked_conventions
from disagg.store.chunks import KINDS, ChunkLayout, chunk_layouts, elected, of_kind
from kvpool.layout import LayoutError, PoolLayout
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.layout.text import one_line
from kvpool.layout.types import MAX_REASON

VERSION = 1
MAX_PARTS = 1 << 10
"""Ranks of an engine."""
MAX_BYTES = 16 << 20
"""Of a geometry's description."""
MAX_OBJECT_BYTES = 1 << 34
MAX_ALL_BLOCKS = 1 << 20
"""Of the objects that a chunk has in a geometry."""
DIGEST_BYTES = 16


class _GeometryDocument(Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    chunk_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    conventions: dict[str, Convention]
    parts: Annotated[list[dict[str, bytes]], Meta(min_length=1, max_length=MAX_PARTS)]


@dataclass(frozen=True)
class Geometry:
    """What an engine's ranks write of a chunk of `chunk_tokens` tokens: by rank and kind."""

    chunk_tokens: int
    conventions: Mapping[str, Convention]
    parts: tuple[Mapping[str, ChunkLayout], ...]

    @staticmethod
    def of(
        ranks: Sequence[PoolLayout], conventions: Mapping[str, Convention], chunk_tokens: int
    ) -> Geometry:
        """Of an engine's ranks. Raises ValueError where a chunk would cut an item."""
        parts = tuple(chunk_layouts(rank, chunk_tokens) for rank in elected(ranks))
        if sum(len(chunk.blocks) for part in parts for chunk in part.values()) > MAX_ALL_BLOCKS:
            raise ValueError(
                f"a chunk of {chunk_tokens} tokens would have more than {MAX_ALL_BLOCKS} blocks in "
                "all ranks."
            )
        checked = dict(sorted(checked_conventions(conventions).items()))
        return Geometry(chunk_tokens, checked, parts)

    @cached_property
    def encoded(self) -> bytes:
        parts = [
            {k: part[k].layout.to_msgpack() for k in KINDS if k in part} for part in self.parts
        ]
        document = _GeometryDocument(VERSION, self.chunk_tokens, dict(self.conventions), parts)
        return msgspec.msgpack.encode(document)

    @cached_property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.encoded, digest_size=DIGEST_BYTES).digest()

    @staticmethod
    def decode(data: bytes) -> Geometry:
        """Reads untrusted bytes. Raises ValueError with the reason."""
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} bytes: at most {MAX_BYTES} are read.")
        try:
            document = msgspec.msgpack.decode(data, type=_GeometryDocument)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"malformed: {one_line(str(error), MAX_REASON)}") from None
        if document.version != VERSION:
            raise ValueError(f"version {document.version}: this kvpool reads version {VERSION}.")
        conventions = checked_conventions(document.conventions)
        tokens = document.chunk_tokens
        parts, left = list[dict[str, ChunkLayout]](), MAX_ALL_BLOCKS
        for named in document.parts:
            part = {kind: _checked_part(kind, layout, tokens) for kind, layout in named.items()}
            left -= sum(len(chunk.blocks) for chunk in part.values())
            if left < 0:  # each has few, but they stay in memory
                raise ValueError(f"more than {MAX_ALL_BLOCKS} blocks in all parts.")
            parts.append(part)
        geometry = Geometry(tokens, conventions, tuple(parts))
        if geometry.encoded != data:
            raise ValueError("not the bytes in which a writer says this.")
        return geometry

    @cached_property
    def namespace(self) -> str:
        """The name of that which its objects are in."""
        return namespace_of(self)[0]

    def with_kind(self, kind: str) -> list[int]:
        """The parts that have objects of a kind."""
        return [number for number, part in enumerate(self.parts) if kind in part]


def _checked_part(kind: str, data: bytes, tokens: int) -> ChunkLayout:
    layout = PoolLayout.from_msgpack(data)
    part = chunk_layouts(layout, tokens).get(kind)
    if part is None or part.layout.to_msgpack() != data:
        raise LayoutError(f"{kind!r}: not the layout of an object of that kind.")
    if part.nbytes > MAX_OBJECT_BYTES:
        raise LayoutError(f"{kind!r}: objects of {part.nbytes} bytes, more than are read.")
    part.blocks  # noqa: B018 - raises ValueError if they are too many
    return part


def namespace(
    ranks: Sequence[PoolLayout], conventions: Mapping[str, Convention], chunk_tokens: int
) -> tuple[str, str]:
    """The name of what may be shared, 32 hexadecimal digits, and the text whose digest it is.
    Drafts are not in it: an engine without one reads the target's state.
    """
    state: dict[str, list[list[object]]] = {}
    for rank in ranks:
        for region in rank.regions:
            if region.owner == "target":
                elements = region.width // ITEMSIZE[region.dtype]
                for axis in region.inner_axes:
                    elements *= axis.total
                per = rank.space_of(region).tokens_per_entry
                # layers may differ, and be in another order in another engine
                form = [region.dtype, elements, per, region.packing]
                if form not in state.setdefault(region.role, []):
                    state[region.role].append(form)
    text = json.dumps(
        {
            "version": VERSION,
            "chunk_tokens": chunk_tokens,
            "layers": max(rank.total_kv_layers for rank in ranks),
            "model": conventions.get("model"),
            "weights": conventions.get("weights"),
            "state": {role: sorted(forms, key=repr) for role, forms in sorted(state.items())},
        },
        separators=(",", ":"),
    )
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest(), text


def namespace_of(geometry: Geometry) -> tuple[str, str]:
    """As `namespace`, of what an engine writes. Raises ValueError for a geometry without state."""
    layouts = [chunk.layout for part in geometry.parts for chunk in part.values()]
    if not layouts:
        raise ValueError("no part of this geometry has state.")
    return namespace(layouts, geometry.conventions, geometry.chunk_tokens)


@dataclass(frozen=True)
class Readable:
    """A geometry that a rank can read: by kind, the plan from its parts to the rank's pool."""

    geometry: Geometry
    plans: Mapping[str, TransferPlan]
    sources: Mapping[str, Sequence[int]]
    """By kind, which parts are the sources of the plan."""


def readable(
    geometry: Geometry,
    layout: PoolLayout,
    conventions: Mapping[str, Convention],
    allow_missing: Collection[str] = (),
    cast: bool | Collection[str] = False,
) -> Readable:
    """How a rank reads a geometry. Raises ValueError with the reasons why it cannot."""
    differing = [
        f"{name}: {value!r} of the writer, {conventions[name]!r} here."
        for name, value in geometry.conventions.items()
        if conventions.get(name, value) != value
    ]
    if differing:
        raise ValueError(" ".join(differing))
    plans: dict[str, TransferPlan] = {}
    sources: dict[str, list[int]] = {}
    for kind in KINDS:
        dest = of_kind(layout, kind)
        if not dest.regions:
            continue
        sources[kind] = geometry.with_kind(kind)
        layouts = [geometry.parts[number][kind].layout for number in sources[kind]]
        try:
            planned = plans[kind] = plan(layouts, dest, allow_missing=allow_missing, cast=cast)
        except IncompatibleLayouts as error:
            raise ValueError(f"{kind}: {' '.join(error.lines())}") from None
        if planned.cast is not None and (
            problems := scale_problems(planned.cast.arrival, [geometry.conventions], conventions)
        ):
            raise ValueError(f"{kind}: {' '.join(problems)}")
    return Readable(geometry, plans, sources)
