"""Binds a plan's routes to one request: arrays of source pointers, destination pointers and
lengths, without a Python object per run.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import numpy as np

from disagg.plan.block_pools import id_clash
from disagg.plan.columns import Columns
from disagg.plan.positions import BlockLookup, EntryPairs, pair_entries, pair_items
from disagg.plan.runs import EntryRuns, Route, Runs
from kvpool.layout import PoolLayout, RequestAddress
from kvpool.layout.grid import Ints, ragged

_LENGTH = struct.Struct("q")
BYTES_PER_RUN = 4096
"""Dead bytes of a last page that may travel for each run that they save; at least half of its runs
must be saved.
"""


class Count(Enum):
    """What is known of how many tokens a request has, and so what of it is bound. `UNKNOWN` of
    every chunk and then `LEARNED` of all positions move what `KNOWN` of every chunk does.
    """

    KNOWN = "known"
    """All of `tokens`: the destination's block table says how many tokens the request has."""
    UNKNOWN = "unknown"
    """Of `tokens` what moves whatever the number is: entries of spaces without a window, and full
    items of packed regions. The block table's number is the most that it can be.
    """
    LEARNED = "learned"
    """The rest of `tokens`, which end with the request: windows, slots, rings, and the last item of
    a packed region if it is not full.
    """


class BoundRuns(NamedTuple):
    """Offsets from a pair's bases and lengths in bytes, `[A, F]` each: runs of an item or entry at
    each of `F` steps of the request.
    """

    src: Ints
    dst: Ints
    nbytes: Ints


class Block(NamedTuple):
    """The runs of a route at each of its record pairs, whose bases are given `[B]`. A batch holds
    them in the order `[B, A, F]`.
    """

    route: Route
    src_base: Ints
    dst_base: Ints
    runs: BoundRuns
    lengths: frozenset[int]
    """The shortest and the longest of the runs."""
    total: int
    """Bytes of the runs of one record pair."""

    @property
    def size(self) -> int:
        """Number of runs."""
        return self.src_base.size * self.runs.src.size


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch:
    """Source pointers, destination pointers and lengths in bytes, int64 `[N]` each.

    Equal lengths are one number, broadcast and read-only. `shares` are the runs and bytes of each
    route that has any, of a batch that `bind` returned; its parts have none.
    """

    src: Ints
    dst: Ints
    nbytes: Ints
    shares: tuple[tuple[Route, int, int], ...] = ()

    def __iter__(self) -> Iterator[Ints]:
        return iter((self.src, self.dst, self.nbytes))

    @property
    def runs(self) -> int:
        """Number of runs."""
        return self.src.size

    @property
    def total(self) -> int:
        """Total bytes."""
        if self.runs and self.nbytes.strides == (0,):
            return self.runs * int(self.nbytes[0])
        return int(self.nbytes.sum())

    def split(self, max_bytes: int, max_runs: int) -> Iterator[CopyBatch]:
        """Consecutive parts of at most `max_runs` runs and `max_bytes` bytes."""
        if 0 < self.runs <= max_runs and self.total <= max_bytes:
            yield CopyBatch(self.src, self.dst, self.nbytes)
            return
        whole = self.cut(max_bytes)
        edge = np.cumsum(whole.nbytes)
        start = 0
        while start < whole.runs:
            before = int(edge[start - 1]) if start else 0
            stop = int(np.searchsorted(edge, before + max_bytes, side="right"))
            stop = min(stop, start + max_runs)
            src, dst, nbytes = (column[start:stop] for column in whole)
            yield CopyBatch(src, dst, nbytes)
            start = stop

    def cut(self, most: int) -> CopyBatch:
        """The same bytes in runs of at most `most` bytes."""
        if not self.runs or int(self.nbytes.max()) <= most:
            return self
        pieces = -(-self.nbytes // most)
        run, piece = ragged(pieces)
        within = piece * most
        src, dst, nbytes = (column[run] for column in self)
        return CopyBatch(src + within, dst + within, np.minimum(nbytes - within, most))


@dataclass(frozen=True, slots=True, eq=False)
class _Pointers:
    """A route, and the pointers at which the buffers of its record pairs begin, `[B]` each."""

    route: Route
    src_base: Ints
    dst_base: Ints

    def within(self, layers: range | None) -> tuple[Ints, Ints]:
        """The pointers of the record pairs of `layers`; of all where that is None."""
        if layers is None:
            return self.src_base, self.dst_base
        inside = self.route.within(layers)
        return self.src_base[inside], self.dst_base[inside]


class Binder:
    """The routes of a plan from one source rank, for any number of requests."""

    def __init__(self, routes: Sequence[Route], source: PoolLayout, dest: PoolLayout) -> None:
        self._source, self._dest = source, dest
        # routes of one shape, such as those of keys and of values, have the same runs
        self._by_shape: dict[object, list[_Pointers]] = {}
        for route in routes:
            pointers = _Pointers(
                route=route,
                src_base=_bases(source, route.src_buffers),
                dst_base=_bases(dest, route.dst_buffers),
            )
            self._by_shape.setdefault(route.shape, []).append(pointers)

    def bind(
        self,
        source_address: RequestAddress,
        dest_address: RequestAddress,
        *,
        tokens: range,
        columns: Columns,
        layers: range | None = None,
        count: Count = Count.KNOWN,
    ) -> CopyBatch:
        """Runs for positions `tokens` of one request, of all layers or of `layers`. See
        TransferPlan.bind.
        """
        total = dest_address.num_tokens
        if tokens.step != 1 or not 0 <= tokens.start <= tokens.stop <= total:
            raise ValueError(f"tokens={tokens}: must be a range of positions within 0 to {total}.")
        for side, layout, address in (
            ("source", self._source, source_address),
            ("destination", self._dest, dest_address),
        ):
            if clash := id_clash(layout, address, columns):
                raise ValueError(f"{side}: {clash}")
        pairs_by_spaces: dict[tuple[str, str, bool], EntryPairs] = {}
        blocks: list[Block] = []
        for alike in self._by_shape.values():
            route = alike[0].route
            moved = _moved(route, tokens, count)
            bases = [(each.route, *each.within(layers)) for each in alike]
            if moved is None or not any(src_base.size for _, src_base, _ in bases):
                continue
            spaces = route.src_space.name, route.dst_space.name, route.packed
            pairs = pairs_by_spaces.get(spaces)
            if pairs is None:
                pair = pair_items if route.packed else pair_entries
                pairs = pairs_by_spaces[spaces] = pair(
                    BlockLookup(route.src_space, self._source, source_address),
                    BlockLookup(route.dst_space, self._dest, dest_address),
                    moved,
                )
            if not pairs.count.size:
                continue
            for runs in _runs(route, pairs, ends=tokens.stop == total):
                nbytes = runs.nbytes
                lengths = frozenset((int(nbytes.min()), int(nbytes.max())))
                of_pair = int(nbytes.sum())
                blocks += [Block(*one, runs, lengths, of_pair) for one in bases if one[1].size]
        return _batch(blocks, columns)


def _batch(blocks: Sequence[Block], columns: Columns) -> CopyBatch:
    """The runs of blocks, one block after the other, in `columns`."""
    lengths = set[int]().union(*(block.lengths for block in blocks))
    src, dst, nbytes = columns.take(sum(block.size for block in blocks))
    shares: dict[int, tuple[Route, int, int]] = {}
    start = 0
    for block in blocks:
        part = slice(start, start + block.size)
        start = part.stop
        pairs, runs = block.src_base.size, block.runs
        shape = pairs, *runs.src.shape
        np.add(block.src_base[:, None, None], runs.src, out=src[part].reshape(shape))
        np.add(block.dst_base[:, None, None], runs.dst, out=dst[part].reshape(shape))
        if len(lengths) > 1:
            nbytes[part].reshape(shape)[...] = runs.nbytes
        _, count, total = shares.get(id(block.route), (block.route, 0, 0))
        shares[id(block.route)] = block.route, count + block.size, total + pairs * block.total
    if len(lengths) == 1:  # one number for all runs: a third less memory to write
        nbytes = np.ndarray(src.shape, np.int64, _LENGTH.pack(lengths.pop()), 0, (0,))
    return CopyBatch(src, dst, nbytes, tuple(shares.values()))


def _moved(route: Route, tokens: range, count: Count) -> range | None:
    """The positions of `tokens` of which a route moves something now."""
    if count is Count.KNOWN:
        return tokens
    unknown = count is Count.UNKNOWN
    if not (route.grows and route.packed):
        return tokens if route.grows == unknown else None
    size = route.dst_space.tokens_per_item
    full = tokens.stop // size * size
    return range(tokens.start, full) if unknown else range(max(tokens.start, full), tokens.stop)


def cost(route: Route, pairs: EntryPairs) -> tuple[int, int]:
    """Runs and bytes that a route moves for these pairs of entries, all of a request."""
    blocks = list(_runs(route, pairs, ends=True)) if pairs.count.size else []
    size = sum(runs.src.size for runs in blocks)
    nbytes = sum(int(runs.nbytes.sum()) for runs in blocks)
    return len(route.src_buffers) * size, len(route.src_buffers) * nbytes


def _bases(layout: PoolLayout, buffers: Sequence[str]) -> Ints:
    """Pointers to the first bytes of some buffers."""
    held = layout.buffer_by_name
    return np.array([held[name].base for name in buffers], dtype=np.int64)


def _runs(route: Route, pairs: EntryPairs, ends: bool) -> Iterator[BoundRuns]:
    """The runs of one record pair. `ends`: the last of the pairs are those of the request's last
    positions.
    """
    src_entries, dst_entries = route.src_entries, route.dst_entries
    if route.linear:
        yield _entry_runs(route, route.chains, pairs.coalesced(src_entries, dst_entries))
        return
    rest = pairs
    if route.whole is not None:
        if ends:
            pairs = _with_whole_tail(route, route.whole, pairs)
        full = (pairs.count == src_entries) & (pairs.src_step == 0) & (pairs.dst_step == 0)
        if full.any():
            yield _whole_runs(route, route.whole, pairs.select(full))
        rest = pairs.select(~full)
    if rest.count.size:
        if route.chains.size:
            yield _entry_runs(route, route.chains, rest)
        if route.singles.size:
            yield _entry_runs(route, route.singles, rest.entries())


def _with_whole_tail(route: Route, whole: Runs, pairs: EntryPairs) -> EntryPairs:
    """The pairs of a request to its end; the last is of all entries of its item where that is
    allowed and cheaper.

    Allowed: the item is the request's last page on the destination, written from its first entry
    on, so the entries that follow are the request's own and dead.
    """
    entries, count = route.dst_entries, int(pairs.count[-1])
    if (
        route.dst_space.kind != "paged"
        or route.dst_space.wraps
        or route.src_space.held != route.dst_space.held
        or count == entries
        or pairs.src_step[-1]
        or pairs.dst_step[-1]
    ):
        return pairs
    live = int(route.chains.nbytes.sum() + ((count - 1) * route.chains.dst_step).sum())
    live += count * int(route.singles.nbytes.sum())
    runs, dead = route.chains.size + count * route.singles.size, int(whole.nbytes.sum()) - live
    if 2 * whole.size > runs or dead > (runs - whole.size) * BYTES_PER_RUN:
        return pairs
    counts = pairs.count.copy()
    counts[-1] = entries
    return replace(pairs, count=counts)


def _whole_runs(route: Route, whole: Runs, pairs: EntryPairs) -> BoundRuns:
    spread = np.zeros_like(pairs.count)
    if route.dense:
        pairs = pairs.coalesced(entries := route.src_entries, entries)
        spread = (pairs.count // entries - 1) * route.src_stride
    return BoundRuns(
        whole.src[:, None] + pairs.src_item * route.src_stride,
        whole.dst[:, None] + pairs.dst_item * route.dst_stride,
        whole.nbytes[:, None] + spread,
    )


def _entry_runs(route: Route, runs: EntryRuns, pairs: EntryPairs) -> BoundRuns:
    src_step, dst_step = runs.src_step[:, None], runs.dst_step[:, None]
    return BoundRuns(
        runs.src[:, None] + pairs.src_item * route.src_stride + pairs.src_step * src_step,
        runs.dst[:, None] + pairs.dst_item * route.dst_stride + pairs.dst_step * dst_step,
        runs.nbytes[:, None] + (pairs.count - 1) * dst_step,
    )
