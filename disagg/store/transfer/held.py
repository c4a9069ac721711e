"""Copies of memory whose owner leaves it as it is until `settle`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from disagg.log import log
from disagg.store.workers import Workers


class HeldCopies:
    """Each is made by a thread of `workers`, or by `settle` where none has come to it."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._waiting: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._under_way = 0

    def add_copy(self, copy: Callable[[], object]) -> None:
        """Any thread may ask. What `copy` raises is logged."""
        self._waiting.append(copy)
        self._workers.do(self._make_one)

    def settle(self) -> None:
        """Makes those that wait, and waits for those that are being made."""
        while self._waiting:
            self._make_one()
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)

    def _make_one(self) -> None:
        with self._changed:
            if not self._waiting:  # it was settled
                return
            copy = self._waiting.popleft()
            self._under_way += 1
        try:
            copy()
        except Exception:
            log.exception("store: a fault in %s", copy)
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()
