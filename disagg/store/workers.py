"""Threads that do a store's work. They are daemons: a floor that hangs keeps no process from its
end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from disagg.log import log


class Workers:
    """Some threads and what they are to do, in order."""

    def __init__(self, count: int, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name} {number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def do(self, work: Callable[[], None]) -> None:
        """Any thread may ask. What `work` raises is logged."""
        self._queue.put(work)

    def close(self, timeout: float) -> bool:
        """Lets them end once all is done. Whether they have within `timeout` seconds."""
        for _ in self._threads:
            self._queue.put(None)
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("store: a fault in %s", work)
            del work  # what it refers to is large
