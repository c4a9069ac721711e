"""What attention kernels keep in a page, by `kvpool.layout.formats`: templates in, parts of a
layer's tensor out.

A tensor is `[item, head, entry, content]` in any physical order; where there are no heads, that dim
is of size 1. The dims that a part names have the tensor's strides; its kernel takes what lies
behind them for contiguous.
"""

from __future__ import annotations

import torch

from disagg.connectors.tensors import TensorPart, UnknownFormat
from kvpool.item import Cell, Repeat, Seq, Template
from kvpool.layout.formats import Heads, scaled


def head_shard(count: int, of_model: int, rank: int, ranks: int) -> Heads:
    """The `count` heads of a rank of tensor parallelism. Layers may have other heads than the model
    says; of fewer heads than ranks, several ranks hold the same.
    """
    total = count * ranks
    if count == 1 and ranks > 1:
        if of_model > ranks:
            raise UnknownFormat(
                f"1 KV head on each of {ranks} ranks of a model of {of_model}: how many the layer "
                "has is not known. Use a smaller TP size."
            )
        total = of_model
    return Heads(rank * total // ranks, count, total)


def paged(tensor: torch.Tensor, page: int, heads: int = 1) -> torch.Tensor:
    """A view of rows `[token, head, content]`, in any number of dims, in pages of `page` tokens."""
    rows = tensor.view(-1, heads, tensor.shape[-1])
    pages = len(rows) // page
    return rows[: pages * page].view(pages, page, heads, -1).transpose(1, 2)


def check_unscaled(key: float, value: float) -> None:
    """Raises UnknownFormat where the elements of a whole tensor are scaled: that is in no page, and
    a peer with another scale would read wrong values.
    """
    if (key, value) != (1.0, 1.0):
        raise UnknownFormat(
            f"its values are scaled by k {key} and v {value} of the checkpoint, which is not in "
            "its pages; only 1.0 is known. Use a checkpoint without KV scales, or --kv-cache-dtype "
            "auto."
        )


def items(item: Template, packing: str = "") -> TensorPart:
    """Contiguous items."""
    return TensorPart(dims=("item",), item=item, packing=packing)


def head_items(item: Template, heads: Heads, packing: str = "") -> TensorPart:
    """`item` a head, whose inside may be known by `packing` only."""
    return TensorPart(dims=("item", "head"), item=item, heads=heads, packing=packing)


def rows(row: Template, step: int = 0) -> TensorPart:
    """`row` a token, of one step of the second dim."""
    return TensorPart(dims=("item", "entry"), item=row, step=step)


def head_rows(row: Template, heads: Heads) -> TensorPart:
    """`row` a token and head."""
    return TensorPart(dims=("item", "head", "entry"), item=row, heads=heads)


def planes(dim: int, dtype: str, heads: Heads) -> list[TensorPart]:
    """A plane of K and a plane of V in the place of heads, each `[token, head, dim]`."""
    return [rows(heads.of(Cell(role, dim, dtype)), plane) for plane, role in enumerate(("k", "v"))]


def key_value_row(key: int, value: int, dtype: str, *, with_scales: bool = False) -> Template:
    """`[K | V]` of so many elements, `with_scales` each with a float32 scale behind it."""
    cells: list[Template] = []
    for role, count in (("k", key), ("v", value)):
        cells += scaled(role, count, dtype=dtype)[: 1 + with_scales]
    return Seq(*cells)


def transposed_keys(tokens: int, key: int, value: int, dtype: str) -> Template:
    """A head's part of an item: K as `[dim, token]`, then V as `[token, dim]`."""
    return Seq(
        Repeat("dim", key, Repeat("entry", tokens, Cell("k", 1, dtype))),
        Repeat("entry", tokens, Cell("v", value, dtype)),
    )


def whole_items(
    view: torch.Tensor, packing: str, heads: Heads
) -> tuple[torch.Tensor, list[TensorPart]]:
    """Items of which only `packing` is known, and which are contiguous in some order of dims. That
    order, the heads and the tokens become part of the name.
    """
    strides = view.stride()
    inner = sorted(range(1, 4), key=lambda dim: -strides[dim])
    ordered = view.permute(0, *inner)
    if not ordered[0].is_contiguous():
        raise UnknownFormat(
            f"its items move whole only, but they lie among others (strides {strides}). Use a "
            "cache layout in which blocks are contiguous."
        )
    names = {1: "heads", 2: "tokens", 3: "elements"}
    shape = " x ".join(f"{view.shape[dim]} {names[dim]}" for dim in inner)
    item = Cell("kv", ordered[0].numel() * view.element_size(), "uint8")
    return ordered, [items(item, f"{packing}, {shape}, head {heads.start} of {heads.total}")]
