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
    _check_apart(layout.buffers)


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
        if space.kind != "paged" or first.kind != "paged":
            continue
        if space.item_span != first.item_span:
            raise LayoutError(
                f"space {space.name}: an item holds {_tokens(space)}, but an item of "
                f"{first.name}, whose ids it shares, {_tokens(first)}."
            )
        for each in (space, first) if space.interleave != first.interleave else ():
            if each.interleave is not None and each.tokens_per_item % each.interleave.size:
                raise LayoutError(
                    f"space {each.name}: stretches of {each.interleave.size} positions do not "
                    f"divide an item of {each.tokens_per_item}, and {space.name} shares the ids of "
                    f"{first.name}, which is interleaved otherwise: their items would hold other "
                    "positions. Make the stretches divide an item."
                )


def _tokens(space: Space) -> str:
    """How many tokens an item holds, as text: `8 of 32 tokens` where ranks share them out."""
    of = "" if space.interleave is None else f"{space.tokens_per_item} of "
    return f"{of}{space.item_span} tokens"


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


def _check_apart(buffers: Sequence[Buffer]) -> None:
    """Checks that buffers do not overlap: they lie apart, or interleave at one stride."""
    solid = sorted((b for b in buffers if b.memory != "meta"), key=lambda b: (b.memory, b.base))
    cluster: list[Buffer] = []
    reach = 0
    for buffer in solid:
        if cluster and (buffer.memory != cluster[0].memory or buffer.base >= reach):
            cluster, reach = [], 0
        if cluster and not _interleaves(cluster[0], cluster[-1], buffer):
            raise LayoutError(
                f"buffer {buffer.name}: base {buffer.base} lies inside buffer {cluster[-1].name} "
                f"({cluster[-1].base} to {cluster[-1].end}, items of {cluster[-1].item_bytes} "
                f"every {cluster[-1].item_stride})."
            )
        cluster.append(buffer)
        reach = max(reach, buffer.end)


def _interleaves(first: Buffer, before: Buffer, buffer: Buffer) -> bool:
    """Whether `buffer` fits between `before` and the next item of `first`."""
    behind = buffer.base - before.base >= before.item_bytes
    within = buffer.base + buffer.item_bytes - first.base <= first.item_stride
    return behind and within and buffer.item_stride == first.item_stride
