"""The thread that runs an endpoint, where the caller does not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from disagg.host import brief


class IOThread:
    """Calls `turn(thread)` until that is False. `wake` can be read once `wake_up` was called."""

    def __init__(self, turn: Callable[[IOThread], bool], name: str) -> None:
        self._turn = turn
        self.wake, self._write = os.pipe()
        self._taken = brief.Scratch(4096)
        for end in (self.wake, self._write):
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
        brief.write_byte(self._write)  # a full pipe wakes as well

    def clear(self) -> None:
        """Takes note of all wake-ups; the turn looks at what they are about after this."""
        self._taken.read(self.wake)

    def join(self) -> None:
        """Waits until the last turn is over."""
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self.wake)
        os.close(self._write)

    def _run(self) -> None:
        while self._turn(self):
            pass
