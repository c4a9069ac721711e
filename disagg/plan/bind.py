"""Binds a plan's routes to one request: arrays of source pointers, destination pointers and
lengths, without a Python object per run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from disagg.plan.block_pools import id_clash
from disagg.plan.positions import BlockLookup, EntryPairs, pair_entries, pair_items
from disagg.plan.runs import EntryRuns, Route, Runs
from kvpool.layout import PoolLayout, RequestAddress
from kvpool.layout.grid import Ints, ragged

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
        if 0 < self.runs <= max_runs and self.total <= max_bytes:
            yield CopyBatch(self.src, self.dst, self.nbytes)
            return
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
    layers: range | None = None,
    count: Count = Count.KNOWN,
) -> CopyBatch:
    """Runs of `routes` for positions `tokens` of one request, of all their layers or of `layers`.
    See TransferPlan.bind.
    """
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
    ends = tokens.stop == dest_address.num_tokens
    pairs: dict[tuple[str, str, bool], EntryPairs] = {}
    blocks: list[Block] = []
    for route in routes:
        moved = _moved(route, tokens, count)
        if moved is None:
            continue
        bases = route.src_base, route.dst_base
        if layers is not None:
            inside = route.within(layers)
            if not inside.any():
                continue
            bases = route.src_base[inside], route.dst_base[inside]
        pair = route.src_space.name, route.dst_space.name, route.packed
        if pair not in pairs:
            pairs[pair] = (pair_items if route.packed else pair_entries)(
                BlockLookup(route.src_space, source, source_address),
                BlockLookup(route.dst_space, dest, dest_address),
                moved,
            )
        if pairs[pair].count.size:
            blocks.extend(_blocks(route, bases, pairs[pair], ends))
    lengths = {int(edge) for b in blocks for edge in (b.nbytes.min(), b.nbytes.max())}
    out = columns.take(sum(block.runs for block in blocks))
    start = 0
    for block in blocks:
        stop = start + block.runs
        shape = (block.src_base.size, *block.src.shape)
        for column, base, more in ((0, block.src_base, block.src), (1, block.dst_base, block.dst)):
            np.add(base[:, None, None], more, out=out[column, start:stop].reshape(shape))
        if len(lengths) > 1:
            out[2, start:stop].reshape(shape)[...] = block.nbytes
        start = stop
    nbytes: Ints = out[2]
    if len(lengths) == 1:  # one number for all: a third less memory to write
        nbytes = np.broadcast_to(np.int64(lengths.pop()), start)
    shares = tuple((block.route, block.runs, block.total) for block in blocks)
    return CopyBatch(out[0], out[1], nbytes, shares)


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
    bases = route.src_base, route.dst_base
    blocks = list(_blocks(route, bases, pairs, ends=True)) if pairs.count.size else []
    return sum(block.runs for block in blocks), sum(block.total for block in blocks)


def _blocks(
    route: Route, bases: tuple[Ints, Ints], pairs: EntryPairs, ends: bool
) -> Iterator[Block]:
    """`ends`: the last of the pairs are those of the request's last positions."""
    for runs in _runs(route, pairs, ends):
        yield Block(route, *bases, *runs)


def _runs(route: Route, pairs: EntryPairs, ends: bool) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Offsets of runs on both sides and their lengths, `[A, F]` each."""
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
