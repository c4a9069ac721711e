"""Pages of keys or values of multi-head attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from kvpool.layout.dtypes import PACKINGS
from kvpool.layout.formats.heads import Heads
from kvpool.layout.formats.kind import At, Attention, BufferSpec
from kvpool.layout.formats.scales import scaled
from kvpool.layout.template import Cell, Repeat, Template

Order = Literal["nhd", "hnd"]
ORDERS: tuple[Order, ...] = get_args(Order)


def head_page(cell: Cell, heads: Heads, entries: int, order: Order) -> Template:
    """`cell` for each token and head: `[entry, head]` (nhd) or `[head, entry]` (hnd)."""
    if order == "nhd":
        return Repeat("entry", entries, heads.of(cell))
    return heads.of(Repeat("entry", entries, cell))


@dataclass(frozen=True, slots=True)
class MHA(Attention):
    """Multi-head and grouped-query attention: all K, then all V, each `[entry, head, dim]` (nhd) or
    `[head, entry, dim]` (hnd).

    Packings: `fp8`, a float32 scale per token and head; `mxfp8`, a ue8m0 scale per 32 elements (OCP
    Microscaling). Scales have buffers of their own.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    order: Order = "nhd"
    inputs = ("k", "v")

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order: one of {ORDERS}, got {self.order!r}.")

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        """K, V, then the scales of both if the packing has any."""
        v_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        dims = {"k": self.head_dim, "v": v_dim}
        if not at.takes(self, *PACKINGS):
            cells = [Cell(role, dim, at.packing) for role, dim in dims.items()]
        else:
            block, scale = (32, "ue8m0") if at.packing == "mxfp8" else (0, "f32")
            pairs = [scaled(role, dim, block, scale) for role, dim in dims.items()]
            cells = [cell for column in zip(*pairs) for cell in column]
        heads = at.shard.heads(self.num_kv_heads)
        for cell in cells:
            yield at.buffer(cell.role, head_page(cell, heads, at.entries, self.order))
