"""A plan's routes and one request's addresses, as arrays of source address, destination address and
length.

Positions pair the two sides. The list of items is walked and coalesced once per pair of spaces and
then broadcast over layers; nothing here is a Python object per run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from disagg.route import EntryRuns, Ints, Route
from kvpool.layout import PoolLayout, RequestAddress, Space, Span


class IncompleteTransfer(ValueError):
    """A source does not hold positions that the destination needs."""


class CopyBatch(NamedTuple):
    """Source addresses, destination addresses and lengths in bytes, int64 `[N]` each.

    Equal lengths are one number, broadcast and read-only.
    """

    src: Ints
    dst: Ints
    nbytes: Ints

    @property
    def runs(self) -> int:
        """How many runs."""
        return self.src.size

    @property
    def total(self) -> int:
        """Bytes in all."""
        return int(self.nbytes.sum())

    def split(self, max_bytes: int, max_runs: int) -> Iterator[CopyBatch]:
        """Consecutive parts of at most `max_runs` runs and, where a run is not larger alone,
        `max_bytes`.
        """
        edge = np.cumsum(self.nbytes)
        start = 0
        while start < self.runs:
            before = int(edge[start - 1]) if start else 0
            stop = int(np.searchsorted(edge, before + max_bytes, side="right"))
            stop = min(max(stop, start + 1), start + max_runs)
            yield CopyBatch(self.src[start:stop], self.dst[start:stop], self.nbytes[start:stop])
            start = stop


class Columns:
    """Memory for batches, reused: fresh arrays of this size cost more in page faults than their
    filling.
    """

    def __init__(self) -> None:
        self._held = np.empty((3, 0), dtype=np.int64)

    def take(self, size: int) -> npt.NDArray[np.int64]:
        """Columns `[3, size]`, valid until the next call."""
        if self._held.shape[1] < size:
            self._held = np.empty((3, max(size, 2 * self._held.shape[1])), dtype=np.int64)
        return self._held[:, :size]


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """Entries of a request that lie in one item on both sides: items, steps in them and counts,
    `[F]` each.
    """

    src_item: Ints
    src_step: Ints
    dst_item: Ints
    dst_step: Ints
    count: Ints

    def part(self, which: slice | npt.NDArray[np.bool_]) -> Walk:
        """Those of a slice or mask."""
        return Walk(*(column[which] for column in self.columns()))

    def columns(self) -> tuple[Ints, ...]:
        """src_item, src_step, dst_item, dst_step, count."""
        return self.src_item, self.src_step, self.dst_item, self.dst_step, self.count

    def coalesced(self, src_entries: int, dst_entries: int) -> Walk:
        """The same entries in fewer parts where one goes on in the next item on both sides."""
        src = self.src_item * src_entries + self.src_step
        dst = self.dst_item * dst_entries + self.dst_step
        breaks = (src[1:] != src[:-1] + self.count[:-1]) | (dst[1:] != dst[:-1] + self.count[:-1])
        if breaks.all():
            return self
        first = np.flatnonzero(np.append(True, breaks))
        count = np.add.reduceat(self.count, first)
        return Walk(
            self.src_item[first],
            self.src_step[first],
            self.dst_item[first],
            self.dst_step[first],
            count,
        )

    def entries(self) -> Walk:
        """One part an entry."""
        within = np.arange(int(self.count.sum()), dtype=np.int64)
        within -= np.repeat(np.cumsum(self.count) - self.count, self.count)
        src_item, src_step, dst_item, dst_step = (
            np.repeat(c, self.count) for c in self.columns()[:4]
        )
        return Walk(src_item, src_step + within, dst_item, dst_step + within, np.ones_like(within))


class _Block(NamedTuple):
    """Runs to be broadcast over a route's bases: offsets and lengths `[A, F]`."""

    route: Route
    src: Ints
    dst: Ints
    nbytes: Ints


def bind(
    routes: Sequence[Route],
    source: PoolLayout,
    dest: PoolLayout,
    source_address: RequestAddress,
    dest_address: RequestAddress,
    tokens: range,
    columns: Columns,
) -> CopyBatch:
    """Runs of `routes` for positions `tokens` of one request. See TransferPlan.bind."""
    if tokens.step != 1 or not 0 <= tokens.start <= tokens.stop <= dest_address.num_tokens:
        raise ValueError(
            f"tokens {tokens}: a range of positions within 0 to {dest_address.num_tokens}."
        )
    walks: dict[tuple[str, str], Walk] = {}
    blocks: list[_Block] = []
    for route in routes:
        pair = route.src_space.name, route.dst_space.name
        if pair not in walks:
            walks[pair] = _walk(
                _End(route.src_space, source, source_address),
                _End(route.dst_space, dest, dest_address),
                tokens,
            )
        if walks[pair].count.size:
            blocks.extend(_blocks(route, walks[pair]))
    lengths = {int(edge) for b in blocks for edge in (b.nbytes.min(), b.nbytes.max())}
    out = columns.take(sum(block.route.src_base.size * block.src.size for block in blocks))
    start = 0
    for route, src, dst, nbytes in blocks:
        shape = (route.src_base.size, *src.shape)
        stop = start + route.src_base.size * src.size
        for column, bases, offsets in ((0, route.src_base, src), (1, route.dst_base, dst)):
            np.add(bases[:, None, None], offsets, out=out[column, start:stop].reshape(shape))
        if len(lengths) > 1:
            out[2, start:stop].reshape(shape)[...] = nbytes
        start = stop
    if len(lengths) == 1:  # one number for all: a third less memory to write
        return CopyBatch(out[0], out[1], np.broadcast_to(np.int64(lengths.pop()), start))
    return CopyBatch(*out)


def scattered(src_space: Space, dst_space: Space, tokens: int) -> Walk:
    """The walk of a request of `tokens` tokens of which no two items are neighbours."""
    needed = _needed(dst_space, range(tokens), tokens)
    sizes = src_space.entries_per_item, dst_space.entries_per_item
    starts = _starts(needed, *sizes) if needed else np.empty(0, dtype=np.int64)
    count = np.diff(starts, append=needed.stop)
    (src, src_step), (dst, dst_step) = (np.divmod(starts, size) for size in sizes)
    return Walk(2 * src, src_step, 2 * dst, dst_step, count)


def cost(route: Route, walk: Walk) -> tuple[int, int]:
    """Runs and bytes that a route moves for a walk."""
    blocks = list(_blocks(route, walk)) if walk.count.size else []
    pairs = route.src_base.size
    return pairs * sum(b.src.size for b in blocks), pairs * sum(int(b.nbytes.sum()) for b in blocks)


class _End:
    """One side of a walk: a space, the items that its buffers have, and the request's span."""

    def __init__(self, space: Space, layout: PoolLayout, address: RequestAddress) -> None:
        self.space, self.address = space, address
        self.items = layout.items_by_space[space.name]
        self.span: Span | None = address.spans.get(space.id_list)

    def item(self, index: Ints, who: str) -> Ints:
        """Ids of the request's items `index`; ids outside the buffer raise."""
        span = self.span
        if span is None:
            raise ValueError(f"{who}: no ids for space {self.space.id_list!r}.")
        at = index - span.first_item if self.space.kind == "paged" else np.zeros_like(index)
        if at[0] < 0 or at[-1] >= span.ids.size:
            size = self.space.tokens_per_item
            held = range(span.first_item * size, (span.first_item + span.ids.size) * size)
            wanted = f"{int(index[0]) * size} to {(int(index[-1]) + 1) * size - 1}"
            raise IncompleteTransfer(
                f"{who}: space {self.space.name} needs the items of positions {wanted}, "
                f"its ids cover {held.start} to {held.stop - 1}."
            )
        if at[-1] - at[0] + 1 == at.size:
            ids = span.ids[int(at[0]) : int(at[-1]) + 1]
        else:
            ids = span.ids[at]
        low, high = int(ids.min()), int(ids.max())
        if low < self.space.reserved or high >= self.items:
            wrong = low if low < self.space.reserved else high
            raise ValueError(
                f"{who}: item {wrong} of space {self.space.name} lies outside "
                f"{self.space.reserved} to {self.items - 1}."
            )
        return ids


def _walk(src: _End, dst: _End, tokens: range) -> Walk:
    """Pairs the entries of `tokens` that the destination keeps alive."""
    needed = _needed(dst.space, tokens, dst.address.num_tokens)
    _check_offered(src, needed, tokens, dst.address.num_tokens)
    if not needed:
        none = np.empty(0, dtype=np.int64)
        return Walk(none, none, none, none, none)
    sizes = src.space.entries_per_item, dst.space.entries_per_item
    starts = _starts(needed, *sizes)
    count = np.diff(starts, append=needed.stop)
    src_index, src_step = np.divmod(starts, sizes[0])
    same = sizes[0] == sizes[1]
    dst_index, dst_step = (src_index, src_step) if same else np.divmod(starts, sizes[1])
    return Walk(
        src.item(src_index, "source"), src_step, dst.item(dst_index, "destination"), dst_step, count
    )


def _needed(space: Space, tokens: range, total: int) -> range:
    """Entries of `tokens` that are alive once a request has `total` tokens."""
    if space.kind == "slot":  # a state is that of the last position
        return range(1) if tokens and tokens.stop == total else range(0)
    per = space.tokens_per_entry
    low, high = tokens.start // per, tokens.stop // per
    return range(low if space.window is None else max(low, total // per - space.window), high)


def _check_offered(src: _End, needed: range, tokens: range, total: int) -> None:
    space, held = src.space, src.address.num_tokens
    if not needed:
        return
    if held < tokens.stop:
        raise IncompleteTransfer(
            f"source: space {space.name} holds positions up to {held - 1}, needed are "
            f"{tokens.start} to "
            f"{tokens.stop - 1}. Bind the positions that are computed, or wait for the rest."
        )
    if space.kind == "slot" and held != total:
        raise IncompleteTransfer(
            f"source: the state in space {space.name} is that of {held} tokens, needed is that of "
            f"{total}."
        )
    if space.window is not None:
        alive = max(0, held // space.tokens_per_entry - space.window)
        if needed.start < alive:
            raise IncompleteTransfer(
                f"source: space {space.name} keeps entries from {alive} alive, needed are "
                f"{needed.start} to {needed.stop - 1}. Give decode a window of at most "
                f"{space.window} entries."
            )


def _starts(entries: range, one: int, other: int) -> Ints:
    """First entries of the parts into which items of `one` and of `other` entries cut a range."""

    def multiples(size: int) -> Ints:
        return np.arange((entries.start // size + 1) * size, entries.stop, size, dtype=np.int64)

    if one % other == 0 or other % one == 0:
        inner = multiples(min(one, other))
    else:
        inner = np.union1d(multiples(one), multiples(other))
    return np.append(np.int64(entries.start), inner)


def _blocks(route: Route, walk: Walk) -> Iterator[_Block]:
    src_entries, dst_entries = route.src_space.entries_per_item, route.dst_space.entries_per_item
    if route.linear:
        yield _entry_block(route, route.chains, walk.coalesced(src_entries, dst_entries))
        return
    rest = walk
    if route.whole is not None:
        full = (walk.count == src_entries) & (walk.src_step == 0) & (walk.dst_step == 0)
        if full.any():
            yield _whole_block(route, walk.part(full))
        rest = walk.part(~full)
    if rest.count.size:
        if route.chains.size:
            yield _entry_block(route, route.chains, rest)
        if route.singles.size:
            yield _entry_block(route, route.singles, rest.entries())


def _whole_block(route: Route, walk: Walk) -> _Block:
    whole = route.whole
    if whole is None:
        raise ValueError("this route moves no whole items.")
    spread = np.zeros_like(walk.count)
    if route.dense:
        walk = walk.coalesced(entries := route.src_space.entries_per_item, entries)
        spread = (walk.count // entries - 1) * route.src_stride
    return _Block(
        route,
        whole.src[:, None] + walk.src_item * route.src_stride,
        whole.dst[:, None] + walk.dst_item * route.dst_stride,
        whole.nbytes[:, None] + spread,
    )


def _entry_block(route: Route, runs: EntryRuns, walk: Walk) -> _Block:
    src_step, dst_step = runs.src_step[:, None], runs.dst_step[:, None]
    return _Block(
        route,
        runs.src[:, None] + walk.src_item * route.src_stride + walk.src_step * src_step,
        runs.dst[:, None] + walk.dst_item * route.dst_stride + walk.dst_step * dst_step,
        runs.nbytes[:, None] + (walk.count - 1) * dst_step,
    )
