"""The layout of an object: what one rank holds of one chunk, for any pages of its pool.

A chunk is `tokens` consecutive positions. What a rank holds of it are up to three objects, by how
state follows positions (`KINDS`). An object is like a page of `tokens` positions of every space,
with the axis that ranks shard outermost, then layer, role and position: a reader that needs some of
the heads, or of the layers, needs few long stretches. Keys that a writer has channel by channel
stay so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from math import isqrt

import numpy as np

from disagg.plan.pairing import encoded
from kvpool.layout import Axis, Buffer, PoolLayout, Region, RequestAddress, Space, Span
from kvpool.layout.grid import Ints

KINDS = "full", "window", "state"
"""Of objects: state that every position keeps; state of the last positions only; state that a
request has once, as of linear attention, which has an object only if a chunk was a request's end.
"""
MAX_BLOCKS = 1 << 16
"""Blocks of an object, each with a digest."""


def kind_of(space: Space) -> str:
    """In which kind of object a space lies."""
    if space.per_request:
        return "state"
    return "full" if space.window is None else "window"


@dataclass(frozen=True)
class ChunkLayout:
    """The layout of an object; its pointers are offsets in the object's data.

    `blocks` are where its blocks begin, and its end: a block is of one layer, at one step of the
    axis that ranks shard. Digests are of blocks, so whole blocks are read. 256 tokens of 2 layers
    of 2 heads of 256 bytes are 4 blocks of 65,536 bytes.
    """

    layout: PoolLayout
    tokens: int

    @cached_property
    def nbytes(self) -> int:
        return max(buffer.end for buffer in self.layout.buffers)

    @cached_property
    def blocks(self) -> Ints:
        edges, count = [np.array([0, self.nbytes])], 0
        for buffer in self.layout.buffers:
            inside = islice(_edges(self.layout.regions_in[buffer.name]), MAX_BLOCKS + 1)
            of_item = np.unique(np.fromiter(inside, dtype=np.int64))
            count += len(of_item) * buffer.items
            if count > MAX_BLOCKS:
                raise ValueError(f"an object of more than {MAX_BLOCKS} blocks.")
            items = buffer.base + np.arange(buffer.items) * buffer.item_stride
            edges.append((items[:, None] + of_item).ravel())
        return np.unique(np.concatenate(edges))

    def address(self, chunk: int, tokens: int | None = None) -> RequestAddress:
        """Where chunk number `chunk` of a request lies in its object. The request has `tokens`
        tokens, or ends with the chunk. Chunk 3 of 256 tokens is item 3 of a request of 1,024, and
        item 0 of its object: `Span([0], first_item=3)`.
        """
        spans = {}
        for space in self.layout.spaces:
            count = 1 if space.per_request else self.tokens // space.item_span
            first = 0 if space.per_request else chunk * count
            spans[space.name] = Span(np.arange(count), first)
        return RequestAddress((chunk + 1) * self.tokens if tokens is None else tokens, spans)


def chunk_layouts(layout: PoolLayout, tokens: int) -> dict[str, ChunkLayout]:
    """By kind, the layouts of a rank's objects. Raises ValueError where an item or an entry would
    be cut: what would then be in two chunks.
    """
    by_kind: dict[str, list[Region]] = {}
    for region in layout.regions:
        by_kind.setdefault(kind_of(layout.space_of(region)), []).append(region)
    return {
        kind: ChunkLayout(_chunk_layout(layout, by_kind[kind], tokens), tokens)
        for kind in KINDS
        if kind in by_kind
    }


def elected(ranks: Sequence[PoolLayout]) -> list[PoolLayout]:
    """The layouts of an engine's ranks without what another rank writes too: of ranks that hold
    the same, each has its share of the layers: two replicas of layers 0 to 3 keep 0 and 2, and 1
    and 3. A rank may be left without regions.
    """
    holders: dict[bytes, list[int]] = {}
    for number, rank in enumerate(ranks):
        for region in rank.regions:
            holders.setdefault(_held(rank, region), []).append(number)
    kept: list[list[Region]] = [[] for _ in ranks]
    for number, rank in enumerate(ranks):
        for region in rank.regions:
            alike = holders[_held(rank, region)]
            if alike[region.layer % len(alike)] == number:
                kept[number].append(region)
    return [restricted(rank, regions) for rank, regions in zip(ranks, kept)]


def restricted(layout: PoolLayout, regions: Iterable[Region]) -> PoolLayout:
    """A layout of some of the regions, with the spaces that they need."""
    regions = tuple(regions)
    names = {region.buffer for region in regions}
    buffers = tuple(buffer for buffer in layout.buffers if buffer.name in names)
    needed = {buffer.space for buffer in buffers}
    needed |= {layout.space_by_name[name].id_list for name in needed}
    spaces = tuple(space for space in layout.spaces if space.name in needed)
    return replace(layout, buffers=buffers, regions=regions, spaces=spaces)


def of_kind(layout: PoolLayout, kind: str) -> PoolLayout:
    """What of a layout lies in objects of that kind. Windows of chunks move chunk by chunk, also
    where a hand-off moves them whole.
    """
    regions = [r for r in layout.regions if kind_of(layout.space_of(r)) == kind]
    part = restricted(layout, regions)
    return replace(part, spaces=tuple(replace(space, whole=False) for space in part.spaces))


def _held(layout: PoolLayout, region: Region) -> bytes:
    box = [(axis.name, axis.start, axis.size) for axis in region.inner_axes]
    return encoded(region.key, box, layout.space_of(region).held)


def _chunk_layout(layout: PoolLayout, regions: Sequence[Region], tokens: int) -> PoolLayout:
    by_space: dict[str, tuple[Space, list[Region]]] = {}
    for region in regions:
        space = _space(layout.space_of(region), bool(region.packing), tokens)
        by_space.setdefault(space.name, (space, []))[1].append(region)
    buffers: list[Buffer] = []
    placed: list[Region] = []
    end = 0
    for name, (space, inside) in sorted(by_space.items()):
        size, of_item = _item(space, inside)
        items = 1 if space.per_request else tokens // space.item_span
        buffers.append(
            Buffer(name=name, space=name, base=end, item_stride=size, item_bytes=size, items=items)
        )
        placed += of_item
        end += items * size
    spaces = tuple(space for _, (space, _) in sorted(by_space.items()))
    # which model that is, conventions say: a folder may have another name elsewhere
    return PoolLayout(tuple(buffers), tuple(placed), spaces, layout.total_kv_layers)


def _space(space: Space, packed: bool, tokens: int) -> Space:
    """The space of an object: a page is a chunk, but of packed regions, whose items stay whole."""
    entries = space.entries_per_item
    if not space.per_request:
        unit = space.item_span if packed else space.tokens_per_entry
        if space.interleave is not None:
            unit = max(unit, space.interleave.size * space.interleave.ranks)
        if tokens % unit:
            raise ValueError(
                f"space {space.name}: chunks of {tokens} tokens would cut its units of {unit}. "
                f"Give chunk_tokens, for all that share the store, as a multiple of {unit}."
            )
        if not packed:
            entries = tokens // space.tokens_per_entry // space.held.ranks
    return replace(
        space,
        # of an object it ends so already
        name=f"{space.name.removesuffix('.packed')}.packed" if packed else space.name,
        entries_per_item=entries,
        reserved=0,
        ids=None,
        block_pool=None,
        items_per_block=1,
        ring=None if space.per_request or packed else _ring(space, entries),
        whole=False,
    )


def _ring(space: Space, entries: int) -> int | None:
    """The fewest entries for which an item needs room: a window's, if that is short."""
    if space.window is None or space.partial or space.interleave is not None:
        return None
    kept = space.window + space.window_step - 1
    low = (number for number in range(1, isqrt(entries) + 1) if entries % number == 0)
    sizes = (size for number in low for size in (number, entries // number))
    usable = (size for size in sizes if kept <= size < entries and size % space.window_step == 0)
    return min(usable, default=None)


def _item(space: Space, regions: Sequence[Region]) -> tuple[int, list[Region]]:
    """The size of an item, and its regions without gaps: those that are sharded alike together, at
    each step of their outermost axis one after the other.
    """
    placed: list[Region] = []
    end = 0
    for outer, group in groupby(sorted(regions, key=_order), key=_outer):
        alike = list(group)
        compact = [_compact(region, space) for region in alike]
        steps = outer[2] if outer else 1
        stripe = sum(region.nbytes for region in compact) // steps
        offset = end
        for region in compact:
            share = region.nbytes // steps
            axes = region.axes
            if outer:
                axes = tuple(replace(a, stride=stripe) if a.name == outer[0] else a for a in axes)
            placed.append(replace(region, offset=offset, axes=axes))
            offset += share
        end += stripe * steps
    return end, placed


def _outer(region: Region) -> tuple[str, int, int, int] | None:
    """The axis of a region that becomes the outermost."""
    if not region.inner_axes or region.packing:
        return None
    axis = region.inner_axes[0]
    return axis.name, axis.start, axis.size, axis.total


def _order(region: Region) -> tuple[object, ...]:
    return _outer(region) or ("", 0, 0, 0), region.key


def _compact(region: Region, space: Space) -> Region:
    """A region alone, without gaps: its first axis, entry, then the other axes in their order."""
    outer, inner = region.inner_axes[:1], region.inner_axes[1:]
    entry = () if region.packing or not space.has_entries else (Axis("entry", space.steps, 0),)
    # keys whose channels have the tokens side by side (vLLM's on a CPU) stay so: token by token,
    # each element would be a run of its own
    own = region.axis("entry")
    wider = tuple(axis for axis in inner if own is not None and axis.stride > own.stride)
    inner = tuple(axis for axis in inner if axis not in wider)
    axes: list[Axis] = []
    stride = region.width
    for axis in reversed((*outer, *wider, *entry, *inner)):
        axes.append(replace(axis, stride=stride))
        stride *= axis.size
    return replace(region, buffer=space.name, offset=0, axes=tuple(axes))


def _edges(regions: Sequence[Region]) -> Iterable[int]:
    """Where blocks of an item begin: each layer at each step of its outermost axis."""
    layers: dict[tuple[object, str, int], list[Region]] = {}
    for region in regions:
        layers.setdefault((_outer(region), region.owner, region.layer), []).append(region)
    for (outer, _, _), inside in layers.items():
        first = min(region.offset for region in inside)
        if outer is None:
            yield first
            continue
        axis = inside[0].inner_axes[0]
        yield from range(first, first + axis.size * axis.stride, axis.stride)
