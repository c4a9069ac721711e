"""Foreign bytes: those in and between the items of a layout that no region claims and nobody has
declared padding. They belong to somebody else.

Where blocks of a block pool's spaces lie over one another, a byte is foreign that none of them
claims.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvpool.layout.grid import Ints, bytes_below, fuse, merge_intervals, outer_sum
from kvpool.layout.types import Buffer, Region

if TYPE_CHECKING:
    from kvpool.layout import PoolLayout

_Claim = tuple[int, int, list[tuple[int, int]]]
"""Bytes of a block that are not foreign: a start, and a width at each point of a grid of (size,
stride) axes.
"""


class _Stretch(NamedTuple):
    """Memory of buffers that interleave, and which of `_Gaps` its blocks have."""

    start: int
    end: int
    memory: str
    gaps: int


class _Gaps(NamedTuple):
    """The foreign bytes of each block, `stride` bytes: sorted half-open intervals, `[G]`."""

    stride: int
    starts: Ints
    ends: Ints

    def below(self, offsets: Ints) -> Ints:
        """Foreign bytes below each of `at`, counted from the first block."""
        block, byte = np.divmod(offsets, self.stride)
        whole: Ints = block * (self.ends - self.starts).sum()
        return whole + bytes_below(self.starts, self.ends, byte)


class ForeignBytes:
    """Where a layout's foreign bytes are, if no pointer is in two memories.

    Made once for a layout: `layout.foreign_bytes`.
    """

    def __init__(self, layout: PoolLayout) -> None:
        inside: dict[str, list[Region]] = {buffer.name: [] for buffer in layout.buffers}
        for region in layout.regions:
            inside[region.buffer].append(region)
        numbers: dict[bytes, int] = {}
        self._gaps: list[_Gaps] = []
        stretches: list[_Stretch] = []
        blocks = [layout.by_blocks(buffer) for buffer in layout.buffers]
        for group, before, items in interleaved(blocks):
            first = group[0]
            reach = max(buffer.base + buffer.item_bytes for buffer in group) - first.base
            stride = first.item_stride if items > 1 else reach
            claims = [
                (buffer.base - first.base + start, width, axes)
                for buffer in group
                for start, width, axes in _claims(layout, buffer.name, inside[buffer.name])
            ]
            shape = msgspec.msgpack.encode((stride, claims))  # hashes of tuples can collide
            if shape not in numbers:
                numbers[shape] = len(self._gaps)
                starts, ends = _between(claims, stride)
                self._gaps.append(_Gaps(stride, starts, ends))
            start = first.base + before * first.item_stride
            end = start + (items - 1) * stride + reach
            stretches.append(_Stretch(start, end, first.memory, numbers[shape]))
        stretches = _joined(stretches, [gaps.starts.size == 0 for gaps in self._gaps])
        self._solid = not any(gaps.starts.size for gaps in self._gaps)
        self._starts = np.array([stretch.start for stretch in stretches], dtype=np.int64)
        self._ends = np.array([stretch.end for stretch in stretches], dtype=np.int64)
        self._which = np.array([stretch.gaps for stretch in stretches], dtype=np.int64)

    def among(self, starts: Ints, ends: Ints) -> npt.NDArray[np.bool_]:
        """For each range of pointers `starts` to `ends` `[N]`, whether a byte of it is foreign."""
        if not self._starts.size:
            return starts < ends
        stretch = np.searchsorted(self._starts, starts, side="right") - 1
        foreign: npt.NDArray[np.bool_] = (stretch < 0) | (ends > self._ends[stretch])
        if not self._solid:
            left = np.flatnonzero(~foreign)
            which = self._which[stretch[left]]
            for number in np.flatnonzero(np.bincount(which)).tolist():
                gaps, chosen = self._gaps[number], left[which == number]
                base = self._starts[stretch[chosen]]
                foreign[chosen] = gaps.below(ends[chosen] - base) > gaps.below(
                    starts[chosen] - base
                )
        return foreign & (starts < ends)


def interleaved(buffers: Sequence[Buffer]) -> Iterator[tuple[list[Buffer], int, int]]:
    """Buffers, by blocks, of which each has one in every stride, in memory order: the number of
    their first, and how many follow until one of them ends. Those of one block pool may overlap.
    """
    groups: list[list[Buffer]] = []
    for buffer in sorted(buffers, key=lambda b: (b.memory, b.base)):
        first = groups[-1][0] if groups else None
        if (
            first is not None
            and (first.memory, first.item_stride) == (buffer.memory, buffer.item_stride)
            and buffer.base + buffer.item_bytes <= first.base + first.item_stride
        ):
            groups[-1].append(buffer)
        else:
            groups.append([buffer])
    for group in groups:
        before = 0
        while group:
            items = min(buffer.items for buffer in group)
            yield group, before, items - before
            before, group = items, [buffer for buffer in group if buffer.items > items]


def _claims(layout: PoolLayout, name: str, regions: Sequence[Region]) -> Iterator[_Claim]:
    """The bytes of a block of a buffer, from its first item on, that are not foreign."""
    buffer = layout.buffer_by_name[name]
    items = layout.items_per_block(buffer), buffer.item_stride
    if buffer.padding or sum(region.nbytes for region in regions) == buffer.item_bytes:
        yield 0, buffer.item_bytes, [items]
    else:
        for region in regions:
            axes = [items, *((axis.size, axis.stride) for axis in region.axes)]
            yield region.offset, region.width, axes


def _between(claims: Iterable[_Claim], stride: int) -> tuple[Ints, Ints]:
    """The bytes of a stride that nothing claims."""
    starts, ends = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for start, size, grid in claims:
        width, axes = fuse(size, grid)
        offsets = outer_sum(start, axes)
        starts.append(offsets)
        ends.append(offsets + width)
    low, high = merge_intervals(np.concatenate(starts), np.concatenate(ends))
    low, high = np.append(0, high), np.append(low, stride)
    return low[low < high], high[low < high]


def _joined(stretches: Sequence[_Stretch], whole: Sequence[bool]) -> list[_Stretch]:
    """Stretches by pointer, joined where they touch and have no foreign bytes."""
    joined: list[_Stretch] = []
    for stretch in sorted(stretches):
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.end, last.memory) == (stretch.start, stretch.memory)
            and whole[last.gaps]
            and whole[stretch.gaps]
        ):
            joined[-1] = last._replace(end=stretch.end)
        else:
            joined.append(stretch)
    return joined
