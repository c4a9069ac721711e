"""A quick proof of a new plan: on either side its runs cover the bytes that they are to move, each
once, and beside them nothing but declared padding.

It follows from regions, boxes and padding alone, however the runs were joined. That the parts cover
shards and positions once is for `match.tile` to show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from disagg.plan.match import Part
from disagg.plan.pairing import encoded
from disagg.plan.routes import RecordEnd, Records
from disagg.plan.runs import Box, ItemRuns, Route, RouteSide, Runs
from kvpool.layout import Axis, Key
from kvpool.layout.grid import Ints, bytes_below, fuse, merge_intervals, outer_sum

_Moved = tuple[int, int, tuple[Axis, ...], Box]
"""Where a region begins in an item, its width and axes, and the steps that are moved."""


def prove(records: Sequence[Records], parts: Iterable[Part], routes: Sequence[Route]) -> None:
    """Checks every record pair of every route; pairs with the same checks once. The
    last of `records` are the destination's.

    Raises RuntimeError, naming owner, layer, role and bytes, if a run covers other bytes.
    """
    boxes = {(part.source, key): part.box for part in parts for key in part.keys}
    proved: set[object] = set()
    for route in routes:
        size = len(route.keys) // len(route.dst.buffers)
        for number in range(len(route.dst.buffers)):
            keys = route.keys[number * size : (number + 1) * size]
            steps = [boxes[route.source, key] for key in keys]
            for name, own, ends in (
                ("source", records[route.source], route.src),
                ("destination", records[-1], route.dst),
            ):
                regions = [own.layout.region_by_key[key] for key in keys]
                end, starts = own.record_end(keys)
                moved = [
                    (start + region.offset, region.width, region.axes, box)
                    for start, region, box in zip(starts, regions, steps)
                ]
                begins = end.first == ends.buffers[number]
                fact = name, id(route.runs), *ends[2:], end.item, begins, encoded(moved)
                if fact not in proved:
                    proved.add(fact)
                    side = _RecordSide(
                        name=name, side=ends, runs=route.runs, keys=keys, record=end, moved=moved
                    )
                    if not begins:
                        side.refuse(0, ends.stride, "are those of another buffer")
                    side.check()


class _RunColumns(NamedTuple):
    """Bytes of entry 0 in the item: starts, lengths, and bytes to the next entry, `[R]` each."""

    starts: Ints
    nbytes: Ints
    steps: Ints


class _RecordSide(NamedTuple):
    """One side of a record pair, whose items are those of `record`, and what is to be moved."""

    name: str
    side: RouteSide
    runs: ItemRuns
    keys: Sequence[Key]
    record: RecordEnd
    moved: Sequence[_Moved]

    def check(self) -> None:
        chains, singles = self._columns(self.runs.chains), self._columns(self.runs.singles)
        self._check_entry(chains, singles)
        # nothing but padding joins entries, runs and items
        stride, entries, runs = self.side.stride, self.side.entries, self.runs
        starts, own = chains.starts, entries * chains.nbytes
        spans = (entries - 1) * chains.steps + chains.nbytes
        self._check_filled(starts, spans, own)
        if runs.linear and (singles.starts.size or int(own.sum()) != stride):
            self.refuse(0, stride, "travel as one run, but are not all of its regions")
        if runs.whole is None:
            return
        number = np.arange(entries, dtype=np.int64)[:, None]
        starts = np.append(starts, singles.starts + number * singles.steps)
        short = np.tile(singles.nbytes, entries)
        own, spans = np.append(own, short), np.append(spans, short)
        whole, lengths, _ = self._columns(runs.whole)
        order = np.argsort(whole, kind="stable")
        whole, lengths = whole[order], lengths[order]
        around = np.searchsorted(whole, starts, side="right") - 1
        outside = np.flatnonzero((around < 0) | (starts + spans > whole[around] + lengths[around]))
        if outside.size:
            first = int(starts[outside[0]])
            self.refuse(first, first + int(spans[outside[0]]), "are missing in whole items")
        filled = np.zeros_like(whole)
        np.add.at(filled, around, own)
        self._check_filled(whole, lengths, filled)
        if runs.dense:
            zero = np.zeros(1, dtype=np.int64)
            self._check_filled(zero, zero + stride, zero + filled.sum())

    def refuse(self, first: int, end: int, what: str) -> NoReturn:
        names = ", ".join(f"{owner} layer {layer} {role}" for owner, layer, role in self.keys)
        raise RuntimeError(
            f"{names}: on the {self.name}, bytes {first} to {end} of an item (from buffer "
            f"{self.record.first} on) {what}. The plan is wrong and was not used."
        )

    def _columns(self, runs: Runs) -> _RunColumns:
        side = ("source", "destination").index(self.name)
        return _RunColumns(runs.start[side], runs.nbytes, runs.step[side])

    def _check_entry(self, chains: _RunColumns, singles: _RunColumns) -> None:
        """The runs of entry 0 are the parts' bytes, each once, and go on at the parts' steps."""
        starts, nbytes, steps = map(np.concatenate, zip(chains, singles))
        ends: Ints = starts + nbytes
        parts = (_cells(start, width, axes, box) for start, width, axes, box in self.moved)
        cells = _RunColumns(*map(np.concatenate, zip(*parts)))
        for step in {*cells.steps.tolist(), *steps.tolist()}:
            inside, chosen = cells.steps == step, steps == step
            low = cells.starts[inside]
            wanted = np.concatenate(merge_intervals(low, low + cells.nbytes[inside]))
            moved = np.concatenate(merge_intervals(starts[chosen], ends[chosen]))
            if not np.array_equal(wanted, moved):
                first, end = np.setxor1d(wanted, moved)[:2].tolist()
                self.refuse(first, end, "are left out, or moved and in none of its regions")
        if nbytes.sum() != cells.nbytes.sum():
            self.refuse(int(starts.min()), int(ends.max()), "are moved twice")

    def _check_filled(self, starts: Ints, nbytes: Ints, own: Ints) -> None:
        """All bytes of runs but their `own` ones are declared padding."""
        low, high = self.record.item.pad_starts, self.record.item.pad_ends
        padded = bytes_below(low, high, starts + nbytes) - bytes_below(low, high, starts)
        for run in np.flatnonzero(nbytes - own - padded)[:1].tolist():
            first, end = int(starts[run]), int(starts[run] + nbytes[run])
            rest = nbytes[run] - own[run] - padded[run]
            what = f"are one run, and {rest} of them are neither of its regions nor padding"
            self.refuse(first, end, what)


def _cells(start: int, width: int, axes: Sequence[Axis], box: Box) -> _RunColumns:
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
    starts = outer_sum(start, inner)
    return _RunColumns(starts, np.full_like(starts, width), np.full_like(starts, step))
