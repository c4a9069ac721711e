"""An engine's layers as buffers and regions: what a layer's tensor holds, by parts; kernel blocks
that are one block; layers that lie in one another.

A tensor is `[item, head, entry, content]` in any physical order; where there are no heads, that dim
is of size 1. The dims that a part names have the tensor's strides; its kernel takes what lies
behind them for contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from kvpool.describe import Described, describe_buffer, describe_items
from kvpool.item import Template, item_regions, prefixed
from kvpool.layout import Buffer, LayoutError, PoolLayout, Region, Space
from kvpool.layout.formats import Heads


class UnknownFormat(ValueError):
    """What a layer keeps in its pages, or how its pages are found, is not known."""


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """A part of a tensor `[item, ...]`: `dims` name its first dims, `item` says what lies behind.

    `step`: the part is one step of the second dim, which `dims` leave out. `heads`: those of this
    rank, if `head` is one of the dims. `packing`: the name of an unknown inside.
    """

    dims: tuple[str, ...]
    item: Template
    step: int | None = None
    heads: Heads | None = None
    packing: str = ""


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


def dense_items(view: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Items `[item, ...]` in the order of their bytes, and that order of the dims behind the first:
    each contiguous. Raises UnknownFormat for items that lie among others.
    """
    strides = view.stride()
    order = sorted(range(1, view.dim()), key=lambda dim: -strides[dim])
    ordered = view.permute(0, *order)
    if not ordered[0].is_contiguous():
        raise UnknownFormat(
            f"items that lie among others (strides {strides}) are not known, only contiguous ones. "
            "Use a cache layout in which blocks are contiguous."
        )
    return ordered, order


def clear_items(tensors: Sequence[torch.Tensor], items: Sequence[int]) -> None:
    """Sets items of tensors to 0. A device's own work for it has ended when this returns; other
    work there may go on.
    """
    if not tensors or not items:
        return
    device = tensors[0].device
    stream = None if device.type == "cpu" else torch.Stream(device)
    with stream or nullcontext():
        for tensor in tensors:
            tensor[items] = 0
    if stream is not None:
        stream.synchronize()


def head_shard(count: int, of_model: int, rank: int, ranks: int) -> Heads:
    """The `count` heads of a rank of tensor parallelism. Layers may have other heads than the model
    says; of fewer heads than ranks, several ranks hold the same. `of_model` are all heads of this
    state, which need not be the model's KV heads.
    """
    total = of_model if count == 1 and ranks > 1 else count * ranks
    if count == 1 and total > ranks:
        raise UnknownFormat(
            f"1 KV head on each of {ranks} ranks of a model of {of_model}: how many the layer has "
            "is not known. Use a smaller TP size."
        )
    return Heads(rank * total // ranks, count, total)


@dataclass(frozen=True, kw_only=True)
class LayerTensor:
    """A tensor `[item, ...]` of layer `number` of `owner`, and the parts that it consists of: all
    that the layer keeps, or some of it. `name` is the engine's; `prefix` is put before every role.
    `tile`: tokens an entry, which are written one after the other.
    """

    name: str
    number: int
    view: torch.Tensor
    parts: Sequence[TensorPart]
    owner: str = "target"
    prefix: str = ""
    tile: int = 1

    def describe(self, space: str) -> Described:
        """One buffer, all of the tensor, and its regions. Raises UnknownFormat with the name."""
        with naming(self.name):
            first, *_ = item_regions(self.parts[0].item, owner=self.owner, layer=0, buffer="?")
            dims = ("item", *map(str, range(1, self.view.dim())))
            name = f"{self.owner}.{self.number}.{self.prefix}{first.role}"
            buffer = describe_buffer(self.view, dims, name=name, space=space)
            return Described.join(
                describe_items(
                    self.view if part.step is None else self.view[:, part.step],
                    part.dims,
                    prefixed(part.item, self.prefix),
                    layer=self.number,
                    owner=self.owner,
                    shards={"head": (part.heads.start, part.heads.total)} if part.heads else {},
                    packing=part.packing,
                    buffer=buffer,
                )
                for part in self.parts
            )

    def folded(self, ratio: int) -> LayerTensor | None:
        """Each `ratio` kernel blocks as one, if tokens are known and one stride apart in them."""
        by_tokens = all("entry" in part.dims for part in self.parts)
        count, heads, tokens, content = self.view.shape
        block, head, token, element = self.view.stride()
        if ratio > 1 and not (by_tokens and block == tokens * token):
            return None
        shape = count // ratio, heads, ratio * tokens, content
        view = self.view.as_strided(shape, (ratio * block, head, token, element))
        return replace(self, view=view)


PlacedTensor = tuple[Space, LayerTensor]
"""A layer's tensor, and the space whose ids address its items."""


def tiled(space: Space, tokens: int) -> Space:
    """A space of the same items, whose entries are tiles of so many tokens."""
    if tokens == 1:
        return space
    entries, rest = divmod(space.entries_per_item, tokens)
    if rest:
        raise UnknownFormat(
            f"pages of {space.entries_per_item} tokens: not known, only multiples of {tokens}, "
            "whose scales are mixed. Use another page size."
        )
    return replace(
        space,
        name=f"{space.name}.tiles",
        entries_per_item=entries,
        tokens_per_entry=tokens,
        ids=space.id_list,
        block_pool=None,
        items_per_block=1,
        partial=True,
    )


def layout_of(
    placed: Iterable[PlacedTensor], layers: int, model: object, *spaces: Space
) -> PoolLayout:
    """The layout of a rank's tensors, each with the space of its items, for a model of `layers`
    layers whose name or folder is `model`. `spaces` are there without a tensor too.

    Raises UnknownFormat for a layer whose space is not that of the others of its name, and as
    `LayerTensor.describe` does; LayoutError where the tensors do not fit together.
    """
    space_by_name = {space.name: space for space in spaces}
    described: dict[str, list[Described]] = {}
    for whole, layer in placed:
        with naming(layer.name):
            space = tiled(whole, layer.tile)
        first = space_by_name.setdefault(space.name, space)
        if first != space:
            raise UnknownFormat(
                f"{layer.name}: {space}, but others have {first}. Use a model, and a draft, of one "
                "page size and window."
            )
        described.setdefault(space.name, []).append(layer.describe(space.name))
    return PoolLayout.of(
        *(join_nested(layers_of_space) for layers_of_space in described.values()),
        spaces=space_by_name.values(),
        total_kv_layers=layers,
        model=str(model).rstrip("/").rpartition("/")[2],
    )


@contextmanager
def naming(layer: str) -> Iterator[None]:
    """Names a layer in what is refused of it."""
    try:
        yield
    except UnknownFormat as error:
        raise UnknownFormat(f"{layer}: {error}") from None
    except LayoutError as error:
        raise UnknownFormat(
            f"{layer}: its format is not known. {error} Use a cache layout in which blocks are "
            "contiguous, or add the format to kvpool/layout/formats."
        ) from None


def fold_blocks(layers: Sequence[LayerTensor], blocks: int) -> tuple[list[LayerTensor], int]:
    """Layers `[kernel block, head, token, content]` of `blocks` blocks, and their items a block: 1
    where the kernel blocks of each can be read as one.
    """
    counts = {layer.view.shape[0] for layer in layers}
    ratio = min(counts) // blocks
    if counts != {ratio * blocks}:
        shapes = ", ".join(f"{layer.name} {tuple(layer.view.shape)}" for layer in layers)
        raise UnknownFormat(
            f"views of {blocks} blocks, {shapes}: not known, only as many kernel blocks a block in "
            "all layers of a group. Use a block size that all backends take."
        )
    folded = [whole for layer in layers if (whole := layer.folded(ratio))]
    return (folded, 1) if len(folded) == len(layers) else ([*layers], ratio)


def join_nested(layers: Iterable[Described]) -> Described:
    """All buffers and regions of one space. Layers whose items lie inside one another become one
    buffer (vLLM's KVCacheLayout BHLNC: the layers of a head side by side).
    """
    buffers: list[Buffer] = []
    regions: list[Region] = []
    for layer in sorted(layers, key=lambda layer: layer.buffers[0].base):
        (buffer,) = layer.buffers
        if not buffers or buffer.base >= buffers[-1].base + buffers[-1].item_bytes:
            buffers.append(buffer)
        outer = buffers[-1]
        shift = buffer.base - outer.base
        regions += (replace(r, buffer=outer.name, offset=r.offset + shift) for r in layer.regions)
        reach = max(outer.item_bytes, shift + buffer.item_bytes)
        buffers[-1] = replace(outer, item_bytes=reach)
    return Described(tuple(buffers), tuple(regions))
