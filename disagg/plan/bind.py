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
import numpy.typing as npt

from disagg.plan.block_pools import id_clash
from disagg.plan.columns import Columns
from disagg.plan.native import Program, availability
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


class Block(NamedTuple):
    """Runs of a route: `[A]` runs of an item or entry at each of `[F]` steps of the request, for
    each of `[B]` of its record pairs, whose bases are given.

    `src`, `dst` and `nbytes` are offsets from a pair's bases and lengths, `[A, F]`; a batch holds
    the block's runs in the order `[B, A, F]`.
    """

    route: Route
    src_base: Ints
    dst_base: Ints
    src: Ints
    dst: Ints
    nbytes: Ints

    @property
    def runs(self) -> int:
        """Number of runs."""
        return self.src_base.size * self.src.size

    @property
    def total(self) -> int:
        """Total bytes."""
        return self.src_base.size * int(self.nbytes.sum())


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


class Binder:
    """The routes of a plan from one source rank, for any number of requests.

    Runs are made outside Python where that was compiled and both sides hold the same positions
    (`disagg.plan.native`), else by numpy; what is wrong with a request is always said here.
    """

    def __init__(self, routes: Sequence[Route], source: PoolLayout, dest: PoolLayout) -> None:
        self._routes, self._source, self._dest = tuple(routes), source, dest
        self._bases = [
            (_bases(source, each.src_buffers), _bases(dest, each.dst_buffers)) for each in routes
        ]
        self._program: Program | None = None
        alike = all(each.src_space.held == each.dst_space.held for each in routes)
        if routes and alike and availability() is None:
            self._program = Program(self._routes, self._bases, source, dest)

    def bind(
        self,
        source_address: RequestAddress,
        dest_address: RequestAddress,
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
        for who, layout, address in (
            ("source", self._source, source_address),
            ("destination", self._dest, dest_address),
        ):
            if clash := id_clash(layout, address, columns):
                raise ValueError(f"{who}: {clash}")
        about = source_address, dest_address, tokens, layers
        if self._program is not None:
            bound = self._program.bind(*about, count.value, columns)
            if bound is not None:
                return _batch(columns.take(bound.runs), bound.length, bound.shares)
        return self._plain(*about, columns, count)

    def _plain(
        self,
        source_address: RequestAddress,
        dest_address: RequestAddress,
        tokens: range,
        layers: range | None,
        columns: Columns,
        count: Count,
    ) -> CopyBatch:
        ends = tokens.stop == dest_address.num_tokens
        pairs: dict[tuple[str, str, bool], EntryPairs] = {}
        blocks: list[Block] = []
        for route, bases in zip(self._routes, self._bases):
            moved = _moved(route, tokens, count)
            if moved is None:
                continue
            if layers is not None:
                inside = route.within(layers)
                if not inside.any():
                    continue
                bases = bases[0][inside], bases[1][inside]
            pair = route.src_space.name, route.dst_space.name, route.packed
            if pair not in pairs:
                pairs[pair] = (pair_items if route.packed else pair_entries)(
                    BlockLookup(route.src_space, self._source, source_address),
                    BlockLookup(route.dst_space, self._dest, dest_address),
                    moved,
                )
            if pairs[pair].count.size:
                found = _runs(route, pairs[pair], ends)
                blocks.extend(Block(route, *bases, *runs) for runs in found)
        lengths = {int(edge) for b in blocks for edge in (b.nbytes.min(), b.nbytes.max())}
        out = columns.take(sum(block.runs for block in blocks))
        start = 0
        shares: dict[int, tuple[Route, int, int]] = {}
        for block in blocks:
            stop = start + block.runs
            shape = (block.src_base.size, *block.src.shape)
            for column, base, more in (
                (0, block.src_base, block.src),
                (1, block.dst_base, block.dst),
            ):
                np.add(base[:, None, None], more, out=out[column, start:stop].reshape(shape))
            if len(lengths) > 1:
                out[2, start:stop].reshape(shape)[...] = block.nbytes
            start = stop
            _, runs, nbytes = shares.get(id(block.route), (None, 0, 0))
            shares[id(block.route)] = block.route, runs + block.runs, nbytes + block.total
        length = lengths.pop() if len(lengths) == 1 else -1
        return _batch(out, length, tuple(shares.values()))


def _batch(
    columns: npt.NDArray[np.int64], length: int, shares: tuple[tuple[Route, int, int], ...]
) -> CopyBatch:
    """A batch of runs in columns `[3, N]`, all of `length` bytes unless that is -1."""
    src, dst, nbytes = columns
    if length >= 0:  # one number for all: a third less memory to write
        nbytes = np.ndarray(src.shape, np.int64, _LENGTH.pack(length), 0, (0,))
    return CopyBatch(src, dst, nbytes, shares)


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
    found = list(_runs(route, pairs, ends=True)) if pairs.count.size else []
    runs = sum(src.size for src, _, _ in found)
    nbytes = sum(int(lengths.sum()) for _, _, lengths in found)
    return len(route.src_buffers) * runs, len(route.src_buffers) * nbytes


def _bases(layout: PoolLayout, buffers: Sequence[str]) -> Ints:
    """Pointers to the first bytes of some buffers."""
    held = layout.buffer_by_name
    return np.array([held[name].base for name in buffers], dtype=np.int64)


def _runs(route: Route, pairs: EntryPairs, ends: bool) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Offsets of runs on both sides and their lengths, `[A, F]` each. `ends`: the last of the pairs
    are those of the request's last positions.
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


def _whole_runs(route: Route, whole: Runs, pairs: EntryPairs) -> tuple[Ints, Ints, Ints]:
    spread = np.zeros_like(pairs.count)
    if route.dense:
        pairs = pairs.coalesced(entries := route.src_entries, entries)
        spread = (pairs.count // entries - 1) * route.src_stride
    return (
        whole.src[:, None] + pairs.src_item * route.src_stride,
        whole.dst[:, None] + pairs.dst_item * route.dst_stride,
        whole.nbytes[:, None] + spread,
    )


def _entry_runs(route: Route, runs: EntryRuns, pairs: EntryPairs) -> tuple[Ints, Ints, Ints]:
    src_step, dst_step = runs.src_step[:, None], runs.dst_step[:, None]
    return (
        runs.src[:, None] + pairs.src_item * route.src_stride + pairs.src_step * src_step,
        runs.dst[:, None] + pairs.dst_item * route.dst_stride + pairs.dst_step * dst_step,
        runs.nbytes[:, None] + (pairs.count - 1) * dst_step,
    )
