"""Binds a plan's routes to one request: arrays of source pointers, destination pointers and
lengths, without a Python object per run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from disagg.plan.block_pools import id_clash
from disagg.plan.positions import BlockLookup, EntryPairs, pair_entries
from disagg.plan.runs import EntryRuns, Route, Runs
from kvpool.layout import PoolLayout, RequestAddress
from kvpool.layout.grid import Ints, ragged


class Block(NamedTuple):
    """Runs of a route: `[A]` runs of an item or entry at each of `[F]` steps of the request, for
    each of the route's `[B]` record pairs.

    `src`, `dst` and `nbytes` are offsets from a pair's bases and lengths, `[A, F]`; a batch holds
    the block's runs in the order `[B, A, F]`.
    """

    route: Route
    src: Ints
    dst: Ints
    nbytes: Ints

    @property
    def runs(self) -> int:
        """Number of runs."""
        return self.route.src_base.size * self.src.size

    @property
    def total(self) -> int:
        """Total bytes."""
        return self.route.src_base.size * int(self.nbytes.sum())


@dataclass(frozen=True, slots=True, eq=False)
class CopyBatch:
    """Source pointers, destination pointers and lengths in bytes, int64 `[N]` each.

    Equal lengths are one number, broadcast and read-only. `shares` are the runs and bytes of each
    route, of a batch that `bind` returned; its parts have none.
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
        return int(self.nbytes.sum())

    def split(self, max_bytes: int, max_runs: int) -> Iterator[CopyBatch]:
        """Consecutive parts of at most `max_runs` runs and `max_bytes` bytes."""
        whole = self._cut(max_bytes)
        edge = np.cumsum(whole.nbytes)
        start = 0
        while start < whole.runs:
            before = int(edge[start - 1]) if start else 0
            stop = int(np.searchsorted(edge, before + max_bytes, side="right"))
            stop = min(stop, start + max_runs)
            src, dst, nbytes = (column[start:stop] for column in whole)
            yield CopyBatch(src, dst, nbytes)
            start = stop

    def _cut(self, most: int) -> CopyBatch:
        """The same bytes in runs of at most `most` bytes."""
        if not self.runs or int(self.nbytes.max()) <= most:
            return self
        pieces = -(-self.nbytes // most)
        run, piece = ragged(pieces)
        within = piece * most
        src, dst, nbytes = (column[run] for column in self)
        return CopyBatch(src + within, dst + within, np.minimum(nbytes - within, most))


class Columns:
    """Reused memory for batches: page faults of fresh arrays cost more than filling them."""

    def __init__(self) -> None:
        self._held = np.empty((3, 0), dtype=np.int64)

    def take(self, size: int) -> npt.NDArray[np.int64]:
        """Columns `[3, size]`, valid until the next call."""
        if self._held.shape[1] < size:
            self._held = np.empty((3, max(size, 2 * self._held.shape[1])), dtype=np.int64)
        return self._held[:, :size]


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
            f"tokens={tokens}: must be a range of positions within 0 to {dest_address.num_tokens}."
        )
    for who, layout, address in (
        ("source", source, source_address),
        ("destination", dest, dest_address),
    ):
        if clash := id_clash(layout, address, columns):
            raise ValueError(f"{who}: {clash}")
    pairs: dict[tuple[str, str], EntryPairs] = {}
    blocks: list[Block] = []
    for route in routes:
        pair = route.src_space.name, route.dst_space.name
        if pair not in pairs:
            pairs[pair] = pair_entries(
                BlockLookup(route.src_space, source, source_address),
                BlockLookup(route.dst_space, dest, dest_address),
                tokens,
            )
        if pairs[pair].count.size:
            blocks.extend(_blocks(route, pairs[pair]))
    lengths = {int(edge) for b in blocks for edge in (b.nbytes.min(), b.nbytes.max())}
    out = columns.take(sum(block.runs for block in blocks))
    start = 0
    for block in blocks:
        route, stop = block.route, start + block.runs
        shape = (route.src_base.size, *block.src.shape)
        for column, bases, more in ((0, route.src_base, block.src), (1, route.dst_base, block.dst)):
            np.add(bases[:, None, None], more, out=out[column, start:stop].reshape(shape))
        if len(lengths) > 1:
            out[2, start:stop].reshape(shape)[...] = block.nbytes
        start = stop
    nbytes: Ints = out[2]
    if len(lengths) == 1:  # one number for all: a third less memory to write
        nbytes = np.broadcast_to(np.int64(lengths.pop()), start)
    shares = tuple((block.route, block.runs, block.total) for block in blocks)
    return CopyBatch(out[0], out[1], nbytes, shares)


def cost(route: Route, pairs: EntryPairs) -> tuple[int, int]:
    """Runs and bytes that a route moves for these pairs of entries."""
    blocks = list(_blocks(route, pairs)) if pairs.count.size else []
    return sum(block.runs for block in blocks), sum(block.total for block in blocks)


def _blocks(route: Route, pairs: EntryPairs) -> Iterator[Block]:
    src_entries, dst_entries = route.src_space.entries_per_item, route.dst_space.entries_per_item
    if route.linear:
        yield _entry_block(route, route.chains, pairs.coalesced(src_entries, dst_entries))
        return
    rest = pairs
    if route.whole is not None:
        full = (pairs.count == src_entries) & (pairs.src_step == 0) & (pairs.dst_step == 0)
        if full.any():
            yield _whole_block(route, route.whole, pairs.select(full))
        rest = pairs.select(~full)
    if rest.count.size:
        if route.chains.size:
            yield _entry_block(route, route.chains, rest)
        if route.singles.size:
            yield _entry_block(route, route.singles, rest.entries())


def _whole_block(route: Route, whole: Runs, pairs: EntryPairs) -> Block:
    spread = np.zeros_like(pairs.count)
    if route.dense:
        pairs = pairs.coalesced(entries := route.src_space.entries_per_item, entries)
        spread = (pairs.count // entries - 1) * route.src_stride
    return Block(
        route,
        whole.src[:, None] + pairs.src_item * route.src_stride,
        whole.dst[:, None] + pairs.dst_item * route.dst_stride,
        whole.nbytes[:, None] + spread,
    )


def _entry_block(route: Route, runs: EntryRuns, pairs: EntryPairs) -> Block:
    src_step, dst_step = runs.src_step[:, None], runs.dst_step[:, None]
    return Block(
        route,
        runs.src[:, None] + pairs.src_item * route.src_stride + pairs.src_step * src_step,
        runs.dst[:, None] + pairs.dst_item * route.dst_stride + pairs.dst_step * dst_step,
        runs.nbytes[:, None] + (pairs.count - 1) * dst_step,
    )
