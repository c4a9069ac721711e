"""Binds a plan's routes to one request: arrays of pointers and lengths, no object per run."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from disagg.plan.positions import BlockLookup, EntryPairs, Stretch, pair_entries
from disagg.plan.runs import Route, Runs
from kvpool.layout import PoolLayout, RequestAddress
from kvpool.layout.grid import Ints, ragged, rows_of

_LENGTH = struct.Struct("q")
_ONE = np.ones((2, 1), np.int64)
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
    """A runs at F steps: their offsets in both buffers of a record pair `[2, 1, A, F]`, and bytes
    `[A, F]`.
    """

    offset: Ints
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


class _Shape:
    """Routes of one shape, such as those of keys and of values, which have the same runs. `sizes`
    are their numbers of record pairs, `layers` the pairs' layers `[B]`.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes, self.route = routes, routes[0]
        self.sizes = [len(route.src.buffers) for route in routes]
        self.layers = np.concatenate([route.layers for route in routes])
        sides = self.route.src, self.route.dst
        self.spaces = sides[0].space.name, sides[1].space.name, self.route.packed
        self.strides = sides[0].stride, sides[1].stride
        # the same for arrays of pairs
        self.stride = np.array([[stride] for stride in self.strides])
        self.entries = np.array([[side.entries] for side in sides])
        chains, singles, whole, *_ = self.route.runs
        self.first_bytes = int(chains.nbytes.sum() + singles.nbytes.sum())
        self.next_bytes = int(chains.step[1].sum() + singles.nbytes.sum())
        """Of an entry, and of each that follows it in an item."""
        self.whole_bytes = 0 if whole is None else int(whole.nbytes.sum())
        src, dst = (side.space for side in sides)
        # of a ring the entries behind the last may be alive
        self.whole_tails = not dst.wraps and src.held == dst.held

    def within(self, layers: range) -> tuple[npt.NDArray[np.bool_], list[int]]:
        """Which record pairs are of a range of layers, `[B]`, and how many of each route."""
        inside = (self.layers >= layers.start) & (self.layers < layers.stop)
        of_routes = np.split(inside, np.cumsum(self.sizes)[:-1])
        return inside, [int(part.sum()) for part in of_routes]

    def runs(self, pairs: EntryPairs | Stretch, ends: bool) -> Iterator[BoundRuns]:
        """The runs of one record pair. `ends`: the last pairs are those of the last positions."""
        chains, singles, whole, linear, dense = self.route.runs
        if isinstance(pairs, Stretch):
            if whole is not None and not linear and self._moves_whole(whole, pairs, ends):
                yield self._bound_stretch(whole, pairs._replace(length=1))
                return
            if pairs.length == 1 or not singles.size:
                for runs in (chains, singles):
                    if runs.size:
                        yield self._bound_stretch(runs, pairs)
                return
            pairs = pairs.pairs()
        if not pairs.count.size:
            return
        if linear:
            yield self._bound(chains, pairs.coalesced(self.entries))
            return
        rest = pairs
        if whole is not None:
            aligned = (pairs.step[0] | pairs.step[1]) == 0
            full = aligned & (pairs.count == self.route.src.entries)
            if ends and self.whole_tails and aligned[-1] and not full[-1]:
                full[-1] = self._whole_tail_is_cheaper(whole, int(pairs.count[-1]))
            number = np.count_nonzero(full)
            if number:
                items = pairs if number == full.size else rows_of(pairs, full)
                # from here on an item is one entry
                ones = np.ones(number, np.int64)
                items = EntryPairs(item=items.item, step=items.step, count=ones)
                yield self._bound(whole, items.coalesced(_ONE) if dense else items)
            if number == full.size:
                return
            rest = rows_of(pairs, ~full) if number else pairs
        if chains.size and rest.count.size:
            yield self._bound(chains, rest)
        if singles.size and rest.count.size:
            yield self._bound(singles, rest.entries())

    def _moves_whole(self, whole: Runs, stretch: Stretch, ends: bool) -> bool:
        """Whether a stretch is all of its items, or may be taken for it."""
        if any(stretch.step):
            return False
        tail = ends and self.whole_tails
        return stretch.length == self.route.src.entries or (
            tail and self._whole_tail_is_cheaper(whole, stretch.length)
        )

    def _whole_tail_is_cheaper(self, whole: Runs, count: int) -> bool:
        """Whether a request's last item, of which `count` entries are alive from the first on,
        moves with all of its entries.

        Allowed: the item is the request's last page on the destination, so the entries that follow
        are the request's own and dead.
        """
        chains, singles, *_ = self.route.runs
        runs = chains.size + count * singles.size
        dead = self.whole_bytes - self.first_bytes - (count - 1) * self.next_bytes
        return 2 * whole.size <= runs and dead <= (runs - whole.size) * BYTES_PER_RUN

    def _bound_stretch(self, runs: Runs, stretch: Stretch) -> BoundRuns:
        item = [[[[number * stride]]] for number, stride in zip(stretch.item, self.strides)]
        offset = runs.start[:, None, :, None] + np.array(item)
        if any(stretch.step):
            offset += np.array(stretch.step)[:, None, None, None] * runs.step[:, None, :, None]
        nbytes = runs.nbytes
        if stretch.length > 1:
            nbytes = nbytes + (stretch.length - 1) * runs.step[1]
        return BoundRuns(offset, nbytes[:, None])

    def _bound(self, runs: Runs, pairs: EntryPairs) -> BoundRuns:
        offset = runs.start[:, None, :, None] + (pairs.item * self.stride)[:, None, None]
        offset += pairs.step[:, None, None] * runs.step[:, None, :, None]
        more = (pairs.count - 1) * runs.step[1, :, None]
        return BoundRuns(offset, runs.nbytes[:, None] + more)


class Binder:
    """The routes of a plan from one source rank, for any number of requests."""

    def __init__(self, routes: Sequence[Route], source: PoolLayout, dest: PoolLayout) -> None:
        self._source, self._dest = source, dest
        by_shape: dict[object, list[Route]] = {}
        for route in routes:
            by_shape.setdefault(route.shape, []).append(route)
        self._shapes: list[tuple[_Shape, Ints]] = []
        """With the pointers at which both buffers of their record pairs begin, `[2, B]`."""
        for alike in by_shape.values():
            base = [
                [source.buffer_by_name[name].base for r in alike for name in r.src.buffers],
                [dest.buffer_by_name[name].base for r in alike for name in r.dst.buffers],
            ]
            self._shapes.append((_Shape(alike), np.array(base, np.int64)))

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
        pairs_by_spaces: dict[tuple[str, str, bool], EntryPairs | Stretch] = {}
        blocks: list[_Block] = []
        for shape, base in self._shapes:
            route, sizes = shape.route, shape.sizes
            moved = _moved(route, tokens, count)
            if layers is not None:
                inside, sizes = shape.within(layers)
                base = base[:, inside]
            if moved is None or not base.size:
                continue
            pairs = pairs_by_spaces.get(shape.spaces)
            if pairs is None:
                pairs = pairs_by_spaces[shape.spaces] = pair_entries(
                    BlockLookup(route.src.space, self._source, source_address, "source"),
                    BlockLookup(route.dst.space, self._dest, dest_address, "destination"),
                    moved,
                    packed=route.packed,
                )
            for runs in shape.runs(pairs, ends=tokens.stop == total):
                blocks.append(_Block(shape.routes, sizes, base, runs))
        return _batch(blocks)


class _Block(NamedTuple):
    """Runs of one record pair, and how many pairs of which routes begin at `base` `[2, B]`."""

    routes: Sequence[Route]
    sizes: Sequence[int]
    base: Ints
    runs: BoundRuns


def _batch(blocks: Sequence[_Block]) -> CopyBatch:
    """Runs at each record pair of routes of one shape, `[B, A, F]`, one block after the other."""
    size = sum(base.shape[1] * runs.nbytes.size for _, _, base, runs in blocks)
    lengths = {runs.nbytes.item(0) for _, _, _, runs in blocks}
    alike = len(lengths) == 1 and all((runs.nbytes == [*lengths]).all() for *_, runs in blocks)
    # one allocation: of several, glibc gives the memory back at once, and takes page faults again
    columns = np.empty((2 if alike else 3, size), dtype=np.int64)
    pointers, nbytes = columns[:2], columns[-1]
    if alike:  # one number for all runs: a third less memory to write
        nbytes = np.ndarray(size, np.int64, _LENGTH.pack(lengths.pop()), 0, (0,))
    shares: dict[int, tuple[Route, int, int]] = {}
    start = 0
    for routes, sizes, base, runs in blocks:
        shape, number = (base.shape[1], *runs.nbytes.shape), runs.nbytes.size
        stop = start + base.shape[1] * number
        out = pointers[:, start:stop].reshape((2, *shape))
        np.add(base[:, :, None, None], runs.offset, out=out)
        if not alike:
            nbytes[start:stop].reshape(shape)[...] = runs.nbytes
        start = stop
        bound = int(np.add.reduce(runs.nbytes, axis=None)) if number > 1 else runs.nbytes.item()
        for route, pairs in zip(routes, sizes):
            if pairs:
                _, count, total = shares.get(id(route), (route, 0, 0))
                shares[id(route)] = route, count + pairs * number, total + pairs * bound
    return CopyBatch(pointers[0], pointers[1], nbytes, tuple(shares.values()))


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
    lengths = [runs.nbytes for runs in _Shape([route]).runs(pairs, ends=True)]
    records = len(route.src.buffers)
    return records * sum(n.size for n in lengths), records * sum(int(n.sum()) for n in lengths)
