"""Rows that prefill holds in one format and decode in another. They are read as they are, into a
layout of their own (`arrival`): the destination's pages, heads and positions, in the source's
format. From there the destination's device stores them in its own format.

A row is what one scale or one store is about: the elements of a cell, or of the axis that stands in
a cell's place. Its scales are region `x.scale` beside region `x`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from kvpool.layout import (
    Axis,
    Buffer,
    Key,
    PoolLayout,
    Region,
    Space,
)
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.layout.types import SCALE

E4M3 = "float8_e4m3fn"
BITS = {"float32": 24, "float16": 11, "bfloat16": 8, E4M3: 4}
"""Formats without scales that are converted, and the bits of their significands."""
CODES = E4M3, "int8"
"""Values of formats with scales."""
ARRIVAL_BITS = 40
"""Buffers of an arrival lie so many bits apart, at addresses that nothing has: what is read lies in
staging memory, piece by piece.
"""


class Format(NamedTuple):
    """How rows are stored: the type of values, and and that of their scales, `scales` a row."""

    dtype: str
    scale: str = ""
    scales: int = 0

    def __str__(self) -> str:
        return f"{self.dtype} with {self.scales} {self.scale} a row" if self.scales else self.dtype


class Rows(NamedTuple):
    """A region of rows, and that of their scales; `elements` of a row lie along `axis`, or in a
    cell if that is empty.
    """

    region: Region
    scale: Region | None
    format: Format

    @property
    def cell(self) -> int:
        """Elements of a cell."""
        return self.region.width // ITEMSIZE[self.region.dtype]


def rows_in(layout: PoolLayout) -> dict[Key, Rows]:
    """The regions of a layout whose format is known, by key; scales are with their values."""
    rows: dict[Key, Rows] = {}
    for key, region in layout.region_by_key.items():
        owner, layer, role = key
        scale = layout.region_by_key.get((owner, layer, role + SCALE))
        if region.packing or region.dtype not in (CODES if scale else BITS):
            continue
        values = owner, layer, role.removesuffix(SCALE)
        if values != key and values in layout.region_by_key:
            continue
        if scale is None:
            rows[key] = Rows(region, None, Format(region.dtype))
        elif scale.inner_axes and [a.name for a in scale.axes] != [a.name for a in region.axes]:
            continue
        else:
            count = scale.width // ITEMSIZE[scale.dtype]
            rows[key] = Rows(region, scale, Format(region.dtype, scale.dtype, count))
    return rows


class Conversion(NamedTuple):
    """Rows of one region: how they arrive, and how the destination stores them. `axis` names the
    destination's axis that runs along a row, or is empty where its cells do.
    """

    arrival: Rows
    dest: Rows
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Where converted rows arrive: a layout without memory, and what is made of each region."""

    layout: PoolLayout
    conversions: Mapping[Key, Conversion]
    converted: frozenset[Key]
    """Regions of the destination that are written by conversions, scales among them."""

    def words(self, owner: str, roles: Collection[str]) -> str:
        """What is made of roles that travel alike."""
        sentences = {
            f"{rows.arrival.format} to {rows.dest.format}, {error_of(rows)}": None
            for (whose, _, role), rows in self.conversions.items()
            if whose == owner and role in roles
        }
        return "; ".join(sentences)


def arrival_of(
    sources: Sequence[PoolLayout], dest: PoolLayout, roles: bool | Collection[str]
) -> Arrival | None:
    """What has to be converted, of `roles` (True: of all); None if nothing has. What cannot be is
    left to the plan, which refuses it.
    """
    offered: dict[Key, Rows] = {}
    for layout in sources:
        for key, rows in rows_in(layout).items():
            offered.setdefault(key, rows)
    wanted = rows_in(dest)
    conversions: dict[Key, tuple[Rows, Rows, str]] = {}
    for key, rows in wanted.items():
        source = offered.get(key)
        allowed = roles if isinstance(roles, bool) else key[2] in roles
        if source is None or source.format == rows.format or not allowed:
            continue
        axis = _row_axis(source, rows)
        if axis is not None:
            conversions[key] = source, rows, axis
    return _arrival(dest, conversions) if conversions else None


def _arrival(dest: PoolLayout, pairs: Mapping[Key, tuple[Rows, Rows, str]]) -> Arrival:
    regions: list[Region] = []
    buffers: list[Buffer] = []
    conversions: dict[Key, Conversion] = {}
    for key, (source, rows, axis) in pairs.items():
        space = dest.space_of(rows.region)
        arrived: list[Region] = []
        for part in (source.region, source.scale):
            if part is not None:
                width = part.width
                if part is source.region:
                    # elements that lie along an axis there are together in a cell here
                    width = (source.cell if axis else rows.cell) * ITEMSIZE[part.dtype]
                number = len(buffers) + 1
                region, buffer = _place(
                    part, rows.region, axis=axis, width=width, space=space, number=number
                )
                arrived.append(region)
                buffers.append(buffer)
        regions += arrived
        scale = arrived[1] if source.scale is not None else None
        conversions[key] = Conversion(Rows(arrived[0], scale, source.format), rows, axis)
    converted = {r.key for c in conversions.values() for r in (c.dest.region, c.dest.scale) if r}
    used = {buffer.space for buffer in buffers}
    spaces = tuple(_of_pieces(space) for space in dest.spaces if space.name in used)
    layout = PoolLayout(
        buffers=tuple(buffers),
        regions=tuple(regions),
        spaces=spaces,
        total_kv_layers=dest.total_kv_layers,
        model=dest.model,
    )
    return Arrival(layout=layout, conversions=conversions, converted=frozenset(converted))


def _place(
    part: Region, wanted: Region, *, axis: str, width: int, space: Space, number: int
) -> tuple[Region, Buffer]:
    """A source's region in buffer `number` of an arrival, along the axes of the destination's, in
    cells of `width` bytes.
    """
    axes = _axes(wanted, axis, width)
    nbytes = prod([width, *(step.size for step in axes)])
    buffer = Buffer(
        name=f"{part.owner}.{part.layer}.{part.role}",
        space=space.name,
        base=number << ARRIVAL_BITS,
        item_stride=nbytes,
        item_bytes=nbytes,
        items=max(1, (1 << ARRIVAL_BITS - 1) // nbytes),
    )
    return replace(part, buffer=buffer.name, offset=0, axes=axes, width=width), buffer


def _row_axis(source: Rows, wanted: Rows) -> str | None:
    """The destination's axis that runs along rows, or an empty name where its cells do; None if the
    two do not hold the same rows, or if a rank has a part of a row.
    """
    theirs = {axis.name: axis for axis in source.region.inner_axes}
    ours = {axis.name: axis for axis in wanted.region.inner_axes}
    extra, lacking = ours.keys() - theirs.keys(), theirs.keys() - ours.keys()
    if not extra and not lacking and source.cell == wanted.cell:
        return ""
    if len(lacking) == 1 and not extra and source.cell == 1 and source.scale is None:
        axis = theirs[lacking.pop()]
        return "" if axis.size == axis.total == wanted.cell else None
    if len(extra) == 1 and not lacking and wanted.cell == 1 and wanted.scale is None:
        axis = ours[extra.pop()]
        if axis.size == axis.total == source.cell:
            return axis.name
    return None


def _axes(wanted: Region, axis: str, width: int) -> tuple[Axis, ...]:
    """The axes of a region in an arrival, as densely as cells of `width` bytes can be."""
    axes: list[Axis] = []
    stride = width
    for step in reversed(wanted.axes):
        if step.name != axis:
            axes.append(replace(step, stride=stride))
            stride *= step.size
    return tuple(reversed(axes))


def _of_pieces(space: Space) -> Space:
    """The space of an arrival: each of its requests begins at item 0, and no other has any."""
    return replace(space, reserved=0, ids=None, block_pool=None, items_per_block=1)


def without(layout: PoolLayout, keys: Collection[Key]) -> PoolLayout:
    """The layout of other regions: the bytes of these are foreign there."""
    regions = tuple(region for region in layout.regions if region.key not in keys)
    cut = {region.buffer for region in layout.regions if region.key in keys}
    inside = {region.buffer for region in regions}
    buffers = tuple(
        replace(buffer, padding=buffer.padding and buffer.name not in cut)
        for buffer in layout.buffers
        if buffer.name in inside
    )
    return replace(layout, regions=regions, buffers=buffers)


def error_of(rows: Conversion) -> str:
    """How far a value may be off, beside what its own format had lost already."""
    source, dest = rows.arrival.format, rows.dest.format
    if dest.scales:
        if dest.dtype == "int8":
            return "off by half a scale at most"
        return "off by 2**-4 of the value or 2**-10 of its scale at most"
    if source.scales == 0 and (dest.dtype == "float32" or source.dtype == E4M3):
        return "exact"
    text = f"off by 2**-{BITS[dest.dtype]} of the value at most"
    if dest.dtype == "float16":
        text += ", and beyond 65504 it is infinite"
    if dest.dtype == E4M3:
        text += " or 2**-10, and beyond 448 it is 448"
    return text
