"""What every byte of an item is, for pictures and look-ups. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kvpool.layout import Buffer, PoolLayout, Region, Space
from kvpool.layout.grid import ragged, region_runs, run_count

MAX_RUNS_IN_A_ROW = 400
MIN_ROW_BYTES = 128


@dataclass(frozen=True, slots=True)
class ByteLocation:
    """Byte `byte` of a region's cell at `steps`, one per axis, counted from 0 on this rank."""

    region: Region
    steps: tuple[int, ...]
    byte: int

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
    return RegionRuns([region for region in layout.regions if region.buffer == buffer]).find(byte)


class RegionRuns:
    """The contiguous runs of an item's regions, by their first bytes."""

    def __init__(self, regions: Sequence[Region]) -> None:
        parts = [region_runs(region) for region in regions]
        counts = [offsets.size for offsets, _ in parts]
        starts = np.concatenate([np.zeros(0, dtype=np.int64), *(offsets for offsets, _ in parts)])
        order = np.argsort(starts, kind="stable")
        whose, number = ragged(np.array(counts, dtype=np.int64))
        widths = np.array([width for _, width in parts], dtype=np.int64)
        self.starts, self.whose, self._number = starts[order], whose[order], number[order]
        self.ends = self.starts + widths[self.whose]
        self._regions = regions

    def before(self, byte: int) -> int:
        """How many runs begin at a byte or before it."""
        return int(np.searchsorted(self.starts, byte, side="right"))

    def find(self, byte: int) -> ByteLocation | None:
        """What a byte of the item is; None where no region is."""
        run = self.before(byte) - 1
        if run < 0 or byte >= self.ends[run]:
            return None
        region, number = self._regions[self.whose[run]], int(self._number[run])
        start, end = int(self.starts[run]), int(self.ends[run])
        inside, steps = byte - start, {}
        # finer axes are contiguous in a run; the other steps say which run it is
        for axis in region.axes_by_stride:
            if axis.size > 1 and axis.stride < end - start:
                steps[axis.name], inside = divmod(inside, axis.stride)
        for axis in reversed(region.axes_by_stride):
            if axis.name not in steps:
                number, steps[axis.name] = divmod(number, axis.size)
        return ByteLocation(region, tuple(steps[axis.name] for axis in region.axes), inside)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `start` to `end` of an item, drawn as one box: of a region, or of none."""

    start: int
    end: int
    first: ByteLocation | None
    last: ByteLocation | None


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

    @cached_property
    def runs(self) -> RegionRuns:
        """Of its regions."""
        return RegionRuns(self.regions)

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

    def rows(self) -> Iterator[tuple[int, int]]:
        """Rows of a picture: first byte and number of those, one after another, that show the same
        regions at the same offsets.
        """
        runs, row = self.runs, self.row_bytes
        start = first = count = 0
        shape: tuple[object, ...] | None = None
        while start < self.item_bytes:
            end = min(start + row, self.item_bytes)
            low = int(np.searchsorted(runs.ends, start, side="right"))
            high = int(np.searchsorted(runs.starts, end, side="left"))
            cuts = (
                np.clip(edges[low:high] - start, 0, end - start).tolist()
                for edges in (runs.starts, runs.ends)
            )
            seen = (end - start, *zip(*cuts, runs.whose[low:high].tolist()))
            if shape not in (None, seen):
                yield first, count
                first, count = start, 0
            shape = seen
            until = end  # a single run, or a gap, may continue beyond this row
            if high - low == 1 and runs.starts[low] <= start and runs.ends[low] >= end:
                until = int(runs.ends[low])
            elif high == low:
                until = int(runs.starts[high]) if high < len(runs.starts) else self.item_bytes
            alike = max(1, (until - start) // row)
            count += alike
            start += alike * row
        yield first, count

    def pieces(self, start: int, end: int, smallest: float) -> Iterator[ByteRange]:
        """Boxes of bytes `start` to `end`: runs, cut at the steps of the finest axis with a stride
        of `smallest` bytes or more.
        """
        runs = self.runs
        while start < end:
            place, run = runs.find(start), runs.before(start)
            if place is None:
                stop = min(end, int(runs.starts[run]) if run < len(runs.starts) else end)
                yield ByteRange(start, stop, None, None)
            else:
                stop = min(end, int(runs.ends[run - 1]), start + _rest(place, smallest))
                yield ByteRange(start, stop, place, runs.find(stop - 1))
            start = stop


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
    pooled: dict[tuple[str, str], list[tuple[int, Buffer]]] = {}
    for buffer in layout.buffers:
        if (pool := pools.get(layout.space_by_name[buffer.space].id_list)) is not None:
            entry = buffer.base, layout.by_blocks(buffer)
            pooled.setdefault((pool, buffer.memory), []).append(entry)
    over: dict[str, dict[str, None]] = {buffer.name: {} for buffer in layout.buffers}
    for buffers in pooled.values():
        reached: list[Buffer] = []
        for base, buffer in sorted(buffers, key=lambda entry: entry[0]):
            reached = [lower for lower in reached if lower.base + lower.item_bytes > base]
            for lower in (lower for lower in reached if lower.space != buffer.space):
                over[lower.name][buffer.space] = None
                over[buffer.name][lower.space] = None
            reached.append(buffer)
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
