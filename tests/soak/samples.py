"""What long-lived processes hold, sampled all along, and whether that is flat to the end."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

PAGE = resource.getpagesize()
LEAST = 12
"""Samples without which nothing is said."""


@dataclass(frozen=True)
class Sample:
    """What a process holds while no request is under way. Memory in bytes."""

    seconds: float
    memory: int
    files: int
    threads: int
    items: int
    """Items of its pool that are neither free nor a filler's, and leases: none are under way."""


@dataclass(frozen=True)
class Limits:
    """By how much a median may grow. Memory in bytes."""

    memory: int
    files: int = 1
    threads: int = 1
    items: int = 0


@dataclass(frozen=True)
class Trend:
    """Medians of what one process held in the second and in the last quarter of its life."""

    process: str
    what: str
    before: float
    after: float
    limit: float

    @property
    def flat(self) -> bool:
        """Whether it has not grown by more than the limit."""
        return self.after - self.before <= self.limit


def sample(pid: int, seconds: float, items: int) -> Sample:
    """What the kernel says of a process now."""
    proc = Path(f"/proc/{pid}")
    return Sample(
        seconds=seconds,
        memory=int((proc / "statm").read_text().split()[1]) * PAGE,
        files=len(os.listdir(proc / "fd")),
        threads=len(os.listdir(proc / "task")),
        items=items,
    )


def trends(samples: Mapping[str, Sequence[Sample]], limits: Limits) -> Iterator[Trend]:
    """Four of each process. The first quarter is warm-up: caches fill, buffers become resident."""
    for process, series in samples.items():
        quarter = len(series) // 4
        if len(series) < LEAST:
            raise ValueError(f"{process}: {len(series)} samples, {LEAST} are needed. Run longer.")
        for what in ("memory", "files", "threads", "items"):
            values = [getattr(each, what) for each in series]
            yield Trend(
                process=process,
                what=what,
                before=median(values[quarter : 2 * quarter]),
                after=median(values[-quarter:]),
                limit=getattr(limits, what),
            )
