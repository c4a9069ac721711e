"""Contiguous runs between an item of a source and an item of the destination.

A route holds all record pairs of one shape between a source rank and the destination: only their
base pointers differ, and `bind` broadcasts over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.layout import Key, Region, Space
from kvpool.layout.grid import Ints, outer_sum, rows_of

GAPS_AT_ONCE = 1 << 20
"""Bounds the memory for checking gaps between entries."""

Box = tuple[tuple[str, int, int], ...]


def volume(box: Box) -> int:
    return prod(high - low for _, low, high in box)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Item:
    """An item of a record: for how many entries it has room, and bytes to the next; whether a
    request may have `several`. `pad_starts` and `pad_ends` are its declared padding.
    """

    several: bool
    entries: int
    stride: int
    pad_starts: Ints
    pad_ends: Ints

    def is_padding(self, starts: Ints, ends: Ints) -> npt.NDArray[np.bool_]:
        """Whether the bytes `starts` to `ends` of an item are declared padding (or none)."""
        if not self.pad_starts.size:
            return starts >= ends
        gap = np.maximum(np.searchsorted(self.pad_starts, starts, side="right") - 1, 0)
        return (starts >= ends) | ((starts >= self.pad_starts[gap]) & (ends <= self.pad_ends[gap]))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Runs:
    """Contiguous bytes of an entry of two items: offsets of those of entry 0 in the source's and
    the destination's item `[2, R]`, lengths `[R]`, and the bytes to the next entry `[2, R]`. Of
    whole items, those to the next item.
    """

    start: Ints
    nbytes: Ints
    step: Ints

    @property
    def size(self) -> int:
        return self.nbytes.size


class ItemRuns(NamedTuple):
    """The runs of a record pair."""

    chains: Runs
    """Runs that continue from entry to entry."""
    singles: Runs
    """The other runs of an entry."""
    whole: Runs | None
    """The runs of a whole item pair, if items of both sides hold equally many entries."""
    linear: bool
    """Chains continue from item to item: adjacent items are one run."""
    dense: bool
    """`whole` is one run that continues from item to item."""


class RouteSide(NamedTuple):
    """One side of a route: of its record pairs the first buffers `[B]`, whose items are `stride`
    bytes apart and hold `entries`, as far as the route tells them apart.
    """

    space: Space
    buffers: tuple[str, ...]
    stride: int
    entries: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Route:
    """Record pairs of one shape between source rank `source` and the destination.

    Offsets of a pair's runs are from its buffers; their pointers are the layouts'. `packed` regions
    move by the item, which is then one entry.

    Of pages of 64 rows of 1,152 bytes, 61 layers are one route with B = 61: one of `chains` has
    `nbytes` and steps of 1,152, and a stretch of 5 entries is a run of 5,760 bytes. Of keys in
    `[head, entry, 256 bytes]` on one side and `[entry, head, 256 bytes]` on the other, each head is
    one of `singles`: 5 entries of 8 heads are 40 runs of 256 bytes.
    """

    source: int
    keys: tuple[Key, ...]
    roles: str
    """The roles of `keys`, for metrics: `latent, rope`."""
    packed: bool
    src: RouteSide
    dst: RouteSide
    layers: Ints
    """The layer of each pair `[B]`, or -1 where its runs may join those of other layers."""
    runs: ItemRuns

    @property
    def grows(self) -> bool:
        """Whether what it moves of a position stays needed however many tokens follow."""
        return self.src.space.grows and self.dst.space.grows

    @property
    def owner(self) -> str:
        """The owner of its layers, where pairs are of one layer."""
        return self.keys[0][0]

    @property
    def shape(self) -> object:
        """What its runs depend on beside a request: routes of equal shape have the same runs."""
        sides = [(side.space.name, side.stride) for side in (self.src, self.dst)]
        return *sides, self.packed, id(self.runs)

    def within(self, layers: range) -> npt.NDArray[np.bool_]:
        """Which pairs are of a range of layers, `[B]`."""
        return (self.layers >= layers.start) & (self.layers < layers.stop)


def entry_runs(source: Region, dest: Region, box: Box) -> Runs:
    """The runs of one entry of two regions of the same key, over the axis steps of `box`."""
    src, dst, width = source.offset, dest.offset, dest.width
    src_axes, dst_axes = ({axis.name: axis for axis in side.axes} for side in (source, dest))
    outer: list[tuple[int, int, int]] = []
    strides: list[tuple[int, int, int]] = []
    for name, low, high in box:
        src_axis, dst_axis = src_axes[name], dst_axes[name]
        src += (low - src_axis.start) * src_axis.stride
        dst += (low - dst_axis.start) * dst_axis.stride
        strides.append((high - low, src_axis.stride, dst_axis.stride))
    for size, src_stride, dst_stride in sorted(strides, key=lambda axis: axis[2]):
        if src_stride == dst_stride == width and not outer:
            width *= size
        elif size > 1:
            outer.append((size, src_stride, dst_stride))
    outer.reverse()
    start = np.stack(
        (
            outer_sum(src, [(size, stride) for size, stride, _ in outer]),
            outer_sum(dst, [(size, stride) for size, _, stride in outer]),
        )
    )
    step = [[axes["entry"].stride if "entry" in axes else 0] for axes in (src_axes, dst_axes)]
    return Runs(
        start=start,
        nbytes=np.full(start.shape[1], width, dtype=np.int64),
        step=np.full_like(start, step),
    )


def join(parts: Sequence[tuple[Runs, int, int]]) -> Runs:
    """All runs of a record pair by destination, joined where adjacent on both sides: of `parts`,
    which are runs of an entry of two buffers, and the bytes from both records' items to these.
    """
    runs = Runs(
        start=np.concatenate([np.add(r.start, [[src], [dst]]) for r, src, dst in parts], axis=1),
        nbytes=np.concatenate([runs.nbytes for runs, _, _ in parts]),
        step=np.concatenate([runs.step for runs, _, _ in parts], axis=1),
    )
    runs = rows_of(runs, np.argsort(runs.start[1], kind="stable"))
    continues = (runs.start + runs.nbytes)[:, :-1] == runs.start[:, 1:]
    continues &= runs.step[:, :-1] == runs.step[:, 1:]
    first = np.flatnonzero(np.append(True, ~continues.all(axis=0)))
    return replace(rows_of(runs, first), nbytes=np.add.reduceat(runs.nbytes, first))


def item_runs(src: Item, dst: Item, runs: Runs, packed: bool) -> ItemRuns:
    """The joined `runs` of a record pair, classified. Packed items are one entry."""
    src_entries, dst_entries = (1, 1) if packed else (src.entries, dst.entries)
    chained = _chained(src, dst, runs)
    chains, singles = rows_of(runs, chained), rows_of(runs, ~chained)
    filled = chains.step * [[src_entries], [dst_entries]] == [[src.stride], [dst.stride]]
    filled &= chains.nbytes == chains.step[0]
    same = src_entries == dst_entries
    whole = _whole(src, dst, chains, singles, src_entries) if same else None
    return ItemRuns(
        chains=chains,
        singles=singles,
        whole=whole,
        linear=singles.size == 0 and src.several and bool(filled.all()),
        dense=whole is not None and _dense(src, dst, whole),
    )


def _chained(src: Item, dst: Item, runs: Runs) -> npt.NDArray[np.bool_]:
    """Which runs continue at the next entry, with at most equal padding in between."""
    same = (runs.step[0] == runs.step[1]) & (runs.nbytes <= runs.step[0])
    gap = same & (runs.nbytes < runs.step[0])
    if gap.any():
        some = rows_of(runs, gap)
        for item, start in zip((src, dst), some.start):
            same[gap] &= _apart_by_padding(item, start, some)
    return np.asarray(same, dtype=np.bool_)


def _apart_by_padding(item: Item, starts: Ints, runs: Runs) -> npt.NDArray[np.bool_]:
    """For each run, whether all gaps between its entries are padding of the item."""
    gaps = item.entries - 1
    if gaps > item.pad_starts.size:  # each gap needs a padding interval of its own
        return np.zeros(runs.size, dtype=bool)
    entries = np.arange(gaps, dtype=np.int64)
    clear = []
    for part in np.array_split(np.arange(runs.size), 1 + runs.size * gaps // GAPS_AT_ONCE):
        first = starts[part, None] + entries * runs.step[0, part, None]
        low, high = first + runs.nbytes[part, None], first + runs.step[0, part, None]
        clear.append(item.is_padding(low, high).all(axis=1))
    return np.concatenate(clear)


def _whole(src: Item, dst: Item, chains: Runs, singles: Runs, entries: int) -> Runs:
    """All runs of a whole item pair, joined over entries, adjacent runs and equal padding."""
    number = np.arange(entries, dtype=np.int64)[:, None]
    starts = singles.start[:, None] + number * singles.step[:, None]
    start = np.concatenate([chains.start, starts.reshape(2, -1)], axis=1)
    lengths = (entries - 1) * chains.step[0] + chains.nbytes
    nbytes = np.concatenate([lengths, np.tile(singles.nbytes, entries)])
    order = np.argsort(start[1], kind="stable")
    start, ends = start[:, order], (start + nbytes)[:, order]
    gaps = start[:, 1:] - ends[:, :-1]
    continues = (gaps[0] == gaps[1]) & (gaps[0] >= 0)
    for item, low, high in zip((src, dst), ends[:, :-1], start[:, 1:]):
        continues &= item.is_padding(low, high)
    first, last = np.append(True, ~continues), np.append(~continues, True)
    start = start[:, first]
    return Runs(
        start=start,
        nbytes=ends[1, last] - start[1],
        step=np.full_like(start, [[src.stride], [dst.stride]]),
    )


def _dense(src: Item, dst: Item, whole: Runs) -> bool:
    """Whether adjacent items are one run: only equal padding lies between them."""
    if whole.size != 1 or src.stride != dst.stride or not src.several:
        return False
    start = whole.start[0]
    starts, ends = np.append(0, start + whole.nbytes), np.append(start, src.stride)
    padded = all(item.is_padding(starts, ends).all() for item in (src, dst))
    return padded and bool(start == whole.start[1])
