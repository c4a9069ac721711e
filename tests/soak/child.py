"""A process of a soak run: as those of the faults, with a prefix cache and snapshots.

A request is the beginning of one of a few documents. The state at a position follows from the
document's tokens up to there, so requests of one document share what a prefix cache has of it.
"""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from disagg import KVPoll, snapshot
from kvpool import PrefixCache
from kvpool.allocation.allocator import Request
from kvpool.layout import RequestAddress
from tests.faults.child import FaultyChild
from tests.faults.orders import Order, Setup
from tests.faults.stock import MOST_TOKENS, Stock, put, wrong

CHECKPOINT = 64
"""Tokens between two states of slots and rings that a prefix cache keeps."""
SPARE = 0.4
"""The share of a pool's items that no filler holds: for what the prefix cache keeps."""
PR_SET_THP_DISABLE = 41
STEP = 4
"""Positions that a window has at least."""
SAVED_EVERY = 5
"""Requests of which one is saved and loaded."""
DOCUMENTS = np.random.default_rng(28).integers(0, 1 << 20, (4, MOST_TOKENS))
"""Tokens by document, which is the salt of a request's values."""


class SoakChild(FaultyChild):
    """An endpoint and a small scheduler with prefix reuse on its side."""

    prefix_salt = 0  # what decode has of a request before it asks is of the same document

    def filled(self, setup: Setup) -> Stock:
        self._saved = f"{setup.log}.state"
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # memory grows by small pages
        gc.freeze()  # what is imported is not looked at in each collection
        prefix = PrefixCache(checkpoint_tokens=CHECKPOINT)
        return Stock(setup.pool(), setup.salts, prefix, SPARE)

    def take(self, order: Order) -> Request | None:
        """Begins with what the cache has of the document, which must be there."""
        course, stock = order.course, self.stock
        tokens = DOCUMENTS[course.salt, : course.tokens - 1]
        request = stock.allocator.new_request(tokens)
        reused = request.num_tokens
        count = wrong(stock.pool, request.address(), range(reused), course.salt)
        if count:
            stock.problems.append(f"{count} wrong bytes in a reused prefix of {reused} tokens")
        if not stock.take(course.tokens, self._receives, request):
            return None
        order.course = replace(course, start=reused)
        return request

    def write(self, order: Order, positions: range) -> None:
        """As a forward writes them: at each step what is alive then, which the cache keeps."""
        course, pool = order.course, self.stock.pool
        start = max(positions.start, course.start)
        windows = any(space.window for space in pool.layout.spaces)
        step = STEP if windows else MOST_TOKENS
        while start < positions.stop:
            stop = min(start + step, positions.stop)
            put(pool, RequestAddress(stop, order.address.spans), range(start, stop), course.salt)
            start = stop

    def _give_back(self, order: Order) -> None:
        if order.request is not None and self.endpoint.poll(order.room) is KVPoll.Success:
            course = order.course
            tokens = DOCUMENTS[course.salt, course.start : course.tokens]
            self.stock.allocator.store(order.request, tokens)
            if order.number % SAVED_EVERY == 0:
                self._save_and_load(order)
        super()._give_back(order)

    def _save_and_load(self, order: Order) -> None:
        """Saves a request to a file or to host memory, and loads it into another one."""
        pool, course = self.stock.pool, order.course
        copy = self.stock.take(course.tokens, received=True)
        if copy is None:
            return
        if order.number % (2 * SAVED_EVERY):
            pool.load(copy.address(), pool.save(order.address))
        else:
            snapshot.save(self._saved, pool.layout, order.address)
            snapshot.load(Path(self._saved), pool.layout, copy.address())
            Path(self._saved).unlink()
        count = wrong(pool, copy.address(), range(course.tokens), course.salt)
        if count:
            self.stock.problems.append(f"{count} wrong bytes in a request that was loaded")
        self.stock.give_back(copy)

    def _end(self) -> dict[str, Any]:
        gc.collect()
        stats = self.stock.allocator.usage().prefix
        return {**super()._end(), "prefix": stats}
