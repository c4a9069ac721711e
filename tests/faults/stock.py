"""A pool that is always full: pages that one request frees belong to another at once."""

from __future__ import annotations

from collections import deque
from itertools import cycle

from kvpool import Allocator, OutOfPages
from kvpool.allocator import Request
from kvpool.pools.base import KVPool
from tests.faults.values import MOST_TOKENS, put, wrong


class Stock:
    """Allocates from a pool whose other items belong to filler requests. Their bytes are checked
    before they are freed: a change means that a page was freed too early.
    """

    def __init__(self, pool: KVPool, salts: range) -> None:
        self.pool, self.allocator = pool, Allocator(pool)
        self.problems: list[str] = []
        self._salts = cycle(salts)
        self._fillers: deque[tuple[Request, int]] = deque()
        self._fill()

    def take(self, tokens: int, received: bool = False) -> Request | None:
        """Allocates a request by freeing fillers; None if other requests hold too much."""
        request = self.allocator.new_request()
        while True:
            try:
                self.allocator.extend(request, tokens, received=received)
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
        found = {}
        for name, each in self.allocator.lists.items():
            held = sum(request.address().spans[name].ids.size for request, _ in self._fillers)
            free = each.free_list
            found[name] = free.usable, free.num_free + held
        return found

    def _fill(self) -> None:
        lists = [each.free_list for each in self.allocator.lists.values()]
        size = self.pool.page_size
        while (pages := self.allocator.free_pages) and all(each.num_free for each in lists):
            request, salt = self.allocator.new_request(), next(self._salts)
            tokens = min(pages * size, MOST_TOKENS)
            self.allocator.extend(request, tokens)
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
