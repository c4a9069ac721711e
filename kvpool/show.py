"""Layouts as tables for people."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from kvpool.layout import Axis, PoolLayout, Region, Space

if TYPE_CHECKING:
    from rich.table import Table


def layout_table(layout: PoolLayout, title: str = "layout") -> Table:
    """One row per (owner, role) and shape, layers gathered; sizes in bytes."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title)
    for name in ("region", "layers", "dtype"):
        table.add_column(name, overflow="fold")
    table.add_column("items", justify="right")
    table.add_column("item", justify="right")
    table.add_column("axes")
    table.add_column("cell", justify="right")
    grouped: dict[tuple[str, ...], list[int]] = {}
    for region in layout.regions:
        grouped.setdefault(_row(layout, region), []).append(region.layer)
    for (name, *rest), layers in grouped.items():
        table.add_row(escape(name), steps(layers), *rest)
    table.caption = "bytes; axes as steps x stride"
    return table


def ranges(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    return ", ".join(map(_span, _spans(numbers)))


def steps(numbers: Collection[int]) -> str:
    """As `ranges`, but `2, 4, ..., 8` and `0-2, 4-6, ..., 44-46` where they go on as they begin."""
    spans = _spans(numbers)
    low, high = spans[0] if spans else (0, 0)
    apart = spans[1][0] - low if len(spans) > 3 else 0
    regular = [[low + n * apart, high + n * apart] for n in range(len(spans))]
    if apart and spans == regular:
        return f"{_span(spans[0])}, {_span(spans[1])}, ..., {_span(spans[-1])}"
    return ranges(numbers)


def _spans(numbers: Iterable[int]) -> list[list[int]]:
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return spans


def _span(span: list[int]) -> str:
    low, high = span
    return f"{low}-{high}" if low < high else f"{low}"


def human(nbytes: float) -> str:
    """`73728` as `72.0 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def axis_steps(axis: Axis) -> str:
    """`head 8`, or `head 4-7 of 8` where it is sharded."""
    if axis.size == axis.total:
        return f"{axis.name} {axis.size:,}"
    return f"{axis.name} {ranges(range(axis.start, axis.stop))} of {axis.total:,}"


def space_words(space: Space) -> str:
    """How ids of a space address positions: `space kv: pages of 64 entries`."""
    entries = "entry" if space.entries_per_item == 1 else "entries"
    words = [
        {
            "paged": f"pages of {space.entries_per_item:,} {entries}",
            "slot": "one item a request",
            "ring": f"one ring of {space.entries_per_item:,} {entries} a request",
        }[space.kind]
    ]
    if space.tokens_per_entry > 1:
        words.append(f"an entry is {space.tokens_per_entry:,} tokens")
    if space.window is not None:
        steps = f", in steps of {space.window_step:,}" if space.window_step > 1 else ""
        words.append(f"window {space.window:,}{steps}")
    if space.ids is not None:
        words.append(f"ids of {space.ids}")
    return f"space {space.name}: {', '.join(words)}"


def _row(layout: PoolLayout, region: Region) -> tuple[str, ...]:
    buffer = layout.buffer_of(region)
    axes = sorted(region.axes, key=lambda axis: -axis.stride)
    item = f"{buffer.item_bytes:,}"
    if buffer.item_stride != buffer.item_bytes:
        item += f"\nevery {buffer.item_stride:,}"
    if region.offset:
        item += f"\nfrom {region.offset:,}"
    return (
        f"{region.owner} {region.role}",
        region.dtype,
        f"{buffer.items:,}",
        item,
        "\n".join(f"{axis_steps(a)} x {a.stride:,}" for a in axes),
        f"{region.width:,}",
    )
