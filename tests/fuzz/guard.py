"""Bounds of one hostile input: memory, time, and documented errors only."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field

BASE_BYTES, BYTES_A_BYTE = 16 << 20, 64
BASE_SECONDS, SECONDS_A_BYTE = 1.0, 1.0 / (1 << 16)


class Finding(AssertionError):
    """An input did something that no input may do."""


@dataclass
class Tally:
    """Outcomes of a target's inputs, and the highest cost of one."""

    inputs: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    seconds: float = 0.0

    def add(self, outcome: str, peak: int, seconds: float) -> None:
        self.inputs += 1
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.peak, self.seconds = max(self.peak, peak), max(self.seconds, seconds)


def guarded(run: Callable[[], str], size: int, tally: Tally | None = None) -> str:
    """Runs one input of `size` bytes; returns its outcome in a word.

    Raises Finding where it allocates more than `BASE_BYTES` and `BYTES_A_BYTE` times its size, or
    takes more processor time than its size allows. Errors of `run` are passed on.
    """
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    began = time.thread_time()
    try:
        outcome = run()
    finally:
        seconds = time.thread_time() - began
        peak = tracemalloc.get_traced_memory()[1] - before
        if not tracing:
            tracemalloc.stop()
    if tally is not None:
        tally.add(outcome, peak, seconds)
    if peak > BASE_BYTES + BYTES_A_BYTE * size:
        raise Finding(f"{outcome}: {peak / (1 << 20):.0f} MiB for an input of {size} bytes.")
    if seconds > BASE_SECONDS + SECONDS_A_BYTE * size:
        raise Finding(f"{outcome}: {seconds:.1f} s for an input of {size} bytes.")
    return outcome
