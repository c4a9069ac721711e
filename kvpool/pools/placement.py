"""Where a pool's buffers lie in its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvpool.layout.template import Template, alignment, item_bytes, item_regions
from kvpool.layout.types import Buffer, LayoutError, Region, Space
from kvpool.pools.buf_infos import StateType

Placement = Literal["layer", "page", "stack"]
ITEM_COUNTS = ("num_pages", "num_window_pages", "num_slots")


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of the sharded axes a pool holds: `rank` of `size` equal parts."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"shard: rank {self.rank} of {self.size}. The rank is 0 to size-1.")

    def of(self, total: int) -> tuple[int, int]:
        """(start, size) of the steps held, of `total`; with fewer steps than parts, several parts
        hold the same step.
        """
        if total % self.size == 0:
            return self.rank * (total // self.size), total // self.size
        if self.size % total == 0:
            return self.rank // (self.size // total), 1
        raise ValueError(
            f"shard: {total} heads cannot be split over {self.size} ranks. One must divide the "
            "other."
        )


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Buffers of one name: one for each of `layers`, in `space`, with items of template `item`.

    `state` is the component under which connectors list them (None: the main cache).
    """

    name: str
    layers: tuple[int, ...]
    space: str
    item: Template
    state: StateType | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes of an item, rounded up to its alignment."""
        return _up(item_bytes(self.item), alignment(self.item))

    def buffer_name(self, owner: str, layer: int) -> str:
        """The name of one layer's buffer."""
        return f"{owner}.{self.name}.{layer}"

    def regions(self, owner: str) -> list[Region]:
        """The regions of all layers."""
        names = {layer: self.buffer_name(owner, layer) for layer in self.layers}
        return [
            region
            for layer, buffer in names.items()
            for region in item_regions(self.item, owner=owner, layer=layer, buffer=buffer)
        ]


Declared = BufferSpec  # the public name of kvpool 0.1


def count_argument(list_space: Space) -> str:
    """Which of `ITEM_COUNTS` gives the items of an id list, named by the space that owns it."""
    if list_space.per_request:
        return "num_slots"
    return "num_pages" if list_space.window is None else "num_window_pages"


def used_spaces(named: set[str], names: str, spaces: Iterable[Space]) -> dict[str, Space]:
    """Spaces of buffers and of their id lists, by name with prefix `names`."""
    known: dict[str, Space] = {}
    for space in spaces:
        if space.interleave is not None:
            raise LayoutError(
                f"space {space.name}: interleave={space.interleave}: a pool holds all positions of "
                "its requests, and its allocator counts them. Describe memory that an engine "
                "interleaves with kvpool.describe."
            )
        ids, pool = (None if n is None else names + n for n in (space.ids, space.block_pool))
        known[names + space.name] = replace(
            space, name=names + space.name, ids=ids, block_pool=pool
        )
    unknown = named - set(known)
    if unknown:
        raise LayoutError(f"spaces {sorted(unknown)}: named by buffers, missing from spaces().")
    list_spaces = {known[name].id_list for name in named}
    return {name: space for name, space in known.items() if name in named | list_spaces}


def place(
    specs: Sequence[BufferSpec],
    items: Mapping[str, int],
    *,
    owner: str,
    placement: Placement,
    step: int,
) -> tuple[list[Buffer], int]:
    """Buffers of `items[space]` items with bases from 0, and their bytes in all.

    `layer`: a stretch of memory per layer. `page`: all layers of a page side by side. `stack`: all
    layers of a specification one after the other. Stretches begin at multiples of `step` bytes.
    What a template leaves free is padding: the pool owns all of an item.
    """
    buffers: list[Buffer] = []
    top = 0
    for space, count in items.items():
        rows = [(d, layer) for d in specs if d.space == space for layer in d.layers]
        if placement != "page":
            for part, layer in rows:
                name, size = part.buffer_name(owner, layer), part.item_bytes
                buffers.append(Buffer(name, space, top, size, size, count, padding=True))
                top += count * size
                if placement == "layer" or layer == part.layers[-1]:
                    top = _up(top, step)
            continue
        # largest alignment first keeps every item aligned without gaps
        rows.sort(key=lambda row: -alignment(row[0].item))
        page = sum(part.item_bytes for part, _ in rows)
        stride = _up(page, max((alignment(part.item) for part, _ in rows), default=1))
        at = top
        for part, layer in rows:
            name, size = part.buffer_name(owner, layer), part.item_bytes
            buffers.append(Buffer(name, space, at, stride, size, count, padding=True))
            at += size
        top = _up(top + count * stride, step)
    return buffers, top


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
