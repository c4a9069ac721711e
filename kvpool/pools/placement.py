"""Where a pool's buffers lie in its memory: a buffer per layer, all layers of a page side by side,
or all layers of a kind one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpool.layout.template import Template, alignment, item_bytes, item_regions
from kvpool.layout.types import Buffer, Space
from kvpool.pools.buf_infos import StateType

PLACEMENTS = ("layer", "page", "stack")
COUNTS = ("num_pages", "num_window_pages", "num_slots")


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `size` equal parts of what is sharded."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"shard: rank {self.rank} of {self.size}. The rank is 0 to size-1.")

    def of(self, total: int) -> tuple[int, int]:
        """(start, size) of `total` steps that this part holds; with fewer steps than parts, parts
        are replicas.
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
    """A kind of buffer: one for each of `layers`, in `space`, whose items look like `item`.

    `state` is how connectors list it beside the main cache (None: as part of it).
    """

    name: str
    layers: tuple[int, ...]
    space: str
    item: Template
    state: StateType | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes of an item, rounded up so that the next one is aligned."""
        return _up(item_bytes(self.item), alignment(self.item))

    @property
    def sharded(self) -> int:
        """Steps of the dimension that ranks share out: heads, or channels of a convolution; 0 if
        every rank holds all.
        """
        steps = 0
        for region in item_regions(self.item, owner="any", layer=0, buffer=self.name):
            head, dim = region.axis("head"), region.axis("dim")
            steps += head.size * (dim.size if dim else 1) if head else 0
        return steps


def count_argument(lender: Space) -> str:
    """Which of a pool's numbers of items is that of the id list which a space lends: `COUNTS`."""
    if lender.per_request:
        return "num_slots"
    return "num_pages" if lender.window is None else "num_window_pages"


def buffer_name(owner: str, name: str, layer: int) -> str:
    """The name of one layer's buffer."""
    return f"{owner}.{name}.{layer}"


def place(
    declared: Sequence[BufferSpec],
    items: Mapping[str, int],
    *,
    owner: str,
    placement: str,
    step: int,
) -> tuple[list[Buffer], int]:
    """Buffers of `items[space]` items with bases counted from 0, and the bytes that hold them all.

    Runs of items begin at multiples of `step` bytes; of a stack, that of its first layer does.
    """
    buffers: list[Buffer] = []
    top = 0
    for space, count in items.items():
        rows = [(d, layer) for d in declared if d.space == space for layer in d.layers]
        if placement != "page":
            for part, layer in rows:
                name, size = buffer_name(owner, part.name, layer), part.item_bytes
                buffers.append(Buffer(name, space, top, size, size, count))
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
            name, size = buffer_name(owner, part.name, layer), part.item_bytes
            buffers.append(Buffer(name, space, at, stride, size, count))
            at += size
        top = _up(top + count * stride, step)
    return buffers, top


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
