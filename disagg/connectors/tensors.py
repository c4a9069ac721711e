"""An engine's layers as buffers and regions: what a layer's tensor holds, by parts; kernel blocks
that are one block; layers that lie in one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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
    """A part of a tensor `[item, ...]`: `dims` name its first dims, and `item` says what lies
    behind them.

    `step`: the part is one step of the second dim, which `dims` leave out. `heads`: those of this
    rank, if `head` is one of the dims. `packing`: the name of an unknown inside.
    """

    dims: tuple[str, ...]
    item: Template
    step: int | None = None
    heads: Heads | None = None
    packing: str = ""


@dataclass(frozen=True, kw_only=True)
class LayerTensor:
    """A tensor `[item, ...]` of layer `number` of `owner`, and the parts that it consists of: all
    that the layer keeps, or some of it. `name` is the engine's; `prefix` is put before every role.
    """

    name: str
    number: int
    view: torch.Tensor
    parts: Sequence[TensorPart]
    owner: str = "target"
    prefix: str = ""

    def describe(self, space: str) -> Described:
        """One buffer, whose items are all of the tensor's, and its regions. Raises UnknownFormat,
        which names the layer.
        """
        with naming(self.name):
            (first, *_) = item_regions(self.parts[0].item, owner=self.owner, layer=0, buffer="?")
            dims = ("item", *map(str, range(1, self.view.dim())))
            name = f"{self.owner}.{self.number}.{self.prefix}{first.role}"
            buffer = describe_buffer(self.view, dims, name=name, space=space)
            regions: list[Region] = []
            for part in self.parts:
                regions += describe_items(
                    self.view if part.step is None else self.view[:, part.step],
                    part.dims,
                    prefixed(part.item, self.prefix),
                    layer=self.number,
                    owner=self.owner,
                    shards={"head": (part.heads.start, part.heads.total)} if part.heads else {},
                    packing=part.packing,
                    buffer=buffer,
                ).regions
            return Described((buffer,), tuple(regions))

    def folded(self, ratio: int) -> LayerTensor | None:
        """The layer with each `ratio` kernel blocks as one, if they can be read so: its format has
        tokens of their own, and all of a block are one stride apart.
        """
        by_tokens = all("entry" in part.dims for part in self.parts)
        count, heads, tokens, content = self.view.shape
        block, head, token, element = self.view.stride()
        if not by_tokens or block != tokens * token:
            return None
        shape = count // ratio, heads, ratio * tokens, content
        view = self.view.as_strided(shape, (ratio * block, head, token, element))
        return replace(self, view=view)


PlacedTensor = tuple[Space, LayerTensor]
"""A layer's tensor, and the space whose ids address its items."""


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
    for space, layer in placed:
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


def layer_number(name: str) -> int:
    """The number in a layer's dotted name. Raises UnknownFormat unless there is one."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise UnknownFormat(
            f"{name}: a name with {len(numbers)} numbers is not known, only with the layer's. Use "
            "another model."
        )
    return numbers[0]


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
            "contiguous, or add the format to disagg/connectors/formats.py."
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
    folded = [layer.folded(ratio) for layer in layers] if ratio > 1 else [*layers]
    whole = [layer for layer in folded if layer is not None]
    return (whole, 1) if len(whole) == len(layers) else ([*layers], ratio)


def join_nested(layers: Iterable[Described]) -> Described:
    """All buffers and regions of one space. Layers whose items lie inside one another become one
    buffer (vLLM's KVCacheLayout BHLNC: the layers of a head side by side).
    """
    buffers: list[Buffer] = []
    regions: list[Region] = []
    for layer in sorted(layers, key=lambda layer: layer.buffers[0].base):
        (buffer,) = layer.buffers
        shift = buffer.base - buffers[-1].base if buffers else 0
        if not buffers or shift >= buffers[-1].item_bytes:
            buffers.append(buffer)
            regions += layer.regions
            continue
        outer = buffers[-1]
        regions += (replace(r, buffer=outer.name, offset=r.offset + shift) for r in layer.regions)
        reach = max(outer.item_bytes, shift + buffer.item_bytes)
        buffers[-1] = replace(outer, item_bytes=reach)
    return Described(tuple(buffers), tuple(regions))
