"""The layout of a file: the live items of a request, one region behind the other without gaps.

It depends on what the state means and not on how a pool keeps it: pages of any size, in any order
and placement, become the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from disagg.digest.digest import Piece
from kvpool.layout import Axis, Buffer, PoolLayout, Region, RequestAddress, Space, Span
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.layout.spaces import EVERY


def portable(layout: PoolLayout, tokens: int) -> PoolLayout:
    """The layout of a file that holds `tokens` tokens of what `layout` describes; its pointers are
    offsets from the file's first byte of data.

    A page is one entry, but of packed regions, whose items stay whole. Wide elements come first, so
    that every region begins at a multiple of its element's size. Raises LayoutError where names
    are too long or meet.
    """
    plain = {layout.space_of(region).name for region in layout.regions if not region.packing}
    spaces: dict[str, Space] = {}
    buffers: list[Buffer] = []
    regions: list[Region] = []
    end = 0
    for region in sorted(layout.regions, key=lambda region: (-ITEMSIZE[region.dtype], *region.key)):
        space = _space(layout.space_of(region), bool(region.packing), plain)
        spaces[space.name] = space
        compact = _compact(region, space)
        items = max(1, len(space.alive_items(tokens)))  # a buffer has an item
        size = compact.nbytes
        buffers.append(
            Buffer(
                name=compact.buffer,
                space=space.name,
                base=end,
                item_stride=size,
                item_bytes=size,
                items=items,
            )
        )
        regions.append(compact)
        end += items * size
    return PoolLayout(
        buffers=tuple(buffers),
        regions=tuple(regions),
        spaces=tuple(spaces.values()),
        total_kv_layers=layout.total_kv_layers,
        model=layout.model,
    )


def block_table(layout: PoolLayout, tokens: int) -> RequestAddress:
    """Where the request lies in a file of that layout: its live items, in order."""
    spans = {}
    for space in layout.spaces:
        items = space.alive_items(tokens)
        spans[space.name] = Span(np.arange(len(items)), items.start)
    return RequestAddress(tokens, spans)


def data_bytes(layout: PoolLayout) -> int:
    return max((buffer.end for buffer in layout.buffers), default=0)


def live_pieces(layout: PoolLayout, tokens: int) -> Iterator[Piece]:
    """A piece for each region with live entries, the same for a rank's pool and its file."""
    for region in layout.regions:
        space = layout.space_of(region)
        live = space.alive_items(tokens) if region.packing else space.alive_in_request(tokens)
        if not space.held.part(live):  # a length, as a header may name millions of positions
            continue
        interleaves = () if space.held == EVERY else (space.held,)
        box = tuple((axis.name, axis.start, axis.stop) for axis in region.inner_axes)
        yield Piece(region.key, box, live, interleaves)


def _space(space: Space, packed: bool, plain: set[str]) -> Space:
    """A space of the file. Packed regions have one of their own, as their items are pages."""
    whole = packed or space.per_request
    return replace(
        space,
        name=f"{space.name}.packed" if packed and space.name in plain else space.name,
        entries_per_item=space.entries_per_item if whole else 1,
        reserved=0,
        ids=None,
        block_pool=None,
        items_per_block=1,
        ring=None,
    )


def _compact(region: Region, space: Space) -> Region:
    """A region alone in its item: entry, then the other axes in their order, without gaps."""
    axes: list[Axis] = []
    stride = region.width
    for axis in reversed(region.inner_axes):
        axes.append(replace(axis, stride=stride))
        stride *= axis.size
    if space.has_entries and not region.packing:
        axes.append(Axis("entry", space.entries_per_item, stride))
    name = f"{region.owner}.{region.layer}.{region.role}"
    return replace(region, buffer=name, offset=0, axes=tuple(axes))
