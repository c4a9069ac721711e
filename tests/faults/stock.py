"""A pool in which nothing is free for long: what one request gives back is another's at once."""

from __future__ import annotations

from collections import deque
from itertools import cycle

from kvpool import Allocator, OutOfPages
from kvpool.allocator import Request
from kvpool.pools.base import KVPool
from tests.faults.values import MOST_TOKENS, put, wrong


class Stock:
    """Hands out the items of a pool. All others are held by bystanders, whose bytes are looked at
    before they are let go: what else wrote there, wrote to pages that were given back too early.
    """

    def __init__(self, pool: KVPool, salts: range) -> None:
        self.pool, self.allocator = pool, Allocator(pool)
        self.problems: list[str] = []
        self._salts = cycle(salts)
        self._bystanders: deque[tuple[Request, int]] = deque()
        self._fill()

    def take(self, tokens: int, received: bool = False) -> Request | None:
        """Room for one request, for which bystanders go; None if too much is held by others."""
        request = self.allocator.new_request()
        while True:
            try:
                self.allocator.extend(request, tokens, received=received)
                break
            except OutOfPages:
                if not self._bystanders:
                    self.allocator.free(request)
                    return None
                self._let_go(*self._bystanders.popleft())
        self._fill()
        return request

    def give_back(self, request: Request) -> None:
        """Frees a request; its pages are written over at once."""
        self.allocator.free(request)
        self._fill()

    def audit(self) -> dict[str, tuple[int, int]]:
        """Looks at every bystander; by id list, items in all and those not held by requests."""
        self.allocator.check_integrity()
        for request, salt in self._bystanders:
            self._look_at(request, salt)
        found = {}
        for name, each in self.allocator.lists.items():
            held = sum(request.address().spans[name].ids.size for request, _ in self._bystanders)
            found[name] = each.items - each.space.reserved, each.num_free + held
        return found

    def _fill(self) -> None:
        lists = self.allocator.lists.values()
        size = self.pool.page_size
        while (pages := self.allocator.free_pages) and all(each.num_free for each in lists):
            request, salt = self.allocator.new_request(), next(self._salts)
            tokens = min(pages * size, MOST_TOKENS)
            self.allocator.extend(request, tokens)
            put(self.pool, request.address(), range(tokens), salt)
            self._bystanders.append((request, salt))

    def _let_go(self, request: Request, salt: int) -> None:
        self._look_at(request, salt)
        self.allocator.free(request)

    def _look_at(self, request: Request, salt: int) -> None:
        address = request.address()
        count = wrong(self.pool, address, range(address.num_tokens), salt)
        if count:
            self.problems.append(
                f"{count} bytes of a bystander were written by somebody else, in "
                f"{ {name: span.ids.tolist() for name, span in address.spans.items()} }."
            )
            put(self.pool, address, range(address.num_tokens), salt)
