"""From the parts that are to be moved to routes. Buffers whose items lie side by side are one
record, so that the layers of page placement fuse as adjacent heads do; pairs of records that are
alike have the same runs, whatever their layers and ranks, and these are found once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from disagg.plan.match import Part
from disagg.plan.pairing import one_each
from disagg.plan.runs import EntryRuns, Item, ItemRuns, Route, entry_runs, item_runs, join
from kvpool.layout import Buffer, Key, PoolLayout, Region, Space
from kvpool.layout.grid import Ints, merge_intervals, region_runs

_NONE = np.empty(0, dtype=np.int64)


class Place(NamedTuple):
    """Where a buffer's items lie: from byte `at` of the items of the record whose first buffer is
    `first`.
    """

    first: str
    at: int
    space: Space
    item: Item


class _Pair(NamedTuple):
    """A record pair between a source rank and the destination: its keys, and the runs of each, with
    the bytes from both records' items to the items of its buffers.
    """

    source: int
    packed: bool
    src: Place
    dst: Place
    keys: list[Key]
    runs: list[tuple[EntryRuns, int, int]]


def routes_of(
    sources: Sequence[PoolLayout], dest: PoolLayout, parts: Sequence[Part], by_layer: bool = False
) -> tuple[Route, ...]:
    """Joins the runs of every record pair, and groups pairs of equal shape into routes. With
    `by_layer`, runs of two layers are not joined.
    """
    known: dict[object, ItemRuns] = {}
    shapes: dict[object, tuple[ItemRuns, list[_Pair]]] = {}
    for pair in _pairs(sources, dest, parts, by_layer):
        source, packed, src, dst, *_ = pair
        runs = packed, src.item, dst.item, *pair.runs
        if runs not in known:
            known[runs] = item_runs(src.item, dst.item, join(pair.runs), packed)
        roles = [(owner, role) for owner, _, role in pair.keys]
        shape = source, src.space.name, dst.space.name, *roles, *runs
        shapes.setdefault(shape, (known[runs], []))[1].append(pair)
    return tuple(_route(sources, dest, pairs, runs) for runs, pairs in shapes.values())


def _pairs(
    sources: Sequence[PoolLayout], dest: PoolLayout, parts: Sequence[Part], by_layer: bool
) -> Iterable[_Pair]:
    """All record pairs between which something moves."""
    alike = one_each(sources)  # of which the places are the same
    items: dict[object, Item] = {}
    here = _places(dest, by_layer, items)
    there: dict[str, dict[str, Place]] = {}
    known: dict[object, EntryRuns] = {}
    found: dict[object, _Pair] = {}
    for part in parts:
        source = alike[part.source]
        offers = there.get(source.fingerprint())
        if offers is None:
            offers = there[source.fingerprint()] = _places(source, by_layer, items)
        regions = source.region_by_key
        one, two = regions[part.keys[0]], dest.region_by_key[part.keys[0]]
        grids = one.offset, one.axes, two.offset, two.axes, two.width, part.box
        if grids not in known:
            known[grids] = entry_runs(one, two, part.box)
        packed, runs = bool(two.packing), known[grids]
        for key in part.keys:
            src, dst = offers[regions[key].buffer], here[dest.region_by_key[key].buffer]
            layer = key[:2] if by_layer else None
            about = part.source, packed, src.first, dst.first, layer
            pair = found.get(about)
            if pair is None:
                pair = found[about] = _Pair(part.source, packed, src, dst, [], [])
            pair.keys.append(key)
            pair.runs.append((runs, src.at, dst.at))
    return found.values()


def _route(
    sources: Sequence[PoolLayout], dest: PoolLayout, pairs: Sequence[_Pair], runs: ItemRuns
) -> Route:
    first = pairs[0]
    keys = tuple([key for pair in pairs for key in pair.keys])
    src_buffers = tuple([pair.src.first for pair in pairs])
    dst_buffers = tuple([pair.dst.first for pair in pairs])
    return Route(
        first.source,
        keys,
        ", ".join(dict.fromkeys(role for _, _, role in first.keys)),
        first.packed,
        first.src.space,
        first.dst.space,
        src_buffers,
        dst_buffers,
        bases(sources[first.source], src_buffers),
        bases(dest, dst_buffers),
        np.array([_layer(pair.keys) for pair in pairs], dtype=np.int64),
        first.src.item.stride,
        first.dst.item.stride,
        *runs,
    )


def bases(layout: PoolLayout, buffers: Sequence[str]) -> Ints:
    """Pointers to the first bytes of some buffers."""
    held = layout.buffer_by_name
    return np.array([held[name].base for name in buffers], dtype=np.int64)


def _layer(keys: Sequence[Key]) -> int:
    """The layer of all keys, or -1 if they are of several."""
    found = {key[:2] for key in keys}
    return keys[0][1] if len(found) == 1 else -1


def grouped(layout: PoolLayout, by_layer: bool) -> list[list[Buffer]]:
    """Groups of buffers that are one record each: neighbours, or with `by_layer` each alone."""
    return [[buffer] for buffer in layout.buffers] if by_layer else layout.adjacent_buffers


def _places(layout: PoolLayout, by_layer: bool, items: dict[object, Item]) -> dict[str, Place]:
    """The place of each buffer, by name. `items` are those known so far: equal ones are one."""
    regions: dict[str, list[Region]] = {}
    for region in layout.regions:
        regions.setdefault(region.buffer, []).append(region)
    found: dict[str, Place] = {}
    known: dict[object, Item] = {}
    for group in grouped(layout, by_layer):
        first, base = group[0], group[0].base
        inside = tuple(
            (
                buffer.base - base,
                buffer.item_bytes,
                buffer.padding,
                tuple([(r.offset, r.width, r.axes) for r in regions.get(buffer.name, ())]),
            )
            for buffer in group
        )
        space, shape = layout.space_by_name[first.space], (first.space, first.item_stride, inside)
        if shape not in known:
            starts, ends = _padding(group, regions)
            item = Item(space.kind, space.steps, first.item_stride, starts, ends)
            like = space.kind, space.steps, item.stride, starts.tobytes(), ends.tobytes()
            known[shape] = items.setdefault(like, item)
        item = known[shape]
        found.update((b.name, Place(first.name, b.base - base, space, item)) for b in group)
    return found


def _padding(group: Sequence[Buffer], regions: Mapping[str, Sequence[Region]]) -> tuple[Ints, Ints]:
    """Bytes of a record's item that are in no region, in the items of buffers that declare them
    padding. Without that declaration they are somebody else's.
    """
    gaps: list[tuple[Ints, Ints]] = []
    for buffer in group:
        inside = regions.get(buffer.name, ())
        if not buffer.padding or sum(region.nbytes for region in inside) == buffer.item_bytes:
            continue
        at = buffer.base - group[0].base
        edge = np.array([at], dtype=np.int64), np.array([at + buffer.item_bytes], dtype=np.int64)
        runs = [region_runs(region) for region in inside]
        starts = np.concatenate([edge[0][:0], *(offsets + at for offsets, _ in runs)])
        ends = np.concatenate([edge[0][:0], *(offsets + at + width for offsets, width in runs)])
        starts, ends = merge_intervals(starts, ends)
        low, high = np.append(edge[0], ends), np.append(starts, edge[1])
        gaps.append((low[low < high], high[low < high]))
    if not gaps:
        return _NONE, _NONE
    starts, ends = map(np.concatenate, zip(*gaps))
    return merge_intervals(starts, ends)
