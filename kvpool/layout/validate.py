"""Checks that the parts of a layout fit together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter, index
from typing import TYPE_CHECKING, SupportsIndex

import msgspec
import numpy as np

from kvpool.layout.grid import region_runs, run_count
from kvpool.layout.spaces import Space
from kvpool.layout.text import is_printable, ranges
from kvpool.layout.types import MAX_NAME, MAX_PARTS, Buffer, LayoutError, Region, need_int

if TYPE_CHECKING:
    from kvpool.layout import PoolLayout

VERSION = 1
MAX_RUNS = 1 << 18
"""Contiguous runs of all shapes of items together, and of items side by side: a small layout can
describe very many.
"""
MAX_LISTED = 1 << 20
"""Runs of all items side by side that are not alike: a plan lists what lies between them."""


def check_layout(layout: PoolLayout) -> None:
    """Raises LayoutError, naming owner, layer, role and both values."""
    if layout.version != VERSION:
        raise LayoutError(f"layout version {layout.version}: this kvpool reads version {VERSION}.")
    need_int(layout.total_kv_layers, 0, "total_kv_layers")
    for what, text in (("model", layout.model), ("generation", layout.generation)):
        if len(text) > MAX_NAME or not is_printable(text):
            raise LayoutError(f"{what}: at most {MAX_NAME} printable characters, got {text!r}.")
    for what, key in (("buffer", "name"), ("space", "name"), ("region", "key")):
        parts = getattr(layout, f"{what}s")
        if len(parts) > MAX_PARTS:
            raise LayoutError(f"{len(parts)} {what}s: at most {MAX_PARTS}.")
        times = Counter(map(attrgetter(key), parts))
        for part in parts if len(times) < len(parts) else ():
            if times[getattr(part, key)] > 1:
                raise LayoutError(f"{what} {getattr(part, 'name', part)}: declared twice.")
    for buffer in layout.buffers:
        space = layout.space_by_name.get(buffer.space)
        if space is None:
            declared = ", ".join(layout.space_by_name) or "none"
            raise LayoutError(
                f"buffer {buffer.name}: space {buffer.space!r} is not declared (declared: "
                f"{declared})."
            )
        if buffer.items <= space.reserved:
            raise LayoutError(
                f"buffer {buffer.name}: {buffer.items} items, and space {space.name} reserves "
                f"{space.reserved} of them."
            )
    _check_shared_ids(layout)
    _check_block_pools(layout)
    for region in layout.regions:
        if region.buffer not in layout.buffer_by_name:
            raise LayoutError(f"{region}: buffer {region.buffer!r} is not declared.")
        _check_entries(region, layout.space_of(region))
    _check_items(layout)
    _check_apart(layout)


def total_layers(total: int | None, layers: Sequence[int], owner: str) -> int:
    """The number of layers of the target model; `owner` holds `layers` of them, in order. Raises
    LayoutError if it is not given and does not follow, or if `layers` has more.
    """
    if total is None:
        if owner == "target" and list(layers) == list(range(len(layers))):
            return len(layers)
        raise LayoutError(
            f"{owner} total_kv_layers: not given, and layers {ranges(layers)} alone do not say how "
            "many the target model has. Give total_kv_layers."
        )
    if isinstance(total, bool) or not isinstance(total, SupportsIndex):
        raise LayoutError(
            f"{owner} total_kv_layers: how many layers the target model has, one whole number, got "
            f"{total!r}."
        )
    count = index(total)
    if owner == "target" and layers and count <= layers[-1]:
        raise LayoutError(f"{owner} total_kv_layers: {count}, but layer {layers[-1]} is there.")
    return count


def _check_shared_ids(layout: PoolLayout) -> None:
    for space in layout.spaces:
        first = layout.space_by_name.get(space.id_list)
        if first is None or first.id_list != first.name:
            raise LayoutError(
                f"space {space.name}: shares the ids of {space.ids!r}, which has no id list itself."
            )
        if space.per_request or first.per_request:
            continue
        if space.item_span != first.item_span:
            raise LayoutError(
                f"space {space.name}: an item holds {_tokens(space)}, but an item of "
                f"{first.name}, whose ids it shares, {_tokens(first)}."
            )
        for cut in (space, first) if space.interleave != first.interleave else ():
            if cut.interleave is not None and cut.tokens_per_item % cut.interleave.size:
                raise LayoutError(
                    f"space {cut.name}: stretches of {cut.interleave.size} positions do not divide "
                    f"an item of {cut.tokens_per_item}, and {space.name} shares the ids of "
                    f"{first.name}, which is interleaved otherwise: their items would hold other "
                    "positions. Make the stretches divide an item."
                )


def _tokens(space: Space) -> str:
    """How many tokens an item holds, as text: `8 of 32 tokens` where ranks share them out."""
    of = "" if space.interleave is None else f"{space.tokens_per_item} of "
    return f"{of}{space.item_span} tokens"


def _check_block_pools(layout: PoolLayout) -> None:
    """Checks that all spaces of a block pool have the same blocks, and reserve the same."""
    parts = [(s.name, "reserved", f"space {s.name}", s.reserved) for s in layout.spaces]
    for b in layout.buffers:
        parts.append((b.space, "items", f"buffer {b.name} of space {b.space}", b.items))
    firsts: dict[tuple[str, str], tuple[str, int, str]] = {}
    for name, what, part, items in parts:
        ids = layout.space_by_name[layout.space_by_name[name].id_list]
        if ids.block_pool is None:
            continue
        blocks, rest = divmod(items, ids.items_per_block)
        if rest:
            raise LayoutError(
                f"block pool {ids.block_pool}: {part} has {what} {items}, but a block is "
                f"{ids.items_per_block} items of space {ids.name}. Use a multiple of it."
            )
        words = f"{items}" if ids.items_per_block == 1 else f"{items} ({blocks} blocks)"
        first, count, of_first = firsts.setdefault((ids.block_pool, what), (part, blocks, words))
        if blocks != count:
            raise LayoutError(
                f"block pool {ids.block_pool}: {part} has {what} {words}, {first} {of_first}. A "
                f"block can be any space's of its pool: give them all the same {what}, in blocks."
            )


def _check_entries(region: Region, space: Space) -> None:
    if region.packing:  # its item is one whole
        if space.interleave is not None:
            raise LayoutError(
                f"{region}: packing {region.packing!r} in space {space.name}, of whose positions "
                "this rank holds some: which entries lie in an item is not known to move. Describe "
                "what is in it, or give the space no interleave."
            )
        if space.ring is not None:
            raise LayoutError(
                f"{region}: packing {region.packing!r} in space {space.name}, whose items have "
                "room for some of their entries: where these lie is not known. Describe what is in "
                "it, or give the space no ring."
            )
        return
    entry = region.axis("entry")
    size = entry.size if entry else 1
    if entry is not None and not space.has_entries:
        raise LayoutError(
            f"{region}: has an entry axis, but an item of space {space.name} is a {space.kind} "
            "without entries."
        )
    if size != space.steps:
        raise LayoutError(
            f"{region}: {size} entries, but an item of space {space.name} holds {space.steps}."
        )
    if entry is not None and (entry.start, entry.total) != (0, entry.size):
        raise LayoutError(
            f"{region}: entries cannot be sharded, got {entry.start} of {entry.total}."
        )


def _check_items(layout: PoolLayout) -> None:
    """Checks that regions lie in their items and do not overlap; items of one shape once."""
    shapes: dict[bytes, tuple[int, int]] = {}  # encoded: hashes of tuples can be made to collide
    shape_of: dict[str, tuple[int, int]] = {}  # the number of a buffer's shape, and its runs
    runs = 0
    for name, regions in layout.regions_in.items():
        if not regions:
            continue
        size = layout.buffer_by_name[name].item_bytes
        for region in regions:
            if region.end > size:
                raise LayoutError(
                    f"{region}: ends at byte {region.end} of an item of {size} (buffer {name})."
                )
        grids = [(r.offset, r.width, [(a.size, a.stride) for a in r.axes]) for r in regions]
        shape = msgspec.msgpack.encode(grids)
        if shape in shapes:
            shape_of[name] = shapes[shape]
            continue
        own = sum(run_count(region) for region in regions)
        shape_of[name] = shapes[shape] = len(shapes), own
        runs += own
        if runs > MAX_RUNS:
            raise LayoutError(
                f"buffer {name}: an item of {own} separate runs, at most {MAX_RUNS} are supported "
                "in all."
            )
        _check_disjoint(name, regions)
    _check_adjacent(layout, shape_of)


def _check_adjacent(layout: PoolLayout, shape_of: Mapping[str, tuple[int, int]]) -> None:
    """Checks that it takes bounded work to list what lies between the regions of adjacent items. A
    plan does that once for all groups of buffers that are alike.
    """
    seen: set[bytes] = set()
    listed = 0
    for group in layout.adjacent_buffers:
        first, shapes = group[0], [shape_of.get(buffer.name, (-1, 1)) for buffer in group]
        parts = [
            (buffer.base - first.base, buffer.padding, number)
            for buffer, (number, _) in zip(group, shapes)
        ]
        content = msgspec.msgpack.encode((first.item_stride, parts))
        if content in seen:
            continue
        seen.add(content)
        runs = sum(count for _, count in shapes)
        listed += runs
        if runs > MAX_RUNS or listed > MAX_LISTED:
            raise LayoutError(
                f"buffer {first.name}: an item of it and those beside it are {runs} separate runs, "
                f"at most {MAX_RUNS} are supported; {listed} with the items of others, at most "
                f"{MAX_LISTED}."
            )


def _check_disjoint(buffer: str, regions: Sequence[Region]) -> None:
    parts = [region_runs(region) for region in regions]
    starts = np.concatenate([offsets for offsets, _ in parts])
    ends = np.concatenate([offsets + width for offsets, width in parts])
    whose = np.repeat(np.arange(len(regions)), [len(offsets) for offsets, _ in parts])
    order = np.argsort(starts, kind="stable")
    clash = np.flatnonzero(ends[order][:-1] > starts[order][1:])
    if clash.size:
        low, high = order[clash[0]], order[clash[0] + 1]
        first, second = regions[whose[low]], regions[whose[high]]
        what = "overlaps itself" if first is second else f"overlaps {second}"
        raise LayoutError(
            f"{first}: {what} in an item of buffer {buffer}: "
            f"bytes {starts[low]} to {ends[low]} and {starts[high]} to {ends[high]}."
        )


def _check_apart(layout: PoolLayout) -> None:
    """Checks that buffers, by blocks, lie apart, or interleave at one stride from block to block.
    Those that interleave may overlap within a block if their ids are two lists of one block pool.
    """
    blocks = [layout.by_blocks(buffer) for buffer in layout.buffers]  # refuses strides too large
    solid = [buffer for buffer in blocks if buffer.memory != "meta"]
    first = last = None  # of buffers that interleave: the first, and where their blocks reach
    by_list: dict[str, Buffer] = {}
    reach = 0
    for buffer in sorted(solid, key=lambda b: (b.memory, b.base)):
        ids = layout.space_by_name[buffer.space].id_list
        if first is None or last is None or buffer.memory != first.memory or buffer.base >= reach:
            first = last = buffer
            by_list, reach = {ids: buffer}, buffer.end
            continue
        within = buffer.base + buffer.item_bytes - first.base <= first.item_stride
        if not within or buffer.item_stride != first.item_stride:
            raise LayoutError(_overlap(layout, buffer, last))
        # what overlaps here is of one block pool: `last` stands for all of it
        if buffer.base < last.base + last.item_bytes and not _one_pool(layout, buffer, last):
            raise LayoutError(_overlap(layout, buffer, last))
        # items of one list have one stride too, and as blocks do, the first ones lie within it
        twin = by_list.get(ids)
        if twin and buffer.base < twin.base + layout.buffer_by_name[twin.name].item_bytes:
            raise LayoutError(_overlap(layout, buffer, twin))
        by_list[ids] = buffer
        reach = max(reach, buffer.end)
        if buffer.base + buffer.item_bytes > last.base + last.item_bytes:
            last = buffer


def _one_pool(layout: PoolLayout, first: Buffer, second: Buffer) -> bool:
    """Whether the ids of both come from one block pool."""
    lists = [layout.space_by_name[layout.space_by_name[b.space].id_list] for b in (first, second)]
    return lists[0].block_pool is not None and lists[0].block_pool == lists[1].block_pool


def _overlap(layout: PoolLayout, buffer: Buffer, other: Buffer) -> str:
    """Why `buffer`, by blocks, may not lie where it does, and what would make it right."""
    home, size = layout.buffer_by_name[other.name], layout.items_per_block(other)
    of = "" if size == 1 else f", {size} a block"
    says = (
        f"buffer {buffer.name}: base {buffer.base} lies inside buffer {other.name} ({home.base} "
        f"to {home.end}, items of {home.item_bytes} every {home.item_stride}{of})."
    )
    theirs, own = (layout.space_by_name[buffer_.space] for buffer_ in (other, buffer))
    if theirs.id_list == own.id_list:
        return (
            f"{says} An id of {theirs.id_list} is an item of both. Slices of one tensor are "
            "regions of one buffer: describe_buffer."
        )
    alike = "block b over block b only: at one stride, and not beyond it"
    if _one_pool(layout, buffer, other):
        return (
            f"{says} Buffers of one block pool lie over one another {alike}; blocks are "
            f"{other.item_stride} bytes apart there, {buffer.item_stride} here."
        )
    return (
        f"{says} If an id is in use by only one of spaces {theirs.name} and {own.name} at a time, "
        f"give both the same block_pool: then they may lie over one another, {alike}."
    )
