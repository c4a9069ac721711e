"""Contiguous runs between an item of a source and an item of the destination.

A route holds all record pairs of one shape between a source rank and the destination: only their
base pointers differ, and `bind` broadcasts over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.layout import Key, Region, Space
from kvpool.layout.grid import Ints
from kvpool.layout.types import SpaceKind

GAPS_AT_ONCE = 1 << 20
"""Bounds the memory for checking gaps between entries."""

Box = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """An item of a record: the kind of its space, for how many entries it has room, and bytes to
    the next. `pad_starts` and `pad_ends` are its declared padding.
    """

    kind: SpaceKind
    entries: int
    stride: int
    pad_starts: Ints
    pad_ends: Ints

    def is_padding(self, starts: Ints, ends: Ints) -> npt.NDArray[np.bool_]:
        """Whether the bytes `starts` to `ends` of an item are declared padding (or none)."""
        if not self.pad_starts.size:
            return starts >= ends
        at = np.maximum(np.searchsorted(self.pad_starts, starts, side="right") - 1, 0)
        return (starts >= ends) | ((starts >= self.pad_starts[at]) & (ends <= self.pad_ends[at]))


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Contiguous bytes of an item pair: offsets in both items and lengths, `[R]` each, ordered by
    destination offset.
    """

    src: Ints
    dst: Ints
    nbytes: Ints

    @property
    def size(self) -> int:
        """Number of runs."""
        return self.src.size


@dataclass(frozen=True, slots=True, eq=False)
class EntryRuns:
    """Runs of one entry: those of entry 0, and the bytes to the next entry on both sides."""

    src: Ints
    dst: Ints
    nbytes: Ints
    src_step: Ints
    dst_step: Ints

    @property
    def size(self) -> int:
        """Number of runs."""
        return self.src.size

    def pick(self, which: npt.NDArray[np.bool_] | Ints) -> EntryRuns:
        """The runs of a mask, or in an order."""
        return EntryRuns(*(column[which] for column in self.columns()))

    def columns(self) -> tuple[Ints, ...]:
        """src, dst, nbytes, src_step, dst_step."""
        return self.src, self.dst, self.nbytes, self.src_step, self.dst_step


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Record pairs of one shape between source rank `source` and the destination.

    Offsets of a pair's runs are from its buffers, one of `src_buffers` and one of `dst_buffers`
    `[B]`; their pointers are the layouts'. `chains` are runs that continue from entry to entry,
    `singles` the other runs; `whole` are the runs of a whole item pair, if items of both sides hold
    equally many entries. `packed` regions move by the item, which is then one entry.
    """

    source: int
    keys: tuple[Key, ...]
    roles: str
    """The roles of `keys`, for metrics: `latent, rope`."""
    packed: bool
    src_space: Space
    dst_space: Space
    src_buffers: tuple[str, ...]
    dst_buffers: tuple[str, ...]
    layers: Ints
    """The layer of each pair `[B]`, or -1 where its runs may join those of other layers."""
    src_stride: int
    dst_stride: int
    chains: EntryRuns
    singles: EntryRuns
    whole: Runs | None
    linear: bool
    """Chains continue from item to item: adjacent items are one run."""
    dense: bool
    """`whole` is one run that continues from item to item."""

    @property
    def src_entries(self) -> int:
        """Entries of a source item, as far as the route tells them apart."""
        return 1 if self.packed else self.src_space.steps

    @property
    def dst_entries(self) -> int:
        """Entries of a destination item."""
        return 1 if self.packed else self.dst_space.steps

    @property
    def grows(self) -> bool:
        """Whether what it moves of a position stays needed however many tokens follow."""
        return self.src_space.grows and self.dst_space.grows

    @property
    def owner(self) -> str:
        """The owner of its layers, where pairs are of one layer."""
        return self.keys[0][0]

    @property
    def shape(self) -> object:
        """What its runs depend on beside a request: routes of equal shape have the same runs."""
        return (
            *(self.src_space.name, self.dst_space.name, self.packed),
            *(self.src_stride, self.dst_stride, self.linear, self.dense),
            *(id(self.chains), id(self.singles), id(self.whole)),
        )

    def within(self, layers: range) -> npt.NDArray[np.bool_]:
        """Which pairs are of a range of layers, `[B]`."""
        return (self.layers >= layers.start) & (self.layers < layers.stop)


def entry_runs(source: Region, dest: Region, box: Box) -> EntryRuns:
    """The runs of one entry of two regions of the same key, over the axis steps of `box`."""
    src, dst, width = source.offset, dest.offset, dest.width
    left: list[tuple[int, int, int]] = []
    strides: list[tuple[int, int, int]] = []
    for name, low, high in box:
        there, here = source.axis(name), dest.axis(name)
        if there is None or here is None:
            raise KeyError(f"{dest}: axis {name!r} exists on one side only.")
        src += (low - there.start) * there.stride
        dst += (low - here.start) * here.stride
        strides.append((high - low, there.stride, here.stride))
    for size, src_stride, dst_stride in sorted(strides, key=lambda axis: axis[2]):
        if src_stride == dst_stride == width and not left:
            width *= size
        elif size > 1:
            left.append((size, src_stride, dst_stride))
    srcs, dsts = np.array([src], dtype=np.int64), np.array([dst], dtype=np.int64)
    for size, src_stride, dst_stride in reversed(left):
        steps = np.arange(size, dtype=np.int64)
        srcs = (srcs[:, None] + steps * src_stride).ravel()
        dsts = (dsts[:, None] + steps * dst_stride).ravel()
    there, here = source.axis("entry"), dest.axis("entry")
    step = there.stride if there else 0, here.stride if here else 0
    return EntryRuns(
        srcs,
        dsts,
        np.full(srcs.size, width, dtype=np.int64),
        np.full(srcs.size, step[0], dtype=np.int64),
        np.full(srcs.size, step[1], dtype=np.int64),
    )


def join(parts: Sequence[tuple[EntryRuns, int, int]]) -> EntryRuns:
    """All runs of a record pair by destination, joined where adjacent on both sides: latent and
    rope become one row. With each part go the bytes from the records' items to its buffers'.
    """
    columns = (np.concatenate(column) for column in zip(*(part.columns() for part, _, _ in parts)))
    runs = EntryRuns(*columns)
    ats = np.array([at for _, *at in parts], dtype=np.int64)
    sizes = [part.size for part, _, _ in parts]
    src_at, dst_at = np.repeat(ats, sizes, axis=0).T
    runs = replace(runs, src=runs.src + src_at, dst=runs.dst + dst_at)
    runs = runs.pick(np.argsort(runs.dst, kind="stable"))
    continues = (
        (runs.src[:-1] + runs.nbytes[:-1] == runs.src[1:])
        & (runs.dst[:-1] + runs.nbytes[:-1] == runs.dst[1:])
        & (runs.src_step[:-1] == runs.src_step[1:])
        & (runs.dst_step[:-1] == runs.dst_step[1:])
    )
    first = np.append(True, ~continues)
    nbytes = np.add.reduceat(runs.nbytes, np.flatnonzero(first))
    return EntryRuns(
        runs.src[first], runs.dst[first], nbytes, runs.src_step[first], runs.dst_step[first]
    )


class ItemRuns(NamedTuple):
    """What a route's runs are: see Route."""

    chains: EntryRuns
    singles: EntryRuns
    whole: Runs | None
    linear: bool
    dense: bool


def item_runs(src: Item, dst: Item, runs: EntryRuns, packed: bool) -> ItemRuns:
    """The joined `runs` of a record pair, classified. Packed items are one entry."""
    src_entries, dst_entries = (1, 1) if packed else (src.entries, dst.entries)
    chained = _chained(src, dst, runs)
    chains, singles = runs.pick(chained), runs.pick(~chained)
    linear = (
        singles.size == 0
        and src.kind == "paged"
        and bool((chains.nbytes == chains.src_step).all())
        and bool((chains.src_step * src_entries == src.stride).all())
        and bool((chains.dst_step * dst_entries == dst.stride).all())
    )
    same = src_entries == dst_entries
    whole = _whole(src, dst, chains, singles, src_entries) if same else None
    return ItemRuns(chains, singles, whole, linear, whole is not None and _dense(src, dst, whole))


def _chained(src: Item, dst: Item, runs: EntryRuns) -> npt.NDArray[np.bool_]:
    """Which runs continue at the next entry, with at most equal padding in between."""
    same = (runs.src_step == runs.dst_step) & (runs.nbytes <= runs.src_step)
    gap = same & (runs.nbytes < runs.src_step)
    if gap.any():
        some = runs.pick(gap)
        clear = _apart_by_padding(src, some.src, some) & _apart_by_padding(dst, some.dst, some)
        same[gap] = clear
    if src.kind == "slot":
        same[:] = False
    return np.asarray(same, dtype=np.bool_)


def _apart_by_padding(item: Item, starts: Ints, runs: EntryRuns) -> npt.NDArray[np.bool_]:
    """For each run, whether all gaps between its entries are padding of the item."""
    gaps = item.entries - 1
    if gaps > item.pad_starts.size:  # each gap needs a padding interval of its own
        return np.zeros(runs.size, dtype=bool)
    entries = np.arange(gaps, dtype=np.int64)
    found = []
    for part in np.array_split(np.arange(runs.size), 1 + runs.size * gaps // GAPS_AT_ONCE):
        first = starts[part, None] + entries * runs.src_step[part, None]
        low, high = first + runs.nbytes[part, None], first + runs.src_step[part, None]
        found.append(item.is_padding(low, high).all(axis=1))
    return np.concatenate(found)


def _whole(src: Item, dst: Item, chains: EntryRuns, singles: EntryRuns, entries: int) -> Runs:
    """All runs of a whole item pair, joined over entries, adjacent runs and equal padding."""
    steps = np.arange(entries, dtype=np.int64)[:, None]
    srcs = np.concatenate([chains.src, (singles.src + steps * singles.src_step).ravel()])
    dsts = np.concatenate([chains.dst, (singles.dst + steps * singles.dst_step).ravel()])
    lengths = (entries - 1) * chains.src_step + chains.nbytes
    nbytes = np.concatenate([lengths, np.tile(singles.nbytes, entries)])
    order = np.argsort(dsts, kind="stable")
    srcs, dsts, nbytes = srcs[order], dsts[order], nbytes[order]
    src_ends, dst_ends = (srcs + nbytes)[:-1], (dsts + nbytes)[:-1]
    continues = (
        (srcs[1:] - src_ends == dsts[1:] - dst_ends)
        & (srcs[1:] >= src_ends)
        & src.is_padding(src_ends, srcs[1:])
        & dst.is_padding(dst_ends, dsts[1:])
    )
    first = np.append(True, ~continues)
    last = np.append(~continues, True)
    return Runs(srcs[first], dsts[first], (dsts + nbytes)[last] - dsts[first])


def _dense(src: Item, dst: Item, whole: Runs) -> bool:
    """Whether adjacent items are one run: only equal padding lies between them."""
    if whole.size != 1 or src.stride != dst.stride or src.kind != "paged":
        return False
    for item, start in ((src, whole.src), (dst, whole.dst)):
        tail = start + whole.nbytes, np.full(1, item.stride)
        head = np.zeros(1, dtype=np.int64), start
        if not (item.is_padding(*tail).all() and item.is_padding(*head).all()):
            return False
    return bool(whole.src[0] == whole.dst[0])
