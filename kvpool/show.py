"""Layouts as tables for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvpool.layout import PoolLayout, Region

if TYPE_CHECKING:
    from rich.table import Table


def layout_table(layout: PoolLayout, title: str = "layout") -> Table:
    """One row per (owner, role) and shape, layers gathered; sizes in bytes."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("region", "layers", "dtype", title=title)
    table.add_column("items", justify="right")
    table.add_column("item", justify="right")
    table.add_column("axes")
    table.add_column("cell", justify="right")
    grouped: dict[tuple[str, ...], list[int]] = {}
    for region in layout.regions:
        grouped.setdefault(_row(layout, region), []).append(region.layer)
    for (name, *rest), layers in grouped.items():
        table.add_row(escape(name), ranges(layers), *rest)
    table.caption = "bytes; axes as steps of total x stride"
    return table


def ranges(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{low}-{high}" if low < high else f"{low}" for low, high in spans)


def human(nbytes: float) -> str:
    """`73728` as `72.0 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


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
        "\n".join(f"{a.name} {a.size} of {a.total} x {a.stride:,}" for a in axes),
        f"{region.width:,}",
    )
