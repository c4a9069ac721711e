"""A layout in one line, as objects print it, and in a table of text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from kvpool.layout.text import axis_steps, ranges, steps
from kvpool.layout.types import SCALE
from kvpool.layout.units import human

if TYPE_CHECKING:
    from kvpool.layout import PoolLayout, Region

MOST_SPACES = 3
"""Named in one line."""


def summary(layout: PoolLayout) -> str:
    """Layers, items, types, shard, bytes and memory: `layers 0-3, 17 pages of 16 entries,
    bfloat16, head 0-3 of 8, 4.2 MiB on cpu`.
    """
    words: list[str] = []
    layers: dict[str, set[int]] = {}
    for region in layout.regions:
        layers.setdefault(region.owner, set()).add(region.layer)
    for owner, numbers in layers.items():
        words.append(f"{'' if owner == 'target' else f'{owner} '}layers {ranges(sorted(numbers))}")
    lists = [(layout.space_by_name[name], count) for name, count in layout.items_by_list.items()]
    for space, count in lists[:MOST_SPACES]:
        name = f" of {space.name}" if len(lists) > 1 else ""
        words.append(f"{count:,} {space.traits.plural}{name}{_entries(space.entries_per_item)}")
    if len(lists) > MOST_SPACES:
        words.append(f"items of {len(lists) - MOST_SPACES} more spaces")
    values = [region for region in layout.regions if not region.role.endswith(SCALE)]
    words.append("/".join(dict.fromkeys(region.dtype for region in values)))
    words += dict.fromkeys(
        axis_steps(axis) for region in values for axis in region.axes if axis.size < axis.total
    )
    nbytes = sum(slab.nbytes for slab in layout.slabs())
    words.append(f"{human(nbytes)} on {'/'.join(sorted({b.memory for b in layout.buffers}))}")
    return ", ".join(word for word in words if word)


def _entries(count: int) -> str:
    return f" of {count:,} entries" if count > 1 else ""


class ShapeRow(NamedTuple):
    """Regions of one owner, role and shape, in words. `item`: bytes, and where they are not dense
    how far items and a region's first byte are apart; `axes` as steps x stride.
    """

    name: str
    layers: str
    dtype: str
    items: str
    item: tuple[str, ...]
    axes: tuple[str, ...]
    cell: str


def shape_rows(layout: PoolLayout) -> list[ShapeRow]:
    """One for each owner, role and shape."""
    rows: dict[ShapeRow, list[int]] = {}
    for region in layout.regions:
        rows.setdefault(_row(layout, region), []).append(region.layer)
    return [row._replace(layers=steps(numbers)) for row, numbers in rows.items()]


def _row(layout: PoolLayout, region: Region) -> ShapeRow:
    buffer = layout.buffer_of(region)
    item = [f"{buffer.item_bytes:,}"]
    if buffer.item_stride != buffer.item_bytes:
        item.append(f"every {buffer.item_stride:,}")
    if region.offset:
        item.append(f"from {region.offset:,}")
    packing = [f"packing {region.packing}"] if region.packing else []
    axes = (f"{axis_steps(axis)} x {axis.stride:,}" for axis in region.axes_by_stride)
    return ShapeRow(
        name=f"{region.owner} {region.role}",
        layers="",
        dtype=region.dtype,
        items=f"{buffer.items:,}",
        item=tuple(item),
        axes=(*packing, *axes),
        cell=f"{region.width:,}",
    )


def explain(layout: PoolLayout) -> str:
    """A table of `shape_rows`; sizes in bytes."""
    table = _table(layout)
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in table)
    return "\n".join(line.rstrip() for line in lines)


def html(layout: PoolLayout) -> str:
    """The same for notebooks; `kvpool.render.html` draws every byte."""
    return f"<p>{escape(summary(layout))}</p>{html_table(_table(layout))}"


def html_table(table: Sequence[Sequence[str]]) -> str:
    """Rows of text as an HTML table; the first row is the head."""
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table[1:])
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table[0])
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _table(layout: PoolLayout) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [("region", "layers", "dtype", "items", "item", "cell", "axes")]
    for row in shape_rows(layout):
        item, axes = " ".join(row.item), ", ".join(row.axes)
        table.append((row.name, row.layers, row.dtype, row.items, item, row.cell, axes))
    return table
