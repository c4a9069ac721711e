"""The thread that runs an endpoint, where the caller does not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress


class IOThread:
    """Calls `turn(wake)` until that is False. `wake` can be read once `wake_up` was called."""

    def __init__(self, turn: Callable[[int], bool], name: str) -> None:
        self._turn = turn
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def waker(self) -> int:
        """A byte that is written to this descriptor wakes the thread too."""
        return self._write

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def wake_up(self) -> None:
        """Ends the wait of the current turn, or of the next."""
        with suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._write, b"\0")

    def clear(self) -> None:
        """Takes note of all wake-ups; the turn looks at what they are about after this."""
        with suppress(BlockingIOError):
            os.read(self._read, 4096)

    def join(self) -> None:
        """Waits until the last turn is over."""
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _run(self) -> None:
        while self._turn(self._read):
            pass
