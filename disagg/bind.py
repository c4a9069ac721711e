"""A plan's routes and one request's walks, as arrays of source address, destination and length.

Nothing here is a Python object per run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from disagg.route import EntryRuns, Ints, Route
from disagg.walk import End, IncompleteTransfer, Walk, walk
from kvpool.layout import PoolLayout, RequestAddress

__all__ = ["Columns", "CopyBatch", "IncompleteTransfer", "bind", "cost"]


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
        """Consecutive parts of at most `max_runs` runs and `max_bytes` bytes."""
        src, dst, nbytes = self._cut(max_bytes)
        edge = np.cumsum(nbytes)
        start = 0
        while start < src.size:
            before = int(edge[start - 1]) if start else 0
            stop = int(np.searchsorted(edge, before + max_bytes, side="right"))
            stop = min(stop, start + max_runs)
            yield CopyBatch(src[start:stop], dst[start:stop], nbytes[start:stop])
            start = stop

    def _cut(self, most: int) -> CopyBatch:
        """The same bytes in runs of at most `most`."""
        if not self.runs or int(self.nbytes.max()) <= most:
            return self
        pieces = -(-self.nbytes // most)
        within = np.arange(int(pieces.sum()), dtype=np.int64)
        within = (within - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
        src, dst, nbytes = (np.repeat(column, pieces) for column in self)
        return CopyBatch(src + within, dst + within, np.minimum(nbytes - within, most))


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
            walks[pair] = walk(
                End(route.src_space, source, source_address),
                End(route.dst_space, dest, dest_address),
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


def cost(route: Route, walk: Walk) -> tuple[int, int]:
    """Runs and bytes that a route moves for a walk."""
    blocks = list(_blocks(route, walk)) if walk.count.size else []
    pairs = route.src_base.size
    return pairs * sum(b.src.size for b in blocks), pairs * sum(int(b.nbytes.sum()) for b in blocks)


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
