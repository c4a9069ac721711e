"""Layouts as tables in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.layout import PoolLayout, Region, Space
from kvpool.layout.sentences import axis_steps, held_words, steps

if TYPE_CHECKING:
    from rich.table import Table


def layout_table(layout: PoolLayout, title: str = "layout") -> Table:
    """A row for each (owner, role) and shape, with its layers; sizes in bytes."""
    from rich.markup import escape

    from kvpool.render.table import FittedTable

    table = FittedTable("region", "layers", "dtype", title=title)
    for name in ("items", "item"):
        table.add_column(name, justify="right")
    table.add_column("axes")
    table.add_column("cell", justify="right", no_wrap=True)
    grouped: dict[tuple[str, ...], list[int]] = {}
    for region in layout.regions:
        grouped.setdefault(_row(layout, region), []).append(region.layer)
    for (name, *rest), layers in grouped.items():
        table.add_row(escape(name), steps(layers), *map(escape, rest))
    table.caption = "bytes; axes as steps x stride"
    return table


def human(nbytes: float) -> str:
    """`73728` as `72.0 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def space_words(space: Space) -> str:
    """How ids of a space address positions, as text: `space kv: pages of 64 entries`."""
    words = [space.traits.words(space)]
    if space.tokens_per_entry > 1:
        filled = ", written one after the other" if space.partial else ""
        words.append(f"an entry is {space.tokens_per_entry:,} tokens{filled}")
    if space.window is not None:
        steps = f", in steps of {space.window_step:,}" if space.window_step > 1 else ""
        whole = ", which moves whole" if space.whole else ""
        words.append(f"window {space.window:,}{steps}{whole}")
    if space.interleave is not None:
        words.append(held_words(space))
    if space.ids is not None:
        words.append(f"ids of {space.ids}")
    if space.block_pool is not None:
        size = space.items_per_block
        of = f" ({size:,} items a block)" if size > 1 else ""
        words.append(f"ids from block pool {space.block_pool}{of}")
    return f"space {space.name}: {', '.join(words)}"


def _row(layout: PoolLayout, region: Region) -> tuple[str, ...]:
    axes = [f"{axis_steps(a)} x {a.stride:,}" for a in region.axes_by_stride]
    if region.packing:
        axes.insert(0, f"packing {region.packing}")
    buffer = layout.buffer_of(region)
    item = f"{buffer.item_bytes:,}"
    if buffer.item_stride != buffer.item_bytes:
        item += f"\nevery {buffer.item_stride:,}"
    if region.offset:
        item += f"\nfrom {region.offset:,}"
    name, lines = f"{region.owner} {region.role}", "\n".join(axes)
    return name, region.dtype, f"{buffer.items:,}", item, lines, f"{region.width:,}"
