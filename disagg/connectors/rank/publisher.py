"""Tells a rank's numbers while its engine runs, for engines that do not ask for them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence

from disagg.connectors.rank.instruments import Instruments
from disagg.connectors.rank.stats import SECONDS, Numbers, Stats, summary, total

LINE_SECONDS = 60.0
"""Between two lines of the log that have the numbers of what has ended."""


class Publisher:
    """Tells Prometheus each second, and the log each minute, in a thread: also while the engine has
    nothing to do. `instruments`, with the `values` of their labels, are None where the engine has
    no metrics; without `lines`, the log has others. What goes wrong ends the numbers, and not the
    engine.
    """

    def __init__(
        self,
        stats: Stats,
        instruments: Instruments | None,
        values: Sequence[str],
        log: logging.Logger,
        *,
        lines: bool = True,
    ) -> None:
        self._stats, self._instruments, self._values = stats, instruments, values
        self._log, self._closed = log, threading.Event()
        self._line: Numbers = {}
        self._next_line = time.monotonic() + LINE_SECONDS if lines else math.inf
        self._thread = threading.Thread(target=self._run, name="kvpool metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tells Prometheus a last time, with gauges of 0, and ends the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed.wait(SECONDS):
                self._publish()
            self._stats.changed()
            self._publish()
            self._stats.end()
            self._publish()
        except Exception:
            self._log.exception("kvpool's metrics have ended")

    def _publish(self) -> None:
        if numbers := self._stats.take():
            if self._instruments is not None:
                self._instruments.observe(numbers, self._values)
            if self._next_line < math.inf:
                self._line = total(self._line, numbers)
        now = time.monotonic()
        if now > self._next_line and (line := summary(self._line)):
            words = ", ".join(f"{name} {number}" for name, number in line.items())
            self._log.info("kvpool: %s", words)
            self._next_line, self._line = now + LINE_SECONDS, {}
