"""Binds chunks of requests to objects. The runs of a whole chunk are found once: those of another
differ only by the items that its block table lists, and each pointer goes up with the id of one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from disagg.plan import CopyBatch, TransferPlan
from disagg.store.chunks import ChunkLayout
from kvpool.layout import PoolLayout, RequestAddress, Span
from kvpool.layout.grid import Ints

PoolEnd = Literal["src", "dst"]
MOST_RUNS = 1 << 20
"""Of a chunk, for which they are kept: three numbers each."""


class ChunkBinder:
    """The runs between a request's items, which are `side` of the plan, and an object of `part`,
    the other side. Any thread may bind; the binders of a plan share a `lock`.
    """

    def __init__(
        self,
        plan: TransferPlan,
        part: ChunkLayout,
        side: PoolEnd,
        *,
        lock: threading.Lock,
        source: int = 0,
    ) -> None:
        self._plan, self._part, self._side = plan, part, side
        self._lock, self._source = lock, source
        self._sought = False
        self._runs: _ChunkRuns | None = None

    def bind_chunk(self, chunk: int, address: RequestAddress, first: int = 0) -> CopyBatch:
        """Runs of chunk number `chunk` of a request, from position `first` on if that lies in it.
        Raises as `TransferPlan.bind`.
        """
        start, stop = chunk * self._part.tokens, (chunk + 1) * self._part.tokens
        if first <= start:
            if not self._sought:
                with self._lock:
                    self._runs, self._sought = self._runs_of_a_chunk(), True
            batch = None if self._runs is None else self._runs.of_chunk(chunk, address)
            if batch is not None:
                return batch
        with self._lock:
            return self._bound(chunk, address, range(max(start, first), stop))

    def _bound(
        self, chunk: int, address: RequestAddress, tokens: range, checked: bool = False
    ) -> CopyBatch:
        item = self._part.address(chunk)
        src, dst = (address, item) if self._side == "src" else (item, address)
        return self._plan.bind(self._source, src, dst, tokens=tokens, checked=checked)

    def _runs_of_a_chunk(self) -> _ChunkRuns | None:
        """From three made-up requests, no two of whose items are adjacent. None where a chunk is no
        number of items, or the pool is too small.
        """
        pool = self._plan.sources[self._source] if self._side == "src" else self._plan.dest
        lists = _lists(pool, self._part.tokens)
        number = np.arange(sum(id_list.count for id_list in lists.values()))
        low = max((id_list.low for id_list in lists.values()), default=0)
        ids = low + 2 * number
        tables = ids, ids + 1, ids + 1 + number
        if not lists or tables[-1][-1] >= min(id_list.stop for id_list in lists.values()):
            return None
        tokens = range(self._part.tokens)
        batches = [
            self._bound(0, _address(tokens.stop, lists, table), tokens, checked=True)
            for table in tables
        ]
        if len({batch.runs for batch in batches}) > 1 or batches[0].runs > MOST_RUNS:
            return None
        own = [getattr(batch, self._side) for batch in batches]
        stride = own[1] - own[0]
        step = own[2] - own[1]
        item = step // np.maximum(stride, 1)
        opposite = "dst" if self._side == "src" else "src"
        columns = [(getattr(batch, opposite), batch.nbytes) for batch in batches]
        if not (item * stride == step).all() or not all(
            np.array_equal(first, another)
            for column in columns[1:]
            for first, another in zip(columns[0], column)
        ):
            return None
        return _ChunkRuns(
            side=self._side,
            lists=lists,
            item=item,
            stride=stride,
            base=own[0] - ids[item] * stride,
            opposite=columns[0][0].copy(),
            nbytes=columns[0][1],
        )


@dataclass(frozen=True, slots=True)
class _IdList:
    """Of a chunk's items that one list of ids addresses: how many they are, and between which the
    ids lie.
    """

    count: int
    low: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkRuns:
    """Runs of any chunk: run r begins at `base[r] + id * stride[r]`, where `id` is that of the
    chunk's item number `item[r]`, counted through all `lists`; on the other side at `opposite[r]`.
    """

    side: PoolEnd
    lists: Mapping[str, _IdList]
    item: Ints
    stride: Ints
    base: Ints
    opposite: Ints
    nbytes: Ints

    def of_chunk(self, chunk: int, address: RequestAddress) -> CopyBatch | None:
        """None for a block table that lacks items of the chunk, or has ids that cannot be."""
        parts = []
        for name, id_list in self.lists.items():
            span = address.spans.get(name)
            if span is None or span.low < id_list.low or span.high >= id_list.stop:
                return None
            first = chunk * id_list.count - span.first_item
            if first < 0 or first + id_list.count > span.ids.size:
                return None
            parts.append(span.ids[first : first + id_list.count])
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        own = ids.take(self.item)
        own *= self.stride
        own += self.base
        src, dst = (own, self.opposite) if self.side == "src" else (self.opposite, own)
        return CopyBatch(src, dst, self.nbytes)


def _lists(pool: PoolLayout, tokens: int) -> dict[str, _IdList]:
    """By id list, what a chunk has of it; empty where chunks are not all alike."""
    if any(len(names) > 1 for names in pool.block_pools.values()):
        return {}  # a plan sees to it that no block is listed twice
    lists: dict[str, _IdList] = {}
    for name, stop in pool.items_by_space.items():
        space = pool.space_by_name[name]
        if not space.grows or space.wraps or space.interleave or tokens % space.item_span:
            return {}
        id_list = _IdList(tokens // space.item_span, space.reserved, stop)
        earlier = lists.setdefault(space.id_list, id_list)
        if earlier.count != id_list.count:
            return {}
        low, stop = max(earlier.low, id_list.low), min(earlier.stop, id_list.stop)
        lists[space.id_list] = _IdList(id_list.count, low, stop)
    return lists


def _address(tokens: int, lists: Mapping[str, _IdList], ids: Ints) -> RequestAddress:
    """A request of one chunk, whose items are these, list by list."""
    spans, first = {}, 0
    for name, id_list in lists.items():
        spans[name] = Span(ids[first : first + id_list.count])
        first += id_list.count
    return RequestAddress(tokens, spans)
