"""Binds a plan's routes to one request: arrays of pointers and lengths, no object per run."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import numpy as np

from disagg.plan.positions import BlockLookup, EntryPairs, pair_entries
from disagg.plan.runs import Route, Runs
from kvpool.layout import PoolLayout, RequestAddress
from kvpool.layout.grid import Ints, ragged, rows_of

_LENGTH = struct.Struct("q")
BYTES_PER_RUN = 4096
"""Dead bytes of a last page that may travel for each run saved; at least half must be saved."""


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
    """The rest, to the request's end: windows, slots, rings, the last packed item if not full."""


class BoundRuns(NamedTuple):
    """Offsets from a pair's bases and lengths in bytes, `[A, F]` each: A runs at F steps each."""

    src: Ints
    dst: Ints
    nbytes: Ints


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
        return self.src.size

    @property
    def total(self) -> int:
        if self.runs and self.nbytes.strides == (0,):
            return self.runs * int(self.nbytes[0])
        return int(self.nbytes.sum())

    def split(self, max_bytes: int, max_runs: int) -> Iterator[CopyBatch]:
        """Consecutive parts of at most `max_runs` runs and `max_bytes` bytes."""
        if 0 < self.runs <= max_runs and self.total <= max_bytes:
            yield CopyBatch(self.src, self.dst, self.nbytes)
            return
        whole = self.cut(max_bytes)
        edges = np.append(0, np.cumsum(whole.nbytes))
        start = 0
        while start < whole.runs:
            stop = int(np.searchsorted(edges, edges[start] + max_bytes, side="right")) - 1
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


class _Pointers(NamedTuple):
    """A route, and the pointers at which the buffers of its record pairs begin, `[B]` each."""

    route: Route
    src_base: Ints
    dst_base: Ints

    def within(self, layers: range | None) -> _Pointers:
        """The record pairs of `layers`; all where that is None."""
        if layers is None:
            return self
        inside = self.route.within(layers)
        return _Pointers(self.route, self.src_base[inside], self.dst_base[inside])


class Binder:
    """The routes of a plan from one source rank, for any number of requests."""

    def __init__(self, routes: Sequence[Route], source: PoolLayout, dest: PoolLayout) -> None:
        self._source, self._dest = source, dest
        # routes of one shape, such as those of keys and of values, have the same runs
        self._by_shape: dict[object, list[_Pointers]] = {}
        for route in routes:
            src_base, dst_base = (
                np.array([layout.buffer_by_name[name].base for name in side.buffers], np.int64)
                for layout, side in ((source, route.src), (dest, route.dst))
            )
            self._by_shape.setdefault(route.shape, []).append(_Pointers(route, src_base, dst_base))

    def bind(
        self,
        source_address: RequestAddress,
        dest_address: RequestAddress,
        *,
        tokens: range,
        layers: range | None = None,
        count: Count = Count.KNOWN,
    ) -> CopyBatch:
        """Runs for positions `tokens`, of all layers or of `layers`: see TransferPlan.bind."""
        total = dest_address.num_tokens
        if tokens.step != 1 or not 0 <= tokens.start <= tokens.stop <= total:
            raise ValueError(f"tokens={tokens}: must be a range of positions within 0 to {total}.")
        pairs_by_spaces: dict[tuple[str, str, bool], EntryPairs] = {}
        blocks: list[tuple[list[_Pointers], BoundRuns]] = []
        for shape in self._by_shape.values():
            route = shape[0].route
            moved = _moved(route, tokens, count)
            routes = [part for part in (p.within(layers) for p in shape) if part.src_base.size]
            if moved is None or not routes:
                continue
            spaces = route.src.space.name, route.dst.space.name, route.packed
            pairs = pairs_by_spaces.get(spaces)
            if pairs is None:
                pairs = pairs_by_spaces[spaces] = pair_entries(
                    BlockLookup(route.src.space, self._source, source_address, "source"),
                    BlockLookup(route.dst.space, self._dest, dest_address, "destination"),
                    moved,
                    packed=route.packed,
                )
            blocks += [(routes, runs) for runs in _runs(route, pairs, ends=tokens.stop == total)]
        return _batch(blocks)


def _batch(blocks: Sequence[tuple[Sequence[_Pointers], BoundRuns]]) -> CopyBatch:
    """Runs at each record pair of routes of one shape, `[B, A, F]`, one block after the other."""
    size = sum(p.src_base.size * runs.src.size for routes, runs in blocks for p in routes)
    edges = {int(edge) for _, runs in blocks for edge in (runs.nbytes.min(), runs.nbytes.max())}
    # one allocation: of several, glibc gives the memory back at once, and takes page faults again
    columns = np.empty((2 if len(edges) == 1 else 3, size), dtype=np.int64)
    src, dst = columns[:2]
    if len(edges) == 1:  # one number for all runs: a third less memory to write
        nbytes = np.ndarray(src.shape, np.int64, _LENGTH.pack(edges.pop()), 0, (0,))
    else:
        nbytes = columns[-1]
    shares: dict[int, tuple[Route, int, int]] = {}
    start = 0
    for routes, runs in blocks:
        bound = int(runs.nbytes.sum())
        for route, src_base, dst_base in routes:
            pairs, count = src_base.size, src_base.size * runs.src.size
            part, shape = slice(start, start + count), (pairs, *runs.src.shape)
            start = part.stop
            np.add(src_base[:, None, None], runs.src, out=src[part].reshape(shape))
            np.add(dst_base[:, None, None], runs.dst, out=dst[part].reshape(shape))
            if nbytes.strides != (0,):
                nbytes[part].reshape(shape)[...] = runs.nbytes
            _, number, total = shares.get(id(route), (route, 0, 0))
            shares[id(route)] = route, number + count, total + pairs * bound
    return CopyBatch(src, dst, nbytes, tuple(shares.values()))


def _moved(route: Route, tokens: range, count: Count) -> range | None:
    """The positions of `tokens` of which a route moves something now."""
    if count is Count.KNOWN:
        return tokens
    unknown = count is Count.UNKNOWN
    if not (route.grows and route.packed):
        return tokens if route.grows == unknown else None
    size = route.dst.space.tokens_per_item
    full = tokens.stop // size * size
    return range(tokens.start, full) if unknown else range(max(tokens.start, full), tokens.stop)


def cost(route: Route, pairs: EntryPairs) -> tuple[int, int]:
    """Runs and bytes that a route moves for these pairs of entries, all of a request."""
    bound = list(_runs(route, pairs, ends=True))
    size = sum(runs.src.size for runs in bound)
    nbytes = sum(int(runs.nbytes.sum()) for runs in bound)
    return len(route.src.buffers) * size, len(route.src.buffers) * nbytes


def _runs(route: Route, pairs: EntryPairs, ends: bool) -> Iterator[BoundRuns]:
    """The runs of one record pair. `ends`: the last pairs are those of the last positions."""
    src_entries, dst_entries = route.src.entries, route.dst.entries
    chains, singles, whole, linear, dense = route.runs
    if not pairs.count.size:
        return
    if linear:
        yield _bound(route, chains, pairs.coalesced(src_entries, dst_entries))
        return
    rest = pairs
    if whole is not None:
        if ends:
            pairs = _with_whole_tail(route, whole, pairs)
        full = (pairs.count == src_entries) & (pairs.src_step == 0) & (pairs.dst_step == 0)
        if full.any():
            items = rows_of(pairs, full)
            items = items.coalesced(src_entries, src_entries) if dense else items
            yield _bound(route, whole, replace(items, count=items.count // src_entries))
        rest = rows_of(pairs, ~full)
    if rest.count.size:
        if chains.size:
            yield _bound(route, chains, rest)
        if singles.size:
            yield _bound(route, singles, rest.entries())


def _with_whole_tail(route: Route, whole: Runs, pairs: EntryPairs) -> EntryPairs:
    """The pairs of a request to its end; the last is of all entries of its item where that is
    allowed and cheaper.

    Allowed: the item is the request's last page on the destination, written from its first entry
    on, so the entries that follow are the request's own and dead. Of a ring they may be alive.
    """
    entries, count = route.dst.entries, int(pairs.count[-1])
    chains, singles = route.runs.chains, route.runs.singles
    if (
        route.dst.space.wraps
        or route.src.space.held != route.dst.space.held
        or count == entries
        or pairs.src_step[-1]
        or pairs.dst_step[-1]
    ):
        return pairs
    live = int(chains.nbytes.sum() + ((count - 1) * chains.dst_step).sum())
    live += count * int(singles.nbytes.sum())
    runs, dead = chains.size + count * singles.size, int(whole.nbytes.sum()) - live
    if 2 * whole.size > runs or dead > (runs - whole.size) * BYTES_PER_RUN:
        return pairs
    counts = pairs.count.copy()
    counts[-1] = entries
    return replace(pairs, count=counts)


def _bound(route: Route, runs: Runs, pairs: EntryPairs) -> BoundRuns:
    src_step, dst_step = runs.src_step[:, None], runs.dst_step[:, None]
    return BoundRuns(
        runs.src[:, None] + pairs.src_item * route.src.stride + pairs.src_step * src_step,
        runs.dst[:, None] + pairs.dst_item * route.dst.stride + pairs.dst_step * dst_step,
        runs.nbytes[:, None] + (pairs.count - 1) * dst_step,
    )
