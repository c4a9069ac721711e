"""Checks that the parts of a layout fit together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvpool.layout.grid import region_runs, run_count
from kvpool.layout.types import MAX_INT, MAX_NAME, MAX_PARTS, Buffer, LayoutError, Region, Space

if TYPE_CHECKING:
    from kvpool.layout import PoolLayout

VERSION = 1
MAX_RUNS = 1 << 18
"""Contiguous runs of all item shapes together: a small layout can describe very many."""


def check_layout(layout: PoolLayout) -> None:
    """Raises LayoutError, naming owner, layer, role and both values."""
    if layout.version != VERSION:
        raise LayoutError(f"layout version {layout.version}: this kvpool reads version {VERSION}.")
    if not 0 <= layout.total_kv_layers <= MAX_INT:
        raise LayoutError(f"total_kv_layers: 0 to 2**63-1, got {layout.total_kv_layers}.")
    for what, text in (("model", layout.model), ("generation", layout.generation)):
        if len(text) > MAX_NAME or not text.isprintable():
            raise LayoutError(f"{what}: at most {MAX_NAME} printable characters, got {text!r}.")
    for what in ("buffers", "regions", "spaces"):
        if len(getattr(layout, what)) > MAX_PARTS:
            raise LayoutError(f"{len(getattr(layout, what))} {what}: at most {MAX_PARTS}.")
    _check_unique((buffer.name for buffer in layout.buffers), "buffer")
    _check_unique((space.name for space in layout.spaces), "space")
    _check_unique(layout.regions, "region", key=lambda region: region.key)
    for buffer in layout.buffers:
        space = layout.space_by_name.get(buffer.space)
        if space is None:
            known = ", ".join(layout.space_by_name) or "none"
            raise LayoutError(
                f"buffer {buffer.name}: space {buffer.space!r} is not declared (declared: {known})."
            )
        if buffer.items <= space.reserved:
            raise LayoutError(
                f"buffer {buffer.name}: {buffer.items} items, of which space {space.name} reserves "
                f"{space.reserved}."
            )
    _check_shared_ids(layout.spaces)
    _check_block_pools(layout)
    inside: dict[str, list[Region]] = defaultdict(list)
    for region in layout.regions:
        if region.buffer not in layout.buffer_by_name:
            raise LayoutError(f"{region}: buffer {region.buffer!r} is not declared.")
        _check_entries(region, layout.space_of(region))
        inside[region.buffer].append(region)
    shapes: set[bytes] = set()
    listed = 0
    for name, regions in inside.items():
        listed += _check_item(layout.buffer_by_name[name], regions, shapes, MAX_RUNS - listed)
    _check_apart(layout)


def _check_unique(
    parts: Iterable[object], what: str, key: Callable[[Any], object] = lambda part: part
) -> None:
    seen: set[object] = set()
    for part in parts:
        if key(part) in seen:
            raise LayoutError(f"{what} {part}: declared twice.")
        seen.add(key(part))


def _check_shared_ids(spaces: Sequence[Space]) -> None:
    by_name = {space.name: space for space in spaces}
    for space in spaces:
        first = by_name.get(space.id_list)
        if first is None or first.id_list != first.name:
            raise LayoutError(
                f"space {space.name}: shares the ids of {space.ids!r}, which has no id list itself."
            )
        if space.kind == first.kind == "paged" and space.tokens_per_item != first.tokens_per_item:
            raise LayoutError(
                f"space {space.name}: an item holds {space.tokens_per_item} tokens, but an item "
                f"of {first.name}, whose ids it shares, {first.tokens_per_item}."
            )


def _check_block_pools(layout: PoolLayout) -> None:
    """Checks that all spaces of a block pool have the same ids, and reserve the same."""
    known: dict[tuple[str, str], tuple[str, int]] = {}

    def need_same(space: Space, what: str, where: str, value: int) -> None:
        pool = layout.space_by_name[space.id_list].block_pool
        if pool is None:
            return
        first, other = known.setdefault((pool, what), (where, value))
        if value != other:
            raise LayoutError(
                f"block pool {pool}: {where} has {what} {value}, {first} {other}. An id of a "
                f"block pool can be any of its spaces': give them all the same {what}."
            )

    for space in layout.spaces:
        need_same(space, "reserved", f"space {space.name}", space.reserved)
    for buffer in layout.buffers:
        space = layout.space_by_name[buffer.space]
        need_same(space, "items", f"buffer {buffer.name} of space {space.name}", buffer.items)


def _check_entries(region: Region, space: Space) -> None:
    entry = region.axis("entry")
    size = entry.size if entry else 1
    if space.kind == "slot" and entry is not None:
        raise LayoutError(
            f"{region}: has an entry axis, but an item of space {space.name} is a slot without "
            "entries."
        )
    if size != space.entries_per_item:
        raise LayoutError(
            f"{region}: {size} entries, but an item of space {space.name} holds "
            f"{space.entries_per_item}."
        )
    if entry is not None and (entry.start, entry.total) != (0, entry.size):
        raise LayoutError(
            f"{region}: entries cannot be sharded, got {entry.start} of {entry.total}."
        )


def _check_item(buffer: Buffer, regions: Sequence[Region], shapes: set[bytes], most: int) -> int:
    """Checks that the regions of an item do not overlap; returns the number of runs listed.

    `shapes` are those of items already checked, encoded: hashes of tuples of numbers can be made to
    collide.
    """
    for region in regions:
        if region.end > buffer.item_bytes:
            raise LayoutError(
                f"{region}: ends at byte {region.end} of an item of {buffer.item_bytes} (buffer "
                f"{buffer.name})."
            )
    grids = [(r.offset, r.width, tuple((a.size, a.stride) for a in r.axes)) for r in regions]
    shape = msgspec.msgpack.encode((buffer.item_bytes, grids))
    if shape in shapes:
        return 0
    runs = sum(run_count(region) for region in regions)
    if runs > most:
        raise LayoutError(
            f"buffer {buffer.name}: an item of {runs} separate runs, at most {MAX_RUNS} "
            "are supported in all."
        )
    parts = [region_runs(region) for region in regions]
    starts = np.concatenate([offsets for offsets, _ in parts])
    ends = np.concatenate([offsets + width for offsets, width in parts])
    whose = np.repeat(np.arange(len(regions)), [len(offsets) for offsets, _ in parts])
    order = np.argsort(starts, kind="stable")
    clash = np.flatnonzero(ends[order][:-1] > starts[order][1:])
    if clash.size:
        one, two = order[clash[0]], order[clash[0] + 1]
        first, second = regions[whose[one]], regions[whose[two]]
        what = "overlaps itself" if first is second else f"overlaps {second}"
        raise LayoutError(
            f"{first}: {what} in an item of buffer {buffer.name}: "
            f"bytes {starts[one]} to {ends[one]} and {starts[two]} to {ends[two]}."
        )
    shapes.add(shape)
    return runs


def _check_apart(layout: PoolLayout) -> None:
    """Checks that buffers lie apart, or interleave at one stride. Those that interleave may overlap
    within an item if their ids are two lists of one block pool.
    """
    solid = [buffer for buffer in layout.buffers if buffer.memory != "meta"]
    first = last = None  # of buffers that interleave: the first, and where their items reach
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
        mine = by_list.get(ids)
        if mine is not None and buffer.base < mine.base + mine.item_bytes:
            raise LayoutError(_overlap(layout, buffer, mine))
        by_list[ids] = buffer
        reach = max(reach, buffer.end)
        if buffer.base + buffer.item_bytes > last.base + last.item_bytes:
            last = buffer


def _one_pool(layout: PoolLayout, one: Buffer, other: Buffer) -> bool:
    """Whether the ids of both come from one block pool."""
    lists = [layout.space_by_name[layout.space_by_name[b.space].id_list] for b in (one, other)]
    return lists[0].block_pool is not None and lists[0].block_pool == lists[1].block_pool


def _overlap(layout: PoolLayout, buffer: Buffer, other: Buffer) -> str:
    """Why `buffer` may not lie where it does, and what would make it right."""
    says = (
        f"buffer {buffer.name}: base {buffer.base} lies inside buffer {other.name} ({other.base} "
        f"to {other.end}, items of {other.item_bytes} every {other.item_stride})."
    )
    one, two = (layout.space_by_name[each.space] for each in (other, buffer))
    if one.id_list == two.id_list:
        return f"{says} An id of {one.id_list} is an item of both."
    alike = "item i over item i only: at one stride, and not beyond it"
    if _one_pool(layout, buffer, other):
        return f"{says} Buffers of one block pool lie over one another {alike}."
    return (
        f"{says} If an id is in use by only one of spaces {one.name} and {two.name} at a time, "
        f"give both the same block_pool: then they may lie over one another, {alike}."
    )
