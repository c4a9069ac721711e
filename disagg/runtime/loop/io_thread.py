"""The thread that runs an endpoint, where the caller does not."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from disagg.host import brief
from disagg.runtime.transport import Transport

log = logging.getLogger("disagg")

FAILED_SECONDS = 0.05
"""Before the next turn, after a wait that has failed."""


class Pace:
    """How often a side that is read lets its engine make progress: pauses of `least` seconds, that
    double up to `most` while the host is late in ending them. Dozens of endpoints on a few cores
    would otherwise keep one another from their turns.
    """

    def __init__(self, least: float, most: float) -> None:
        self._least, self._most = least, max(least, most)
        self.seconds = least

    def woke(self, asked: float, taken: float) -> None:
        """A pause of `asked` seconds has taken so many."""
        if taken > 2 * asked:
            self.seconds = min(self._most, 2 * self.seconds)
        else:
            self.seconds = max(self._least, self.seconds / 2)


class IOThread:
    """Calls `turn(thread)` after as many seconds as it returned, until that is None. `wake` can be
    read once `wake_up` was called.
    """

    def __init__(
        self,
        turn: Callable[[IOThread], float | None],
        transport: Transport,
        pace: Pace,
        name: str,
    ) -> None:
        self._turn, self._transport, self._pace = turn, transport, pace
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
        """Ends the wait of the current turn, or of the next. Not while another thread may `close`:
        another file could have the descriptor by then.
        """
        if self.wake >= 0:
            brief.write_byte(self._write)  # a full pipe wakes as well

    def clear(self) -> None:
        """Takes note of all wake-ups; the turn looks at what they are about after this."""
        self._taken.read(self.wake)

    def join(self) -> None:
        """Waits until the last turn is over. May be called again."""
        self.wake_up()
        if self._thread.ident is not None:
            self._thread.join()

    def close(self) -> None:
        """Closes the files of a thread that has ended."""
        if self.wake >= 0:
            os.close(self.wake)
            os.close(self._write)
            self.wake = -1

    def pause(self, seconds: float) -> None:
        """Waits for a message or a call."""
        began = time.monotonic()
        try:
            self._transport.wait(seconds, self.wake)
        except Exception:  # the next turn fails too, or goes on
            log.exception("%s: a wait for messages failed", self._thread.name)
            time.sleep(FAILED_SECONDS)
        self._pace.woke(seconds, time.monotonic() - began)

    def _run(self) -> None:
        seconds: float | None = 0.0
        while seconds is not None:
            if seconds:
                self.pause(seconds)
            seconds = self._turn(self)
