"""Layouts as tables in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.layout import PoolLayout, Space
from kvpool.layout.summary import shape_rows
from kvpool.layout.text import held_words

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
    for row in shape_rows(layout):
        lines = "\n".join(row.item), "\n".join(row.axes)
        cells = row.name, row.layers, row.dtype, row.items, *lines, row.cell
        table.add_row(*map(escape, cells))
    table.caption = "bytes; axes as steps x stride"
    return table


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
