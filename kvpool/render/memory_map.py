"""What every byte of an item is, for pictures and look-ups. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import merge
from itertools import islice
from math import prod
from operator import attrgetter

from kvpool.layout import Axis, Buffer, PoolLayout, Region, Space

MAX_BOXES = 2000  # in a row
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
        steps = sorted(zip(self.region.axes, self.steps), key=lambda pair: -pair[0].stride)
        return {axis.name: axis.start + step for axis, step in steps if axis.total > 1}

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
    places = (_location(region, byte) for region in layout.regions_in[buffer])
    return next(filter(None, places), None)


def _location(region: Region, byte: int) -> ByteLocation | None:
    """What a byte of the item is, if it is one of this region's."""
    axes = [axis for axis in region.axes_by_stride if axis.size > 1]
    steps = _steps(byte - region.offset, axes, region.width)
    if steps is None:
        return None
    *numbers, inside = steps
    by_name = dict(zip((axis.name for axis in axes), numbers))
    return ByteLocation(region, tuple(by_name.get(axis.name, 0) for axis in region.axes), inside)


def _steps(byte: int, axes: Sequence[Axis], width: int) -> tuple[int, ...] | None:
    """The step of each axis, and the byte inside a cell of `width`; None between cells. Axes are
    given by stride, the largest first.
    """
    if not axes:
        return (byte,) if 0 <= byte < width else None
    axis, *finer = axes
    reach = width + sum((a.size - 1) * a.stride for a in finer)
    first = max(0, (byte - reach) // axis.stride + 1)
    last = min(axis.size - 1, byte // axis.stride)
    # axes may interlock: then cells of an earlier step lie beyond the begin of a later one
    for step in range(last, first - 1, -1):
        rest = _steps(byte - step * axis.stride, finer, width)
        if rest is not None:
            return step, *rest
    return None


@dataclass(frozen=True, slots=True)
class Box:
    """Bytes `start` to `end` as a picture shows them: of a region's cells, `steps`, or of none."""

    start: int
    end: int
    region: Region | None
    steps: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Bytes of an item that are drawn as rows of `row` bytes: those of regions whose bytes lie
    among one another, or those between regions.

    `axis` is the outermost of all these regions: its steps begin at `start`, every row has as many,
    and rows look alike. None where there is no such axis.
    """

    start: int
    end: int
    row: int
    regions: tuple[Region, ...]
    axis: Axis | None

    @property
    def rows(self) -> int:
        """How many there are; the last may be shorter."""
        return -(-(self.end - self.start) // self.row)

    def words(self, first: int, count: int = 1) -> str:
        """The steps of `count` rows as text: `entry 3-62`."""
        if self.axis is None:
            return ""
        steps = self.row // self.axis.stride
        low = first * steps
        high = min((first + count) * steps, self.axis.size) - 1
        start = self.axis.start
        last = f"-{start + high:,}" if low < high else ""
        return f"{self.axis.name} {start + low:,}{last}"

    def boxes(self, number: int, smallest: float) -> list[Box]:
        """Row `number` as boxes side by side, of `smallest` bytes or more where cells adjoin."""
        start = self.start + number * self.row
        end = min(start + self.row, self.end)
        parts = (_cells(region, start, end, smallest) for region in self.regions)
        cells = [*islice(merge(*parts, key=attrgetter("start")), MAX_BOXES)]
        boxes: list[Box] = []
        reached = start
        for box in sorted(cells, key=attrgetter("start")):  # steps of one region may interlock
            boxes += [Box(reached, box.start, None)] if reached < box.start else []
            boxes.append(box)
            reached = box.end
        words = "too many cells to be drawn" if len(cells) == MAX_BOXES else ""
        return boxes + ([Box(reached, end, None, words)] if reached < end else [])


def _cells(region: Region, start: int, end: int, smallest: float) -> Iterator[Box]:
    """Cells of a region in bytes `start` to `end`; adjacent steps below `smallest` are one box."""

    def inside(axes: Sequence[Axis], at: int, names: tuple[str, ...]) -> Iterator[Box]:
        reach = region.width + sum((axis.size - 1) * axis.stride for axis in axes)
        contiguous = reach == region.width * prod(axis.size for axis in axes)
        if not axes or (contiguous and axes[0].stride < smallest):
            if at < end and at + reach > start:
                yield Box(max(at, start), min(at + reach, end), region, ", ".join(names))
            return
        axis, *finer = axes
        reach -= (axis.size - 1) * axis.stride
        first = max(0, (start - at - reach) // axis.stride + 1)  # to reach into the bytes
        for step in range(first, min(axis.size, (end - at - 1) // axis.stride + 1)):
            name = f"{axis.name} {axis.start + step}"
            yield from inside(finer, at + step * axis.stride, (*names, name))

    fixed = [a for a in region.axes_by_stride if a.size == 1 < a.total]
    names = tuple(f"{axis.name} {axis.start}" for axis in fixed)
    yield from inside([a for a in region.axes_by_stride if a.size > 1], region.offset, names)


@dataclass(frozen=True)
class ItemMap:
    """One item and all buffers that have such items; `regions` are those of the first buffer."""

    buffers: tuple[Buffer, ...]
    regions: tuple[Region, ...]
    layers: tuple[int, ...]
    space: Space

    @property
    def item_bytes(self) -> int:
        return self.buffers[0].item_bytes

    @property
    def unclaimed(self) -> int:
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
    def _layers(self) -> tuple[int, int]:
        layers = [region.layer for region in self.regions]
        return min(layers), max(layers)

    def bands(self, row_bytes: int = MIN_ROW_BYTES) -> Iterator[Band]:
        """All bytes of the item, cut where no region lies on both sides. A row has whole steps of
        `row_bytes` or more.
        """
        groups: list[list[Region]] = []
        reach = drawn = 0
        for region in sorted(self.regions, key=lambda region: region.offset):
            if not groups or region.offset >= reach:
                groups.append([])
            groups[-1].append(region)
            reach = max(reach, region.end)
        starts = [*(regions[0].offset for regions in groups), self.item_bytes]
        for regions, start, limit in zip([*groups, []], starts, [*starts[1:], 0]):
            if drawn < start:
                yield Band(start=drawn, end=start, row=start - drawn, regions=(), axis=None)
            if regions:
                band = _band(regions, limit, row_bytes)
                yield band
                drawn = band.end


def _band(regions: Sequence[Region], limit: int, row_bytes: int) -> Band:
    """The band of regions; spare bytes of its last row are its own, up to `limit`."""
    start, end = regions[0].offset, max(region.end for region in regions)
    outer = {_outermost(region, start) for region in regions}
    axis = outer.pop() if len(outer) == 1 else None
    row = max((a.stride for region in regions for a in region.axes if a.size > 1), default=end)
    if axis is not None:
        row = axis.stride * -(-row_bytes // axis.stride)
        end = min(limit, start + axis.size * axis.stride)
    row = min(row, end - start)
    return Band(start=start, end=end, row=row, regions=tuple(regions), axis=axis)


def _outermost(region: Region, start: int) -> Axis | None:
    """The axis with the largest stride, if no step of it reaches into the next."""
    axis = next((axis for axis in region.axes_by_stride if axis.size > 1), None)
    if axis is None:
        return None
    step = region.end - start - (axis.size - 1) * axis.stride
    return axis if step <= axis.stride else None


def item_maps(layout: PoolLayout) -> list[ItemMap]:
    """A map for each distinct kind of item, with all buffers that have it, in their order."""
    by_offset = attrgetter("offset")
    inside = {name: sorted(rows, key=by_offset) for name, rows in layout.regions_in.items()}
    alike: dict[object, list[Buffer]] = {}
    for buffer in layout.buffers:
        regions = inside[buffer.name]
        lowest = min((region.layer for region in regions), default=0)
        looks = [replace(r, layer=r.layer - lowest, buffer="any") for r in regions]
        sizes = buffer.item_bytes, buffer.item_stride, buffer.items, buffer.space
        alike.setdefault((*sizes, buffer.padding, *looks), []).append(buffer)
    return [
        ItemMap(
            tuple(buffers),
            tuple(inside[buffers[0].name]),
            tuple(sorted({region.layer for b in buffers for region in inside[b.name]})),
            layout.space_by_name[buffers[0].space],
        )
        for buffers in alike.values()
    ]
