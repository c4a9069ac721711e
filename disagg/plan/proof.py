"""A quick proof of a new plan: on either side its runs cover the bytes that they are to move, each
once, and beside them nothing but declared padding.

It follows from regions, boxes and padding alone, however the runs were joined. That the parts cover
shards and positions once is for `match.tile` to show. `verify` is the slow check, which also
compares what each byte means.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from disagg.plan.match import Overlap
from disagg.plan.records import grouped
from disagg.plan.runs import Route
from kvpool.layout import Buffer, PoolLayout, Region
from kvpool.layout.grid import Ints, bytes_below, fuse, merge_intervals, outer_sum, region_runs

_NONE = np.empty(0, dtype=np.int64)


def prove(
    sources: Sequence[PoolLayout],
    dest: PoolLayout,
    elected: Iterable[tuple[Overlap, int]],
    routes: Iterable[Route],
    by_layer: bool = False,
) -> None:
    """Checks one record pair of each route: all pairs of a route have the same runs. With
    `by_layer`, buffers are records of their own.

    Raises RuntimeError, naming owner, layer, role and bytes, if a run covers other bytes.
    """
    parts = {(source, overlap.dest.key): overlap for overlap, source in elected}
    there = [_Records(layout, by_layer) for layout in sources]
    here = _Records(dest, by_layer)
    for route in routes:
        keys = route.keys[: len(route.keys) // len(route.dst_buffers)]
        moved = [parts[route.source, key] for key in keys]
        for side in _sides(route, there[route.source], here, moved):
            side.check_entry()
            side.check_item()


class _Records:
    """The records of a layout, grouped when first asked for."""

    def __init__(self, layout: PoolLayout, by_layer: bool) -> None:
        self.layout, self._by_layer = layout, by_layer
        self._groups: dict[str, list[Buffer]] = {}
        self._regions: dict[str, list[Region]] = {}

    def padding(self, first: str) -> tuple[Ints, Ints]:
        """Starts and ends of the declared padding in the items of the record whose first buffer is
        `first`, sorted.
        """
        if not self._groups:
            groups = grouped(self.layout, self._by_layer)
            self._groups = {group[0].name: group for group in groups}
            for region in self.layout.regions:
                self._regions.setdefault(region.buffer, []).append(region)
        group = self._groups[first]
        starts, ends = [_NONE], [_NONE]
        for buffer in group:
            if buffer.padding:  # its regions do not overlap: gaps lie between an end and a start
                at = buffer.base - group[0].base
                runs = [region_runs(region) for region in self._regions.get(buffer.name, ())]
                starts.append(np.sort(np.concatenate([[at], *(o + at + w for o, w in runs)])))
                end = at + buffer.item_bytes
                ends.append(np.sort(np.concatenate([*(o + at for o, _ in runs), [end]])))
        low, high = np.concatenate(starts), np.concatenate(ends)
        return low[low < high], high[low < high]


class _Cells(NamedTuple):
    """Bytes of entry 0: offsets in the item `[C]`, one length, and bytes to the next entry."""

    starts: Ints
    width: int
    step: int


class _Side(NamedTuple):
    """The first record of a route on one side, and the parts that the route is to move.

    `chains` and `singles` are starts, lengths and bytes to the next entry, `whole` are starts and
    lengths, as the route has them. `first` is the record's first buffer.
    """

    who: str
    records: _Records
    moved: Sequence[Overlap]
    first: str
    stride: int
    entries: int
    chains: tuple[Ints, Ints, Ints]
    singles: tuple[Ints, Ints, Ints]
    whole: tuple[Ints, Ints] | None
    linear: bool
    dense: bool

    def check_entry(self) -> None:
        """The runs of entry 0 are the parts' bytes, each once, and go on at the parts' steps."""
        starts, nbytes, steps = map(np.concatenate, zip(self.chains, self.singles))
        ends: Ints = starts + nbytes
        cells = [self._cells(part) for part in self.moved]
        for step in {cell.step for cell in cells}.union(steps.tolist()):
            mine, some = [cell for cell in cells if cell.step == step], steps == step
            low = np.concatenate([_NONE, *(cell.starts for cell in mine)])
            high = np.concatenate([_NONE, *(cell.starts + cell.width for cell in mine)])
            own, run = merge_intervals(low, high), merge_intervals(starts[some], ends[some])
            edges = np.concatenate(own), np.concatenate(run)
            if not np.array_equal(*edges):
                first, end = np.setxor1d(*edges)[:2].tolist()
                self._refuse(first, end, "are left out, or moved and in none of its regions")
        if nbytes.sum() != sum(cell.starts.size * cell.width for cell in cells):
            self._refuse(int(starts.min()), int(ends.max()), "are moved twice")

    def check_item(self) -> None:
        """Nothing but padding joins entries, runs and items."""
        starts, nbytes, steps = self.chains
        own, spans = self.entries * nbytes, (self.entries - 1) * steps + nbytes
        self._check_filled(starts, spans, own)
        if self.linear and (self.singles[0].size or int(own.sum()) != self.stride):
            self._refuse(0, self.stride, "travel as one run, but are not all of its regions")
        if self.whole is None:
            return
        number = np.arange(self.entries, dtype=np.int64)[:, None]
        if self.singles[0].size:
            starts = np.append(starts, self.singles[0] + number * self.singles[2])
            short = np.tile(self.singles[1], self.entries)
            own, spans = np.append(own, short), np.append(spans, short)
        whole, lengths = self.whole
        if (whole[1:] < whole[:-1]).any():
            order = np.argsort(whole, kind="stable")
            whole, lengths = whole[order], lengths[order]
        at = np.searchsorted(whole, starts, side="right") - 1
        outside = np.flatnonzero((at < 0) | (starts + spans > whole[at] + lengths[at]))
        if outside.size:
            first = int(starts[outside[0]])
            self._refuse(first, first + int(spans[outside[0]]), "are missing in whole items")
        held = np.zeros_like(whole)
        np.add.at(held, at, own)
        self._check_filled(whole, lengths, held)
        if self.dense:
            zero = np.zeros(1, dtype=np.int64)
            self._check_filled(zero, zero + self.stride, zero + held.sum())

    def _check_filled(self, starts: Ints, nbytes: Ints, own: Ints) -> None:
        """All bytes of runs but their `own` ones are declared padding."""
        rest: Ints = nbytes - own
        if not rest.any():
            return
        low, high = self.records.padding(self.first)
        rest -= bytes_below(low, high, starts + nbytes) - bytes_below(low, high, starts)
        for run in np.flatnonzero(rest)[:1].tolist():
            first, end = int(starts[run]), int(starts[run] + nbytes[run])
            what = f"are one run, of which {rest[run]} are neither of its regions nor padding"
            self._refuse(first, end, what)

    def _cells(self, part: Overlap) -> _Cells:
        layout, box = self.records.layout, {name: (low, high) for name, low, high in part.box}
        region = layout.region_by_key[part.dest.key]
        record = layout.buffer_by_name[self.first]
        start, step = layout.buffer_of(region).base - record.base + region.offset, 0
        axes: list[tuple[int, int]] = []
        for axis in region.axes:
            if axis.name == "entry":
                step = axis.stride
            else:
                low, high = box[axis.name]
                start += (low - axis.start) * axis.stride
                axes.append((high - low, axis.stride))
        width, axes = fuse(region.width, axes)
        return _Cells(outer_sum(start, axes), width, step)

    def _refuse(self, first: int, end: int, what: str) -> NoReturn:
        names = ", ".join(str(part.dest) for part in self.moved)
        raise RuntimeError(
            f"{names}: on the {self.who}, bytes {first} to {end} of an item (from buffer "
            f"{self.first} on) {what}. The plan is wrong and was not used."
        )


def _sides(
    route: Route, source: _Records, dest: _Records, moved: Sequence[Overlap]
) -> tuple[_Side, _Side]:
    chains, singles, whole = route.chains, route.singles, route.whole
    return (
        _Side(
            "source",
            source,
            moved,
            route.src_buffers[0],
            route.src_stride,
            route.src_entries,
            (chains.src, chains.nbytes, chains.src_step),
            (singles.src, singles.nbytes, singles.src_step),
            None if whole is None else (whole.src, whole.nbytes),
            route.linear,
            route.dense,
        ),
        _Side(
            "destination",
            dest,
            moved,
            route.dst_buffers[0],
            route.dst_stride,
            route.dst_entries,
            (chains.dst, chains.nbytes, chains.dst_step),
            (singles.dst, singles.nbytes, singles.dst_step),
            None if whole is None else (whole.dst, whole.nbytes),
            route.linear,
            route.dense,
        ),
    )
