"""The oracle's values for many requests in one pool: each request has its own salt."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from kvpool.layout import RequestAddress
from kvpool.pools.base import KVPool
from tests import oracle

MOST_TOKENS = 256  # of one request, so that values can be kept


@lru_cache(maxsize=4096)
def _values(key, inner, width, salt):
    """Bytes of all entries of a request, `[MOST_TOKENS, inner axes, byte]`."""
    axes = [np.arange(start, stop) for start, stop in inner]
    return oracle.values(key, [np.arange(MOST_TOKENS), *axes, np.arange(width)], salt)


def _cells(
    pool: KVPool, address: RequestAddress, positions: range, salt: int
) -> Iterator[tuple[np.ndarray, tuple[np.ndarray, np.ndarray], np.ndarray]]:
    """By region: memory, indices of the live entries of `positions` in it, and their values."""
    memory = oracle.state(pool)
    for region in memory.layout.regions:
        space, view = memory.layout.space_of(region), memory.views[region.key]
        entries = oracle.live(space, positions, address.num_tokens)
        if not entries.size:
            continue
        if region.axis("entry") is None:
            view = view[:, None]
        span, size = address.spans[space.id_list], space.entries_per_item
        number = entries // size - span.first_item if space.kind == "paged" else entries * 0
        inner = tuple((axis.start, axis.stop) for axis in region.inner_axes)
        what = _values(region.key, inner, region.width, salt)[entries]
        yield view, (span.ids[number], entries % size), what


def put(pool: KVPool, address: RequestAddress, positions: range, salt: int) -> None:
    for view, cells, what in _cells(pool, address, positions, salt):
        view[cells] = what


def wrong(pool: KVPool, address: RequestAddress, positions: range, salt: int) -> int:
    """How many bytes of the live entries of `positions` differ from what was written."""
    parts = _cells(pool, address, positions, salt)
    return sum(int((view[cells] != what).sum()) for view, cells, what in parts)
