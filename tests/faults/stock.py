"""A pool that is always full: pages that one request frees belong to another at once. Each request
has its own salt of the oracle's values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import cycle

import numpy as np

from kvpool import Allocator, OutOfPages, PrefixCache
from kvpool.allocation.allocator import Request
from kvpool.layout import RequestAddress
from kvpool.pools.base import KVPool
from tests import oracle

MOST_TOKENS = 256  # of one request, so that values can be kept
PERIOD = 61
"""Bytes after which those of a row repeat. It is a prime: parts of a row that are as far apart as
reads are cut, a power of two, differ.
"""


@lru_cache(maxsize=4096)
def _values(key, inner, width, salt):
    """Bytes of all entries of a request, `[MOST_TOKENS, inner axes, byte]`."""
    axes = [np.arange(start, stop) for start, stop in inner]
    columns = np.arange(min(width, PERIOD))
    values = oracle.values(key, [np.arange(MOST_TOKENS), *axes, columns], salt)
    return values if width <= PERIOD else values[..., np.arange(width) % PERIOD]


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


class Stock:
    """Allocates from a pool whose other items belong to filler requests. Their bytes are checked
    before they are freed: a change means that a page was freed too early. `spare` is the share of
    all items that fillers leave free: what a prefix cache keeps is among these.
    """

    def __init__(
        self, pool: KVPool, salts: range, prefix: PrefixCache | None = None, spare: float = 0.0
    ) -> None:
        self.pool, self.allocator = pool, Allocator(pool, prefix=prefix)
        self._spare = spare
        self.problems: list[str] = []
        self._salts = cycle(salts)
        self._fillers: deque[tuple[Request, int]] = deque()
        self._fill()

    def take(
        self, tokens: int, received: bool = False, request: Request | None = None
    ) -> Request | None:
        """Allocates a request, or extends one to so many tokens, by freeing fillers; None if other
        requests hold too much, and then the request is freed.
        """
        request = request or self.allocator.new_request()
        while True:
            try:
                self.allocator.extend(request, tokens - request.num_tokens, received=received)
                break
            except OutOfPages:
                if not self._fillers:
                    self.allocator.free(request)
                    return None
                self._drop_filler(*self._fillers.popleft())
        self._fill()
        return request

    def give_back(self, request: Request) -> None:
        """Frees a request; its pages are overwritten at once."""
        self.allocator.free(request)
        self._fill()

    def audit(self) -> dict[str, tuple[int, int]]:
        """Checks every filler; returns by id list all items, and those not held by requests."""
        self.allocator.check_integrity()
        for request, salt in self._fillers:
            self._check_filler(request, salt)
        totals = {}
        for name, id_list in self.allocator.lists.items():
            filled = sum(request.address().spans[name].ids.size for request, _ in self._fillers)
            free = id_list.free_list
            totals[name] = free.usable, free.num_free + filled
        return totals

    def _fill(self) -> None:
        lists = [id_list.free_list for id_list in self.allocator.lists.values()]
        size = self.pool.page_size
        spare = max(int(self._spare * free.usable) for free in lists)
        while (pages := self.allocator.free_pages - spare) > 0:
            if any(free.num_free <= int(self._spare * free.usable) for free in lists):
                break
            request, salt = self.allocator.new_request(), next(self._salts)
            tokens = min(pages * size, MOST_TOKENS)
            self.allocator.extend(request, tokens, received=True)  # no page for dead entries
            put(self.pool, request.address(), range(tokens), salt)
            self._fillers.append((request, salt))

    def _drop_filler(self, request: Request, salt: int) -> None:
        self._check_filler(request, salt)
        self.allocator.free(request)

    def _check_filler(self, request: Request, salt: int) -> None:
        address = request.address()
        count = wrong(self.pool, address, range(address.num_tokens), salt)
        if count:
            self.problems.append(
                f"{count} bytes of freed pages were overwritten by another request, in "
                f"{ {name: span.ids.tolist() for name, span in address.spans.items()} }."
            )
            put(self.pool, address, range(address.num_tokens), salt)
