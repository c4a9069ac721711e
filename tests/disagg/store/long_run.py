"""Engines that serve requests over one folder which `kvpool store gc` keeps at its bound, as cron
would; what they hold is noted all the time.

    python -m tests.disagg.store.long_run --requests 1000000
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from disagg.store import known
from disagg.store.chunks import chunk_layouts
from disagg.store.objects import head_bytes
from tests.disagg.store.engines import CHUNK, SECONDS, BatchedEngine, CachedEngine
from tests.disagg.store.growth import entries
from tests.disagg.store.traffic import Traffic
from tests.soak.slices import Sample, leaks, medians, sample

LIMITS = {"files": 1, "threads": 1, "others' threads": 512}
"""By how much they may grow. obstore keeps as many threads as its calls have needed at once, of
which a busy machine may make many: 512 at most, which end when they are idle.
"""
ENTRIES = 64
"""By how much containers may grow."""
LOOK_EVERY = 50
"""Requests between two looks at the process that collects."""
IN_FLIGHT = 8
"""Objects that are written and not counted yet: one for each thread of a writer."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run of so many requests. The folder keeps `keep` bytes; after one collection has ended, the
    next begins `pause` seconds later. While one runs, at most `meanwhile` requests are served, or a
    short run on a busy machine would end before it. `names`: how many a store remembers.
    """

    requests: int
    keep: int
    pause: float
    meanwhile: int = 1 << 62
    samples: int = 96
    names: int = 1 << 10
    seed: int = 31
    memory: int = 4 << 20
    """Bytes by which the process may grow from the second quarter of its samples to the last."""


@dataclass
class Report:
    """What has been."""

    seconds: float = 0.0
    processor_seconds: float = 0.0
    served: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    collections: int = 0
    removed: int = 0
    least_bytes: int = 1 << 62
    """Of objects in the folder, behind a collection but the first; and the most."""
    most_bytes: int = 0
    objects: int = 0
    """At the end."""
    held: dict[str, array[int]] = field(default_factory=dict)
    """By name, what the process has held at each sample: numbers, lest they be what grows."""
    problems: list[str] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        rows = zip(*self.held.values(), strict=True)
        return [dict(zip(self.held, row)) for row in rows]

    def note(self, sample: Sample) -> None:
        """What was not there before was empty."""
        count = len(self.held.get("memory", ()))
        for name in self.held.keys() | sample.keys():
            column = self.held.setdefault(name, array("q", bytes(8 * count)))
            column.append(sample.get(name, 0))

    def __str__(self) -> str:
        served, samples = self.served, self.samples
        held = {name: medians(samples, name) for name in ("memory", *LIMITS)}
        lines = [
            f"{served['requests']:,} requests of {served['tokens']:,} tokens in "
            f"{self.seconds:,.0f} s, {self.processor_seconds:,.0f} s of processor time",
            f"{served['reused requests']:,} began with {served['reused tokens']:,} tokens that "
            f"were there: {served['wrong']:,} rows of their state were wrong",
            f"of the stores: {', '.join(f'{n} {count:,}' for n, count in self.outcomes.items())}",
            f"{self.collections:,} collections removed {self.removed:,} objects, and left "
            f"{self.least_bytes:,} to {self.most_bytes:,} bytes",
            f"at the end {self.objects:,} objects",
            *(f"{name}: {before:,.0f} to {after:,.0f}" for name, (before, after) in held.items()),
            *self.problems,
        ]
        return "\n".join(lines)


class Collector:
    """One `kvpool store gc` after the other."""

    def __init__(self, folder: Path, plan: Plan, report: Report, size: int) -> None:
        self._folder, self._plan, self._report, self._size = folder / "floor", plan, report, size
        self._log, self._written = folder / "gc.json", 0
        self._process: subprocess.Popen[bytes] | None = None
        self._next, self._turns = time.monotonic(), 0

    def turn(self, written: int) -> None:
        """Begins a collection, or looks whether it has ended; `written`: objects until now."""
        if self._process is None:
            if time.monotonic() >= self._next:
                self._begin(written)
            return
        self._turns += 1
        if self._turns * LOOK_EVERY >= self._plan.meanwhile:
            self._process.wait()
        if self._process.poll() is not None:
            self._end(written)

    def finish(self, written: int) -> None:
        if self._process is not None:
            self._process.wait()
            self._end(written)

    def objects(self) -> list[int]:
        """The sizes of all in the folder."""
        sizes = []
        for folder, _, files in os.walk(self._folder):
            for name in files:
                if name.endswith(".full"):
                    try:
                        sizes.append(os.stat(os.path.join(folder, name)).st_size)
                    except FileNotFoundError:
                        continue
        return sizes

    def _begin(self, written: int) -> None:
        self._written, self._turns = written, 0
        url, keep = f"file://{self._folder}", f"{self._plan.keep}b"
        with self._log.open("wb") as out:
            command = [sys.executable, "-m", "kvpool", "store", "gc", url, "--keep", keep, "--json"]
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def _end(self, written: int) -> None:
        process, self._process = self._process, None
        self._next = time.monotonic() + self._plan.pause
        if process is None or process.returncode:
            self._report.problems.append(f"gc: {self._log.read_text()[-500:]}")
            return
        removed, report = json.loads(self._log.read_text())["removed"], self._report
        report.collections += 1
        report.removed += removed["objects"]
        nbytes = sum(self.objects())
        most = self._plan.keep + (written - self._written + IN_FLIGHT) * self._size
        if nbytes > most:
            report.problems.append(f"{nbytes:,} bytes behind a collection, of {most:,} at most")
        report.most_bytes = max(report.most_bytes, nbytes)
        if removed["objects"]:
            report.least_bytes = min(report.least_bytes, nbytes)


class Run:
    """Serves the requests of a plan."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        known.MOST_NAMES = plan.names
        self._plan, self.report = plan, Report()
        url = f"file://{folder}/floor"
        self._engines: list[Any] = [
            CachedEngine(url, page=16, pages=80, order="nhd"),
            CachedEngine(url, page=32, pages=30, order="hnd"),
            BatchedEngine(url, page=64, batch=8, seed=plan.seed),
        ]
        self._stores = [store for engine in self._engines for store in engine.stores]
        part = chunk_layouts(self._engines[0].pool.layout, CHUNK)["full"]
        size = part.nbytes + head_bytes(part)  # of a whole chunk: halves are smaller
        self._collector = Collector(folder, plan, self.report, size)

    def run(self) -> Iterator[str]:
        """Says how it goes."""
        plan, report = self._plan, self.report
        traffic, pick = Traffic(plan.seed), random.Random(plan.seed)
        gc.collect()
        gc.freeze()  # what is imported is not looked at in each collection
        began, cpu = time.monotonic(), time.process_time()
        every = plan.requests // plan.samples
        for number in range(1, plan.requests + 1):
            (engine,) = pick.choices(self._engines, (45, 45, 10))
            engine.serve(traffic.turn())
            if number % LOOK_EVERY == 0:
                self._collector.turn(self._written())
            if number % every == 0:
                yield self._sample(number)
        for engine in self._engines:
            engine.finish()
        report.seconds = time.monotonic() - began
        report.processor_seconds = time.process_time() - cpu
        self._finish()

    def _written(self) -> int:
        return sum(store.stats().counts["written"] for store in self._stores)

    def _settle(self) -> None:
        until = time.monotonic() + SECONDS
        while any(store.stats().queued_bytes for store in self._stores):
            assert time.monotonic() < until, "what is to be written stays"
            time.sleep(0.001)

    def _sample(self, number: int) -> str:
        self._settle()
        now = sample(os.getpid(), 0)
        now["others' threads"] = now["threads"] - threading.active_count()
        now["threads"] = threading.active_count()
        for place, engine in enumerate(self._engines):
            now.update(entries(f"engine {place}", engine))
        self.report.note(now)
        return f"{number:,} requests, {now['memory'] >> 20} MiB"

    def _finish(self) -> None:
        self._settle()
        self._collector.finish(self._written())
        report = self.report
        for store in self._stores:
            report.problems += store.miscounts()
            stats = store.stats()
            report.outcomes.update(stats.counts)
            report.reasons.update(stats.reasons)
            store.close()
        for engine in self._engines:
            report.served.update(engine.served.counts)
        if report.served["wrong"]:
            report.problems.append(f"{report.served['wrong']:,} rows of state were wrong")
        report.problems += grown(report.samples, self._plan.memory)
        report.objects = len(self._collector.objects())
        if report.objects != report.outcomes["written"] - report.removed:
            report.problems.append(
                f"{report.objects:,} objects, of {report.outcomes['written']:,} that were written "
                f"and {report.removed:,} that were removed"
            )


def grown(samples: list[Sample], memory: int) -> list[str]:
    """What has grown, of what a process holds."""
    limits = {**dict.fromkeys(samples[0], ENTRIES), **LIMITS, "memory": memory}
    return [*leaks(samples, limits)]


def child(pipe: Any, folder: Path, plan: Plan) -> None:
    """In a process of its own, whose memory nothing else uses."""
    run = Run(folder, plan)
    for text in run.run():
        pipe.send(text)
    pipe.send(run.report)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--keep", type=int, default=8 << 20, help="bytes in the folder")
    parser.add_argument("--pause", type=float, default=10, help="seconds between collections")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        run = Run(Path(folder), Plan(**vars(options)))
        for text in run.run():
            print(text, flush=True)
    print(run.report)
    return 1 if run.report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
