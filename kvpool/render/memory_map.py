"""What every byte of an item is, for pictures and look-ups. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kvpool.layout import Axis, Buffer, PoolLayout, Region, Space
from kvpool.layout.grid import region_runs, run_count

MAX_RUNS_IN_A_ROW = 400
MIN_ROW_BYTES = 128
SHOWN = 3, 1  # first and last rows of a group of equal ones
HIDE_FROM = 7  # rows in a group


@dataclass(frozen=True, slots=True)
class ByteLocation:
    """Byte `byte` of a region's cell at `steps`, one per axis, counted from 0 on this rank."""

    region: Region
    steps: tuple[int, ...]
    byte: int

    @property
    def offset(self) -> int:
        """Offset in the item, by the formula of kvpool.layout."""
        strides = (axis.stride for axis in self.region.axes)
        return self.region.offset + sum(map(int.__mul__, self.steps, strides)) + self.byte

    @property
    def numbers(self) -> dict[str, int]:
        """Steps as the model counts them, by axis name, largest stride first."""
        steps = zip(self.region.axes, self.steps)
        ordered = sorted(steps, key=lambda pair: -pair[0].stride)
        return {axis.name: axis.start + step for axis, step in ordered if axis.total > 1}

    def __str__(self) -> str:
        words = [self.region.role, *(f"{name} {step}" for name, step in self.numbers.items())]
        return f"{', '.join(words)}, byte {self.byte:,} of {self.region.width:,}"


def where(layout: PoolLayout, buffer: str, byte: int) -> ByteLocation | None:
    """What byte `byte` of a buffer's items is; None where no region is.

    Raises KeyError for an unknown buffer and IndexError for a byte outside its items.
    """
    named = layout.buffer_by_name.get(buffer)
    if named is None:
        names = ", ".join(layout.buffer_by_name) or "none"
        raise KeyError(f"buffer {buffer!r}: not in this layout (it has {names}).")
    if not 0 <= byte < named.item_bytes:
        raise IndexError(f"buffer {buffer}: byte {byte} of items of {named.item_bytes}.")
    return _find([region for region in layout.regions if region.buffer == buffer], byte)


def _find(regions: Sequence[Region], byte: int) -> ByteLocation | None:
    for region in regions:
        axes = sorted(enumerate(region.axes), key=lambda pair: -pair[1].stride)
        numbers = _steps(byte - region.offset, [axis for _, axis in axes], region.width)
        if numbers is not None:
            *steps, inside = numbers
            step_of = {index: step for (index, _), step in zip(axes, steps)}
            return ByteLocation(region, tuple(step_of[index] for index in range(len(axes))), inside)
    return None


def _steps(byte: int, axes: Sequence[Axis], width: int) -> tuple[int, ...] | None:
    """Steps of axes, largest stride first, and the byte of the cell; None outside all cells."""
    if not axes:
        return (byte,) if 0 <= byte < width else None
    axis, *finer = axes
    if axis.size == 1:
        only = _steps(byte, finer, width)
        return None if only is None else (0, *only)
    last = min(axis.size - 1, byte // axis.stride)
    first = max(0, -((extent(finer, width) - 1 - byte) // axis.stride))
    for step in range(last, first - 1, -1):  # one step, unless axes interlock
        rest = _steps(byte - step * axis.stride, finer, width)
        if rest is not None:
            return step, *rest
    return None


def extent(axes: Sequence[Axis], width: int) -> int:
    """Bytes from the first to the last byte of a grid of cells."""
    return sum((axis.size - 1) * axis.stride for axis in axes) + width


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `start` to `end` of an item, drawn as one box: of a region, or of none."""

    start: int
    end: int
    first: ByteLocation | None
    last: ByteLocation | None


@dataclass(frozen=True, slots=True)
class RowGroup:
    """`count` rows of a map, from byte `start`, that show the same regions at the same offsets."""

    start: int
    count: int


@dataclass(frozen=True)
class ItemMap:
    """One item and all buffers that have such items; `regions` are those of the first buffer.

    `over`: the spaces of the same block pool whose blocks lie over these items'.
    """

    buffers: tuple[Buffer, ...]
    regions: tuple[Region, ...]
    layers: tuple[int, ...]
    space: Space
    over: tuple[str, ...] = ()

    @property
    def item_bytes(self) -> int:
        """Bytes of an item."""
        return self.buffers[0].item_bytes

    @property
    def unclaimed(self) -> int:
        """Bytes of an item that no region claims."""
        return self.item_bytes - sum(region.nbytes for region in self.regions)

    @property
    def unclaimed_name(self) -> str:
        """What those bytes are, as far as the layout says."""
        return "padding" if self.buffers[0].padding else "not described"

    def name(self, region: Region) -> str:
        """The role, and the layer where the item has several."""
        low, high = self._layers
        return region.role if low == high else f"{region.role} (layer +{region.layer - low})"

    def find(self, byte: int) -> ByteLocation | None:
        """What a byte of the item is; None where no region is."""
        starts, ends, whose = self._runs
        run = int(np.searchsorted(starts, byte, side="right")) - 1
        if run < 0 or byte >= ends[run]:
            return None
        return _find([self.regions[whose[run]]], byte)

    @cached_property
    def _layers(self) -> tuple[int, int]:
        layers = [region.layer for region in self.regions]
        return min(layers), max(layers)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row of a picture: the largest stride whose rows have few enough runs, or a
        multiple of it where it is short.
        """
        runs = sum(run_count(region) for region in self.regions)
        axes = (axis for region in self.regions for axis in region.axes)
        strides = sorted({axis.stride for axis in axes if axis.size > 1}, reverse=True)
        fits = (s for s in strides if runs * s <= MAX_RUNS_IN_A_ROW * self.item_bytes)
        row = next(fits, strides[-1] if strides else self.item_bytes)
        while row < MIN_ROW_BYTES:
            row *= 2
        return min(row, self.item_bytes)

    def rows(self) -> Iterator[RowGroup]:
        """All rows, equal neighbours grouped."""
        group, shape = RowGroup(0, 0), None
        for start, count, seen in self._shapes():
            if shape is not None and seen != shape:
                yield group
                group = RowGroup(start, 0)
            group, shape = replace(group, count=group.count + count), seen
        yield group

    def pieces(self, start: int, end: int, smallest: float) -> Iterator[ByteRange]:
        """Boxes of bytes `start` to `end`: runs, cut at the steps of the finest axis with a stride
        of `smallest` bytes or more.
        """
        starts, ends, _ = self._runs
        while start < end:
            place, run = self.find(start), int(np.searchsorted(starts, start, side="right"))
            if place is None:
                stop = min(end, int(starts[run]) if run < len(starts) else end)
                yield ByteRange(start, stop, None, None)
            else:
                stop = min(end, int(ends[run - 1]), start + _rest(place, smallest))
                yield ByteRange(start, stop, place, self.find(stop - 1))
            start = stop

    @cached_property
    def _runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Starts, ends and region numbers of all runs, by start."""
        parts = [region_runs(region) for region in self.regions]
        if not parts:
            return (np.zeros(0, dtype=np.int64),) * 3
        starts = np.concatenate([offsets for offsets, _ in parts])
        ends = np.concatenate([offsets + width for offsets, width in parts])
        whose = np.repeat(np.arange(len(parts)), [len(offsets) for offsets, _ in parts])
        order = np.argsort(starts, kind="stable")
        return starts[order], ends[order], whose[order]

    def _shapes(self) -> Iterator[tuple[int, int, tuple[object, ...]]]:
        """(start, count, contents) of rows, in order."""
        starts, ends, whose = self._runs
        row, start = self.row_bytes, 0
        while start < self.item_bytes:
            end = min(start + row, self.item_bytes)
            low = int(np.searchsorted(ends, start, side="right"))
            high = int(np.searchsorted(starts, end, side="left"))
            cut = (np.clip(b[low:high] - start, 0, end - start).tolist() for b in (starts, ends))
            seen = (end - start, *zip(*cut, whose[low:high].tolist()))
            until = end  # a single run, or a gap, may continue beyond this row
            if high - low == 1 and starts[low] <= start and ends[low] >= end:
                until = int(ends[low])
            elif high == low:
                until = int(starts[high]) if high < len(starts) else self.item_bytes
            count = max(1, (until - start) // row)
            yield start, count, seen
            start += count * row


def _rest(place: ByteLocation, smallest: float) -> int:
    """Bytes to the end of the step of the finest axis that is not too small."""
    axes = sorted(zip(place.region.axes, place.steps), key=lambda pair: pair[0].stride)
    inside, finer = place.byte, place.region.width
    for axis, step in axes:
        if axis.size > 1 and axis.stride >= smallest:
            break
        inside += step * axis.stride
        finer += (axis.size - 1) * axis.stride
    return max(1, finer - inside)


def item_maps(layout: PoolLayout) -> list[ItemMap]:
    """A map for each distinct kind of item, with all buffers that have it, in their order."""
    inside: dict[str, list[Region]] = {buffer.name: [] for buffer in layout.buffers}
    for region in layout.regions:
        inside[region.buffer].append(region)
    alike: dict[object, list[Buffer]] = {}
    for buffer in layout.buffers:
        regions = inside[buffer.name] = sorted(inside[buffer.name], key=lambda r: r.offset)
        lowest = min((region.layer for region in regions), default=0)
        looks = [replace(r, layer=r.layer - lowest, buffer="any") for r in regions]
        sizes = buffer.item_bytes, buffer.item_stride, buffer.items, buffer.space
        alike.setdefault((*sizes, buffer.padding, *looks), []).append(buffer)
    over = _overlaid(layout)
    return [
        ItemMap(
            tuple(buffers),
            tuple(inside[buffers[0].name]),
            tuple(sorted({region.layer for b in buffers for region in inside[b.name]})),
            layout.space_by_name[buffers[0].space],
            tuple(dict.fromkeys(name for b in buffers for name in over[b.name])),
        )
        for buffers in alike.values()
    ]


def _overlaid(layout: PoolLayout) -> dict[str, dict[str, None]]:
    """For each buffer by name, the spaces of its block pool whose blocks lie over its blocks."""
    pools = {name: pool for pool, lists in layout.block_pools.items() for name in lists}
    pooled = [
        (pools[ids], buffer.memory, buffer.base, layout.by_blocks(buffer))
        for buffer in layout.buffers
        if (ids := layout.space_by_name[buffer.space].id_list) in pools
    ]
    over: dict[str, dict[str, None]] = {buffer.name: {} for buffer in layout.buffers}
    reached: list[tuple[str, str, Buffer]] = []
    for pool, memory, base, buffer in sorted(pooled, key=lambda each: each[:3]):
        reached = [
            each
            for each in reached
            if each[:2] == (pool, memory) and each[2].base + each[2].item_bytes > base
        ]
        for lower in (lower for _, _, lower in reached if lower.space != buffer.space):
            over[lower.name][buffer.space] = None
            over[buffer.name][lower.space] = None
        reached.append((pool, memory, buffer))
    return over


def span(first: ByteLocation | None, last: ByteLocation | None) -> str:
    """Steps from one byte to another as text: `entry 3, head 0-7`; empty if none is common."""
    if first is None or last is None:
        return ""
    words = []
    numbers = last.numbers
    same = first.region.role == last.region.role
    for name, step in first.numbers.items():
        to = numbers.get(name)
        if to == step:
            words.append(f"{name} {step}")
            continue
        if same and to is not None:
            words.append(f"{name} {step}-{to}")
        break
    return ", ".join(words)
