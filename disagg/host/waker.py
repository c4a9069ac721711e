"""A descriptor that wakes the thread which waits at its other end."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class Waker:
    """A duplicate of a non-blocking descriptor, whose owner may close it at any time; -1 until one
    is `set`. Any thread may `wake`.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self._lock = threading.Lock()

    def set(self, descriptor: int) -> None:
        """Takes a duplicate, if none is there."""
        with self._lock:
            if self.descriptor < 0:
                self.descriptor = os.dup(descriptor)

    def wake(self) -> None:
        """Writes a byte."""
        with self._lock, suppress(OSError):  # full, which wakes as well, or nobody waits any more
            if self.descriptor >= 0:
                os.write(self.descriptor, b"\0")

    def close(self) -> None:
        """Closes the duplicate."""
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1
