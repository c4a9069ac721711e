"""Buffers whose items lie side by side as one record, so that the layers of page placement fuse as
adjacent heads do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.layout import Buffer, PoolLayout, Region, Space
from kvpool.layout.grid import Ints, merge_intervals, region_runs


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """Buffers of one space whose items lie side by side within one stride, from `base` on.

    `pad_starts` and `pad_ends` are the declared padding of an item.
    """

    first: str
    space: Space
    base: int
    stride: int
    items: int
    pad_starts: Ints
    pad_ends: Ints

    def is_padding(self, starts: Ints, ends: Ints) -> npt.NDArray[np.bool_]:
        """Whether the bytes `starts` to `ends` of an item are declared padding (or none)."""
        if not self.pad_starts.size:
            return starts >= ends
        at = np.maximum(np.searchsorted(self.pad_starts, starts, side="right") - 1, 0)
        return (starts >= ends) | ((starts >= self.pad_starts[at]) & (ends <= self.pad_ends[at]))


def adjacent_buffers(layout: PoolLayout) -> list[list[Buffer]]:
    """Groups of buffers whose items lie side by side, in memory order."""
    groups: list[list[Buffer]] = []
    for buffer in sorted(layout.buffers, key=lambda b: (b.space, b.memory, b.base)):
        first = groups[-1][0] if groups else None
        if (
            first is not None
            and (first.space, first.memory) == (buffer.space, buffer.memory)
            and (first.item_stride, first.items) == (buffer.item_stride, buffer.items)
            and buffer.base + buffer.item_bytes <= first.base + first.item_stride
            # pools on the meta device all begin at 0: merged, they lie over one another
            and buffer.base >= groups[-1][-1].base + groups[-1][-1].item_bytes
        ):
            groups[-1].append(buffer)
        else:
            groups.append([buffer])
    return groups


def grouped(layout: PoolLayout, by_layer: bool) -> list[list[Buffer]]:
    """Groups of buffers that are one record each: neighbours, or with `by_layer` each alone."""
    return [[buffer] for buffer in layout.buffers] if by_layer else adjacent_buffers(layout)


def records(layout: PoolLayout, by_layer: bool = False) -> dict[str, tuple[Record, int]]:
    """For each buffer by name, its record and its offset in the record's items."""
    regions: dict[str, list[Region]] = {}
    for region in layout.regions:
        regions.setdefault(region.buffer, []).append(region)
    found: dict[str, tuple[Record, int]] = {}
    known: dict[object, tuple[Ints, Ints]] = {}
    for group in grouped(layout, by_layer):
        first, base = group[0], group[0].base
        shape = tuple(
            (
                buffer.base - base,
                buffer.item_bytes,
                buffer.padding,
                tuple((r.offset, r.width, r.axes) for r in regions.get(buffer.name, ())),
            )
            for buffer in group
        )
        if shape not in known:
            known[shape] = _padding(group, regions)
        space = layout.space_by_name[first.space]
        record = Record(first.name, space, base, first.item_stride, first.items, *known[shape])
        found.update((buffer.name, (record, buffer.base - base)) for buffer in group)
    return found


def _padding(group: Sequence[Buffer], regions: Mapping[str, Sequence[Region]]) -> tuple[Ints, Ints]:
    """Bytes of a record's item that are in no region, in the items of buffers that declare them
    padding. Without that declaration they are somebody else's.
    """
    none = np.empty(0, dtype=np.int64)
    gaps: list[tuple[Ints, Ints]] = [(none, none)]
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
    return merge_intervals(
        np.concatenate([g[0] for g in gaps]), np.concatenate([g[1] for g in gaps])
    )
