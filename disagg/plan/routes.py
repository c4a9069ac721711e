"""From the parts that are to be moved to routes. Buffers whose items lie side by side are one
record, so that the layers of page placement fuse as adjacent heads do; pairs of records that are
alike have the same runs, whatever their layers and ranks, and these are found once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from disagg.plan.matching.match import Part
from disagg.plan.matching.pairing import encoded
from disagg.plan.runs import (
    EntryRuns,
    Item,
    ItemRuns,
    PlacedRuns,
    Route,
    entry_runs,
    item_runs,
    join,
)
from kvpool.layout import Buffer, Key, PoolLayout, Region, Space
from kvpool.layout.grid import Ints, merge_intervals, region_runs

_NONE = np.empty(0, dtype=np.int64)


class _End(NamedTuple):
    """One side of a record pair: its first buffer, its space and its items."""

    first: str
    space: Space
    item: Item


class _Pair(NamedTuple):
    """A record pair between a source rank and the destination: its keys, and the runs of each."""

    source: int
    packed: bool
    src: _End
    dst: _End
    keys: Sequence[Key]
    runs: Sequence[PlacedRuns]


class _Moved(NamedTuple):
    """Of a record pair the keys, and of each its runs and its buffers."""

    keys: list[Key]
    runs: list[EntryRuns]
    src: list[str]
    dst: list[str]


def routes_of(
    sources: Sequence[PoolLayout], dest: PoolLayout, parts: Sequence[Part], by_layer: bool = False
) -> tuple[Route, ...]:
    """Joins the runs of every record pair, and groups pairs of equal shape into routes. With
    `by_layer`, runs of two layers are not joined.
    """
    runs_of: dict[object, ItemRuns] = {}
    shapes: dict[object, tuple[ItemRuns, list[_Pair]]] = {}
    for pair in _pairs(sources, dest, parts, by_layer):
        content = pair.packed, pair.src.item, pair.dst.item, *pair.runs
        runs = runs_of.get(content)
        if runs is None:
            runs = item_runs(pair.src.item, pair.dst.item, join(pair.runs), pair.packed)
            runs_of[content] = runs
        roles = [(owner, role) for owner, _, role in pair.keys]
        shape = pair.source, pair.src.space.name, pair.dst.space.name, *roles, *content
        shapes.setdefault(shape, (runs, []))[1].append(pair)
    return tuple(_route(pairs, runs) for runs, pairs in shapes.values())


def records_of(layouts: Iterable[PoolLayout]) -> list[Records]:
    """The records of each layout: those of one fingerprint have the same."""
    records: dict[str, Records] = {}
    return [records.setdefault(layout.fingerprint(), Records(layout)) for layout in layouts]


class Records:
    """The records of a layout, and of all of its fingerprint."""

    def __init__(self, layout: PoolLayout) -> None:
        self.layout = layout
        self._ends: dict[tuple[str, int], _End] = {}

    @cached_property
    def beside(self) -> dict[str, list[Buffer]]:
        """For each buffer those whose items lie side by side, itself among them."""
        groups = self.layout.adjacent_buffers
        return {buffer.name: group for group in groups for buffer in group}

    @cached_property
    def _inside(self) -> dict[str, list[Region]]:
        regions: dict[str, list[Region]] = {}
        for region in self.layout.regions:
            regions.setdefault(region.buffer, []).append(region)
        return regions

    def inside(self, buffer: Buffer) -> Sequence[Region]:
        """The regions of a buffer."""
        return self._inside.get(buffer.name, ())

    def record(self, buffers: Sequence[str]) -> Sequence[Buffer]:
        """The record that runs between these buffers may join: of one buffer, itself."""
        if len(set(buffers)) == 1:
            return [self.layout.buffer_by_name[buffers[0]]]
        return self.beside[buffers[0]]

    def content(self, record: Sequence[Buffer]) -> bytes:
        """What the bytes of an item of a record are, to compare."""
        base, parts = record[0].base, []
        for buffer in record:
            grids = [(r.offset, r.width, r.axes) for r in self.inside(buffer)]
            parts.append((buffer.base - base, buffer.item_bytes, buffer.padding, grids))
        return encoded(record[0].item_stride, parts)

    def end(self, buffers: Sequence[str], items: dict[object, Item]) -> tuple[_End, list[int]]:
        """The record of these buffers, and where their items begin in its. Equal ones of `items`
        are one.
        """
        record, by_name = self.record(buffers), self.layout.buffer_by_name
        first = record[0]
        end = self._ends.get((first.name, len(record)))
        if end is None:
            space = self.layout.space_by_name[first.space]
            end = _End(first.name, space, self._item(record, space, items))
            self._ends[first.name, len(record)] = end
        return end, [by_name[name].base - first.base for name in buffers]

    def _item(self, record: Sequence[Buffer], space: Space, items: dict[object, Item]) -> Item:
        content = space.per_request, space.steps, self.content(record)
        item = items.get(content)
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
            item = items[content] = items.setdefault(equal, item)
        return item


def _pairs(
    sources: Sequence[PoolLayout], dest: PoolLayout, parts: Sequence[Part], by_layer: bool
) -> Iterator[_Pair]:
    """All record pairs between which something moves."""
    src_records, dst_records = records_of(sources), Records(dest)
    grids: dict[bytes, EntryRuns] = {}
    pairs: dict[tuple[int, bool, object], _Moved] = {}
    for part in parts:
        source = src_records[part.source]
        offers, wants = source.layout.region_by_key, dest.region_by_key
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
            ends: object = source.beside[src][0].name, dst_records.beside[dst][0].name
            pair = part.source, packed, (src, dst, key[:2]) if by_layer else ends
            moved = pairs.get(pair)
            if moved is None:
                moved = pairs[pair] = _Moved([], [], [], [])
            moved.keys.append(key)
            moved.runs.append(runs)
            moved.src.append(src)
            moved.dst.append(dst)
    items: dict[object, Item] = {}
    for (number, packed, _), moved in pairs.items():
        src_end, src_starts = src_records[number].end(moved.src, items)
        dst_end, dst_starts = dst_records.end(moved.dst, items)
        yield _Pair(
            source=number,
            packed=packed,
            src=src_end,
            dst=dst_end,
            keys=moved.keys,
            runs=[
                PlacedRuns(runs, src, dst)
                for runs, src, dst in zip(moved.runs, src_starts, dst_starts)
            ],
        )


def _route(pairs: Sequence[_Pair], runs: ItemRuns) -> Route:
    first = pairs[0]
    return Route(
        source=first.source,
        keys=tuple([key for pair in pairs for key in pair.keys]),
        roles=", ".join(dict.fromkeys(role for _, _, role in first.keys)),
        packed=first.packed,
        src_space=first.src.space,
        dst_space=first.dst.space,
        src_buffers=tuple([pair.src.first for pair in pairs]),
        dst_buffers=tuple([pair.dst.first for pair in pairs]),
        layers=np.array([_layer(pair.keys) for pair in pairs], dtype=np.int64),
        src_stride=first.src.item.stride,
        dst_stride=first.dst.item.stride,
        runs=runs,
    )


def _layer(keys: Sequence[Key]) -> int:
    """The layer of all keys, or -1 if they are of several."""
    return keys[0][1] if len({key[:2] for key in keys}) == 1 else -1


def _padding(records: Records, record: Sequence[Buffer]) -> tuple[Ints, Ints]:
    """Bytes of a record's item that are in no region, in the items of buffers that declare them
    padding. Without that declaration they are somebody else's.
    """
    gaps: list[tuple[Ints, Ints]] = []
    for buffer in record:
        inside = records.inside(buffer)
        if not buffer.padding or sum(region.nbytes for region in inside) == buffer.item_bytes:
            continue
        first = buffer.base - record[0].base
        runs = [region_runs(region) for region in inside]
        starts = np.concatenate([_NONE, *(offsets + first for offsets, _ in runs)])
        ends = np.concatenate([_NONE, *(offsets + first + width for offsets, width in runs)])
        starts, ends = merge_intervals(starts, ends)
        low, high = np.append(first, ends), np.append(starts, first + buffer.item_bytes)
        gaps.append((low[low < high], high[low < high]))
    if not gaps:
        return _NONE, _NONE
    starts, ends = map(np.concatenate, zip(*gaps))
    return merge_intervals(starts, ends)
