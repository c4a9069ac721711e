"""Whether a floor answers: requests do not wait for one that does not."""

from __future__ import annotations

import threading
import time

PAUSE_SECONDS, MOST_PAUSE_SECONDS = 1.0, 30.0
"""For how long nothing is asked after a floor has not answered: twice as long each time."""


class Outage:
    """After a floor has not answered nothing is asked for some time, and then one lookup tries it
    for all: while a floor hangs, few wait for it, and little waits in queues. Any thread may call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pause, self._until = PAUSE_SECONDS, 0.0
        self._tried = False
        """Whether a lookup is trying it."""

    def turns_away(self, timeout: float) -> bool:
        """Whether a lookup is not to be made. If it is, it ends within `timeout` seconds."""
        now = time.monotonic()
        with self._lock:
            if now < self._until:
                return True
            if self._until:
                self._until, self._tried = now + timeout, True
            return False

    def failed(self) -> None:
        """A floor has not answered."""
        now = time.monotonic()
        with self._lock:
            if self._tried or now >= self._until:  # else it was asked before it was known
                self._until, self._tried = now + self._pause, False
                self._pause = min(2 * self._pause, MOST_PAUSE_SECONDS)

    def answered(self) -> None:
        with self._lock:
            self._pause, self._until, self._tried = PAUSE_SECONDS, 0.0, False
