"""A quick proof of a new plan: on either side its runs cover the bytes that they are to move, each
once, and beside them nothing but declared padding.

It follows from regions, boxes and padding alone, however the runs were joined. That the parts cover
shards and positions once is for `match.tile` to show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from disagg.plan.matching.match import Part
from disagg.plan.matching.pairing import encoded
from disagg.plan.routes import Records, records_of
from disagg.plan.runs import Box, EntryRuns, Route
from kvpool.layout import Axis, Buffer, Key, PoolLayout
from kvpool.layout.grid import Ints, bytes_below, fuse, merge_intervals, outer_sum, region_runs

_NONE = np.empty(0, dtype=np.int64)
_Moved = tuple[int, int, tuple[Axis, ...], Box]
"""Where a region begins in an item, its width and axes, and the steps that are moved."""
_ANY = object()
"""In place of what lies in an item: no padding is moved."""


def prove(
    sources: Sequence[PoolLayout],
    dest: PoolLayout,
    parts: Iterable[Part],
    routes: Iterable[Route],
) -> None:
    """Checks every record pair of every route; pairs of which the same is to be checked, once.

    Raises RuntimeError, naming owner, layer, role and bytes, if a run covers other bytes.
    """
    boxes = {(part.source, key): part.box for part in parts for key in part.keys}
    src_records, dst_records = records_of(sources), Records(dest)
    # the contents of items for which the runs of a side, by the bytes to move, were found right
    proved: dict[object, dict[bytes, set[object]]] = {}
    for route in routes:
        size = len(route.keys) // len(route.dst_buffers)
        steps = [boxes[route.source, key] for key in route.keys]
        for records, side in ((src_records[route.source], "src"), (dst_records, "dst")):
            end = _end(route, side)
            proved_ends = proved.setdefault(end.key, {})
            for number, first in enumerate(end.buffers):
                pair = slice(number * size, (number + 1) * size)
                moved = _moved(records.layout, first, route.keys[pair], steps[pair])
                contents = proved_ends.setdefault(encoded(moved), set())
                check = _Side(
                    end=end, records=records, first=first, keys=route.keys[pair], moved=moved
                )
                if not contents or (_ANY not in contents and check.content not in contents):
                    contents.add(check.content if check.check() else _ANY)


class _End(NamedTuple):
    """A route on one side. `chains` and `singles` are starts, lengths and bytes to the next entry,
    `whole` are starts and lengths, as the route has them.
    """

    who: str
    buffers: tuple[str, ...]
    stride: int
    entries: int
    chains: tuple[Ints, Ints, Ints]
    singles: tuple[Ints, Ints, Ints]
    whole: tuple[Ints, Ints] | None
    linear: bool
    dense: bool

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for ends of which the same is to be checked."""
        columns = *self.chains, *self.singles, *(self.whole or ())
        numbers = self.stride, self.entries, self.linear, self.dense, bool(self.whole)
        return self.who, *numbers, *[column.tobytes() for column in columns]


def _end(route: Route, side: str) -> _End:
    """A route on side `src` or `dst`."""

    def columns(runs: EntryRuns) -> tuple[Ints, Ints, Ints]:
        return getattr(runs, side), runs.nbytes, getattr(runs, f"{side}_step")

    whole = route.runs.whole
    return _End(
        who={"src": "source", "dst": "destination"}[side],
        buffers=getattr(route, f"{side}_buffers"),
        stride=getattr(route, f"{side}_stride"),
        entries=getattr(route, f"{side}_entries"),
        chains=columns(route.runs.chains),
        singles=columns(route.runs.singles),
        whole=None if whole is None else (getattr(whole, side), whole.nbytes),
        linear=route.runs.linear,
        dense=route.runs.dense,
    )


class _Cells(NamedTuple):
    """Bytes of entry 0: offsets in the item `[C]`, one length, and bytes to the next entry."""

    starts: Ints
    width: int
    step: int


class _Side(NamedTuple):
    """One side of a record pair, whose items begin where those of buffer `first` do, and what is to
    be moved of it.
    """

    end: _End
    records: Records
    first: str
    keys: Sequence[Key]
    moved: Sequence[_Moved]

    @property
    def record(self) -> Sequence[Buffer]:
        """The record's buffers."""
        regions = self.records.layout.region_by_key
        return self.records.record([regions[key].buffer for key in self.keys])

    @property
    def content(self) -> object:
        """What the padding depends on."""
        return self.records.content(self.record), self.record[0].name == self.first

    def check(self) -> bool:
        """Checks runs of entries and of items; returns whether padding lies in them."""
        self._check_entry()
        return self._check_item()

    def _check_entry(self) -> None:
        """The runs of entry 0 are the parts' bytes, each once, and go on at the parts' steps."""
        starts, nbytes, steps = map(np.concatenate, zip(self.end.chains, self.end.singles))
        ends: Ints = starts + nbytes
        cells = [_cells(start, width, axes, box) for start, width, axes, box in self.moved]
        for step in {cell.step for cell in cells}.union(steps.tolist()):
            alike, chosen = [cell for cell in cells if cell.step == step], steps == step
            low = np.concatenate([_NONE, *(cell.starts for cell in alike)])
            high = np.concatenate([_NONE, *(cell.starts + cell.width for cell in alike)])
            wanted, moved = (
                merge_intervals(low, high),
                merge_intervals(starts[chosen], ends[chosen]),
            )
            wanted_edges, moved_edges = np.concatenate(wanted), np.concatenate(moved)
            if not np.array_equal(wanted_edges, moved_edges):
                first, end = np.setxor1d(wanted_edges, moved_edges)[:2].tolist()
                self._refuse(first, end, "are left out, or moved and in none of its regions")
        if nbytes.sum() != sum(cell.starts.size * cell.width for cell in cells):
            self._refuse(int(starts.min()), int(ends.max()), "are moved twice")

    def _check_item(self) -> bool:
        """Nothing but padding joins entries, runs and items; returns whether some does."""
        end, (starts, nbytes, steps) = self.end, self.end.chains
        own, spans = end.entries * nbytes, (end.entries - 1) * steps + nbytes
        padded = self._check_filled(starts, spans, own)
        if end.linear and (end.singles[0].size or int(own.sum()) != end.stride):
            self._refuse(0, end.stride, "travel as one run, but are not all of its regions")
        if end.whole is None:
            return padded
        number = np.arange(end.entries, dtype=np.int64)[:, None]
        if end.singles[0].size:
            starts = np.append(starts, end.singles[0] + number * end.singles[2])
            short = np.tile(end.singles[1], end.entries)
            own, spans = np.append(own, short), np.append(spans, short)
        whole, lengths = end.whole
        if (whole[1:] < whole[:-1]).any():
            order = np.argsort(whole, kind="stable")
            whole, lengths = whole[order], lengths[order]
        around = np.searchsorted(whole, starts, side="right") - 1
        outside = np.flatnonzero((around < 0) | (starts + spans > whole[around] + lengths[around]))
        if outside.size:
            first = int(starts[outside[0]])
            self._refuse(first, first + int(spans[outside[0]]), "are missing in whole items")
        filled = np.zeros_like(whole)
        np.add.at(filled, around, own)
        padded |= self._check_filled(whole, lengths, filled)
        if end.dense:
            zero = np.zeros(1, dtype=np.int64)
            padded |= self._check_filled(zero, zero + end.stride, zero + filled.sum())
        return padded

    def _check_filled(self, starts: Ints, nbytes: Ints, own: Ints) -> bool:
        """All bytes of runs but their `own` ones are declared padding; returns whether some are."""
        rest: Ints = nbytes - own
        if not rest.any():
            return False
        low, high = self._padding()
        rest -= bytes_below(low, high, starts + nbytes) - bytes_below(low, high, starts)
        for run in np.flatnonzero(rest)[:1].tolist():
            first, end = int(starts[run]), int(starts[run] + nbytes[run])
            what = f"are one run, of which {rest[run]} are neither of its regions nor padding"
            self._refuse(first, end, what)
        return True

    def _padding(self) -> tuple[Ints, Ints]:
        """Starts and ends of the declared padding in the record's items, sorted."""
        starts, ends = [_NONE], [_NONE]
        base = self.records.layout.buffer_by_name[self.first].base
        for buffer in self.record:
            if buffer.padding:  # its regions do not overlap: gaps lie between an end and a start
                first = buffer.base - base
                runs = [region_runs(region) for region in self.records.inside(buffer)]
                after = [offsets + first + width for offsets, width in runs]
                starts.append(np.sort(np.concatenate([[first], *after])))
                before = [offsets + first for offsets, _ in runs]
                ends.append(np.sort(np.concatenate([*before, [first + buffer.item_bytes]])))
        low, high = np.concatenate(starts), np.concatenate(ends)
        return low[low < high], high[low < high]

    def _refuse(self, first: int, end: int, what: str) -> NoReturn:
        names = ", ".join(f"{owner} layer {layer} {role}" for owner, layer, role in self.keys)
        raise RuntimeError(
            f"{names}: on the {self.end.who}, bytes {first} to {end} of an item (from buffer "
            f"{self.first} on) {what}. The plan is wrong and was not used."
        )


def _moved(
    layout: PoolLayout, first: str, keys: Sequence[Key], steps: Sequence[Box]
) -> list[_Moved]:
    regions, buffers = layout.region_by_key, layout.buffer_by_name
    base, moved = buffers[first].base, []
    for key, box in zip(keys, steps):
        region = regions[key]
        start = buffers[region.buffer].base - base + region.offset
        moved.append((start, region.width, region.axes, box))
    return moved


def _cells(start: int, width: int, axes: Sequence[Axis], box: Box) -> _Cells:
    steps, step = {name: (low, high) for name, low, high in box}, 0
    inner: list[tuple[int, int]] = []
    for axis in axes:
        if axis.name == "entry":
            step = axis.stride
        else:
            low, high = steps[axis.name]
            start += (low - axis.start) * axis.stride
            inner.append((high - low, axis.stride))
    width, inner = fuse(width, inner)
    return _Cells(outer_sum(start, inner), width, step)
