"""A pool that is always full: pages that one request frees belong to another at once."""

from __future__ import annotations

from collections import deque
from itertools import cycle

from kvpool import Allocator, OutOfPages, PrefixCache
from kvpool.allocation.allocator import Request
from kvpool.pools.base import KVPool
from tests.faults.values import MOST_TOKENS, put, wrong


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
