"""Pages of keys or values of multi-head attention."""

from __future__ import annotations

from typing import Literal, get_args

from kvpool.layout.formats.heads import Heads
from kvpool.layout.template import Cell, Repeat, Template

Order = Literal["nhd", "hnd"]
ORDERS: tuple[Order, ...] = get_args(Order)


def head_page(cell: Cell, heads: Heads, entries: int, order: Order) -> Template:
    """`cell` for each token and head: `[entry, head]` (nhd) or `[head, entry]` (hnd)."""
    if order == "nhd":
        return Repeat("entry", entries, heads.of(cell))
    return heads.of(Repeat("entry", entries, cell))
