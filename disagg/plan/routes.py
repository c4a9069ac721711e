"""From the parts that are to be moved to routes. Buffers whose items lie side by side are one
record, so that the layers of page placement fuse as adjacent heads do; pairs of records that are
alike have the same runs in any layer and rank, and these are found once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from disagg.plan.match import Part
from disagg.plan.pairing import encoded
from disagg.plan.runs import Item, ItemRuns, Route, RouteSide, Runs, entry_runs, item_runs, join
from kvpool.layout import Buffer, Key, PoolLayout, Region, Space
from kvpool.layout.grid import Ints, merge_intervals, region_runs


class RecordEnd(NamedTuple):
    """One side of a record pair: its first buffer, its space and its items."""

    first: str
    space: Space
    item: Item


class _RecordPair(NamedTuple):
    """A record pair of a route, and its keys."""

    src: RecordEnd
    dst: RecordEnd
    keys: Sequence[Key]


def routes_of(
    records: Sequence[Records], parts: Sequence[Part], by_layer: bool = False
) -> tuple[Route, ...]:
    """Joins the runs of every record pair, and groups pairs of equal shape into routes. With
    `by_layer`, runs of two layers are not joined. The last of `records` are the destination's.
    """
    runs_of: dict[object, ItemRuns] = {}
    shapes: dict[object, tuple[int, bool, ItemRuns, list[_RecordPair]]] = {}
    for (source, packed, _), moved in _by_pair(records, parts, by_layer).items():
        keys = [key for key, _ in moved]
        src, src_starts = records[source].record_end(keys)
        dst, dst_starts = records[-1].record_end(keys)
        placed = list(zip([runs for _, runs in moved], src_starts, dst_starts))
        content = packed, src.item, dst.item, *placed
        runs = runs_of.get(content)
        if runs is None:
            runs = runs_of[content] = item_runs(src.item, dst.item, join(placed), packed)
        roles = [(owner, role) for owner, _, role in keys]
        shape = source, src.space.name, dst.space.name, *roles, *content
        shapes.setdefault(shape, (source, packed, runs, []))[3].append(_RecordPair(src, dst, keys))
    return tuple(
        _route(source, packed, runs, pairs) for source, packed, runs, pairs in shapes.values()
    )


def _route(source: int, packed: bool, runs: ItemRuns, pairs: Sequence[_RecordPair]) -> Route:
    src, dst = (
        RouteSide(
            space=ends[0].space,
            buffers=tuple([end.first for end in ends]),
            stride=ends[0].item.stride,
            entries=1 if packed else ends[0].space.steps,
        )
        for ends in ([pair.src for pair in pairs], [pair.dst for pair in pairs])
    )
    # -1: the keys of a pair are of several layers
    layers = [p.keys[0][1] if len({key[:2] for key in p.keys}) == 1 else -1 for p in pairs]
    return Route(
        source=source,
        keys=tuple([key for pair in pairs for key in pair.keys]),
        roles=", ".join(dict.fromkeys(role for _, _, role in pairs[0].keys)),
        packed=packed,
        src=src,
        dst=dst,
        layers=np.array(layers, dtype=np.int64),
        runs=runs,
    )


def _by_pair(
    records: Sequence[Records], parts: Sequence[Part], by_layer: bool
) -> dict[tuple[int, bool, object], list[tuple[Key, Runs]]]:
    """Keys and the runs of an entry, by source rank, whether it is packed, and record pair."""
    grids: dict[bytes, Runs] = {}
    pairs: dict[tuple[int, bool, object], list[tuple[Key, Runs]]] = {}
    dest, wants = records[-1], records[-1].layout.region_by_key
    for part in parts:
        source = records[part.source]
        offers = source.layout.region_by_key
        offered, wanted = offers[part.keys[0]], wants[part.keys[0]]
        grid = encoded(
            offered.offset, offered.axes, wanted.offset, wanted.axes, wanted.width, part.box
        )
        runs = grids.get(grid)
        if runs is None:
            runs = grids[grid] = entry_runs(offered, wanted, part.box)
        packed = bool(wanted.packing)
        for key in part.keys:
            src, dst = offers[key].buffer, wants[key].buffer
            ends: object = source.beside[src][0].name, dest.beside[dst][0].name
            pair = part.source, packed, (src, dst, key[:2]) if by_layer else ends
            pairs.setdefault(pair, []).append((key, runs))
    return pairs


def records_of(layouts: Iterable[PoolLayout]) -> list[Records]:
    """The records of each layout: those of one fingerprint have the same."""
    records: dict[str, Records] = {}
    items: dict[object, Item] = {}
    return [records.setdefault(layout.fingerprint(), Records(layout, items)) for layout in layouts]


class Records:
    """The records of a layout, and of all of its fingerprint. Those of a plan share `items`."""

    def __init__(self, layout: PoolLayout, items: dict[object, Item]) -> None:
        self.layout, self._items = layout, items
        self._ends: dict[tuple[str, int], RecordEnd] = {}

    @cached_property
    def beside(self) -> dict[str, list[Buffer]]:
        """For each buffer those whose items lie side by side, itself among them."""
        groups = self.layout.adjacent_buffers
        return {buffer.name: group for group in groups for buffer in group}

    @cached_property
    def inside(self) -> dict[str, list[Region]]:
        """The regions of each buffer that has any, by its name."""
        regions: dict[str, list[Region]] = {}
        for region in self.layout.regions:
            regions.setdefault(region.buffer, []).append(region)
        return regions

    def record_end(self, keys: Sequence[Key]) -> tuple[RecordEnd, list[int]]:
        """The record in which runs of these may join, and where in its items each buffer begins."""
        by_name, regions = self.layout.buffer_by_name, self.layout.region_by_key
        buffers = [regions[key].buffer for key in keys]
        one_buffer = len(set(buffers)) == 1
        record = [by_name[buffers[0]]] if one_buffer else self.beside[buffers[0]]
        first = record[0]
        end = self._ends.get((first.name, len(record)))
        if end is None:
            space = self.layout.space_by_name[first.space]
            end = RecordEnd(first.name, space, self._item(record, space))
            self._ends[first.name, len(record)] = end
        return end, [by_name[name].base - first.base for name in buffers]

    def _item(self, record: Sequence[Buffer], space: Space) -> Item:
        parts = [
            (
                buffer.base - record[0].base,
                buffer.item_bytes,
                buffer.padding,
                [(r.offset, r.width, r.axes) for r in self.inside.get(buffer.name, ())],
            )
            for buffer in record
        ]
        content = space.per_request, space.steps, encoded(record[0].item_stride, parts)
        item = self._items.get(content)
        if item is None:
            starts, ends = _padding(self, record)
            item = Item(
                several=not space.per_request,
                entries=space.steps,
                stride=record[0].item_stride,
                pad_starts=starts,
                pad_ends=ends,
            )
            equal = item.several, item.entries, item.stride, starts.tobytes(), ends.tobytes()
            item = self._items[content] = self._items.setdefault(equal, item)
        return item


def _padding(records: Records, record: Sequence[Buffer]) -> tuple[Ints, Ints]:
    """Declared padding of a record's item; other bytes outside regions are foreign."""
    gaps: list[tuple[Ints, Ints]] = [(none := np.empty(0, dtype=np.int64), none)]
    for buffer in record:
        inside = records.inside.get(buffer.name, ())
        if not buffer.padding or sum(region.nbytes for region in inside) == buffer.item_bytes:
            continue
        first = buffer.base - record[0].base
        runs = [region_runs(region) for region in inside]
        starts = np.concatenate([none, *(offsets + first for offsets, _ in runs)])
        ends = np.concatenate([none, *(offsets + first + width for offsets, width in runs)])
        starts, ends = merge_intervals(starts, ends)
        low, high = np.append(first, ends), np.append(starts, first + buffer.item_bytes)
        gaps.append((low[low < high], high[low < high]))
    return merge_intervals(*map(np.concatenate, zip(*gaps)))
