"""What attention kernels keep in a page, by `kvpool.layout.formats`. Tensors and numbers in, parts
out.

A view is `[item, head, entry, content]` in any physical order; where there are no heads, that dim
is of size 1. The dims that a part names have
the view's strides; its kernel takes what lies behind them for contiguous.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from disagg.connectors.tensors import TensorPart, UnknownFormat
from kvpool.item import Cell, Repeat, Seq, Template
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.layout.formats import (
    index_key_page,
    latent_row,
    scaled,
    v4_latent_page,
)
from kvpool.layout.formats.heads import Heads


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


def rows(view: torch.Tensor, row: Template) -> list[TensorPart]:
    """`row` a token."""
    return [TensorPart(view[:, 0], ("item", "entry"), row)]


def latent_rows(view: torch.Tensor, *, latent: int, rope: int, dtype: str) -> list[TensorPart]:
    """`[latent | rope]` a token."""
    return rows(view, latent_row(latent, rope, dtype))


def head_rows(view: torch.Tensor, *, row: Template, heads: Heads) -> list[TensorPart]:
    """`row` a token and head."""
    return [TensorPart(view, ("item", "head", "entry"), row, heads)]


def packed_heads(view: torch.Tensor, *, row: Cell, packing: str, heads: Heads) -> list[TensorPart]:
    """`row` a token and head; of a head's part of an item only `packing` is known."""
    count = view[0, 0].numel() * view.element_size() // ITEMSIZE[row.dtype]
    return [TensorPart(view, ("item", "head"), replace(row, count=count), heads, packing)]


def keys_and_values(
    view: torch.Tensor, *, key: int, value: int, dtype: str, heads: Heads, with_scales: bool = False
) -> list[TensorPart]:
    """`[K | V]` a token and head, of `key` and `value` elements; `with_scales`: each with a float32
    scale behind it.
    """
    cells: list[Template] = []
    for role, count in (("k", key), ("v", value)):
        cells += scaled(role, count, dtype=dtype)[: 1 + with_scales]
    return head_rows(view, row=Seq(*cells), heads=heads)


def transposed_keys(
    view: torch.Tensor, *, key: int, value: int, dtype: str, heads: Heads, packing: str = ""
) -> list[TensorPart]:
    """A head's half of an item is K as `[dim, token]`, the other V as `[token, dim]`; `packing`:
    only the halves are known.
    """
    tokens = view.shape[2]
    item = Seq(
        Repeat("dim", key, Repeat("entry", tokens, Cell("k", 1, dtype))),
        Repeat("entry", tokens, Cell("v", value, dtype)),
    )
    if packing:
        item = Seq(Cell("k", key * tokens, dtype), Cell("v", value * tokens, dtype))
    return [TensorPart(view, ("item", "head"), item, heads, packing)]


def planes(view: torch.Tensor, *, dim: int, dtype: str, heads: Heads) -> list[TensorPart]:
    """A plane of K and a plane of V in the place of heads, each `[token, head, dim]`."""
    cells = (heads.of(Cell(role, dim, dtype)) for role in ("k", "v"))
    return [TensorPart(view[:, n], ("item", "entry"), cell) for n, cell in enumerate(cells)]


def index_keys(view: torch.Tensor, *, dim: int, dtype: str, scale: str) -> list[TensorPart]:
    """An item's keys, then their scales."""
    page = index_key_page(view.shape[2], dim, dtype=dtype, scale=scale)
    return [TensorPart(view, ("item",), page)]


def v4_latents(view: torch.Tensor, *, entries: int) -> list[TensorPart]:
    """Bytes `[item, byte]` of DeepSeek-V4's latents; what follows the last entry is padding."""
    return [TensorPart(view, ("item",), v4_latent_page(entries))]


def whole_items(view: torch.Tensor, *, packing: str, heads: Heads) -> list[TensorPart]:
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
    name = f"{packing}, {shape}, head {heads.start} of {heads.total}"
    return [TensorPart(ordered, ("item",), item, packing=name)]
