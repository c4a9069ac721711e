"""One engine and one family of pools for a while: rounds of requests with faults, in processes of
which two live to the end, and samples of these.
"""

from __future__ import annotations

import os
import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from disagg.engines.base import Engine
from tests import pools
from tests.faults.orders import Course, Shape, hybrid, mha
from tests.faults.run import Outcome, Run
from tests.faults.stock import MOST_TOKENS
from tests.faults.world import Late, World
from tests.faults.worlds import KINDS
from tests.soak.child import CHECKPOINT, DOCUMENTS, SoakChild

PAGE = resource.getpagesize()
MIB = 1 << 20
LEAST = 12
"""Samples without which nothing is said."""
LIMITS = {"memory": 4 * MIB, "files": 1, "threads": 1, "items": 0}
"""By how much a median may grow. `items` are those of a pool that are neither free nor a filler's,
and leases: while no request is under way, there are none.
"""

Sample = dict[str, int]
"""What a process holds while no request is under way: memory in bytes, files, threads, items."""


def sample(pid: int, items: int) -> Sample:
    """What the kernel says of a process now."""
    proc = Path(f"/proc/{pid}")
    return {
        "memory": int((proc / "statm").read_text().split()[1]) * PAGE,
        "files": len(os.listdir(proc / "fd")),
        "threads": len(os.listdir(proc / "task")),
        "items": items,
    }


def medians(series: Sequence[Sample], what: str) -> tuple[float, float]:
    """In the second and in the last quarter. The first is warm-up: caches fill, buffers become
    resident. Raises ValueError for too few samples.
    """
    if len(series) < LEAST:
        raise ValueError(f"{len(series)} samples, {LEAST} are needed. Run longer.")
    quarter, values = len(series) // 4, [each[what] for each in series]
    return median(values[quarter : 2 * quarter]), median(values[-quarter:])


def leaks(series: Sequence[Sample], limits: Mapping[str, int]) -> Iterator[str]:
    """What has grown by more than its limit."""
    for what, limit in limits.items():
        before, after = medians(series, what)
        if after - before > limit:
            yield f"{what} grew from {before:,g} to {after:,g}, by more than {limit:,}"


def summary(series: Sequence[Sample]) -> str:
    """What a process has held."""
    parts = []
    for what in LIMITS:
        before, after = medians(series, what)
        unit = MIB if what == "memory" else 1
        parts.append(f"{what} {before / unit:.4g} to {after / unit:.4g}")
    return ", ".join(parts)


LONG_LIVED = ("p0", "d0")
DEADLY = ("kill prefill", "kill decode", "restart prefill", "restart decode")
QUIET, RECONNECT = "no fault", "reconnect"
FAULTS = {
    **KINDS,
    QUIET: ("d", lambda run: run.quiet()),
    RECONNECT: ("d", lambda run: run.reconnect()),
}
USUAL = (*FAULTS, QUIET, QUIET, RECONNECT)
dsv4 = pools.dsv4.but(num_pages=160, num_window_pages=400, num_slots=24)
FAMILIES = {
    "mha": ((mha, mha.but(page_size=4, num_pages=320)), (mha, mha)),
    "dsv4": ((dsv4, dsv4), (dsv4, dsv4.but(page_size=16, num_pages=80))),
    "hybrid": ((hybrid, hybrid), (hybrid, hybrid)),
}
"""By name, pools of p0, p1 and of d0, d1."""


class SoakRun(Run):
    """A round: requests of a few documents, whose lengths meet page ends and checkpoints."""

    def course(self) -> Course:
        pick = self.random
        tokens = pick.choice((1, 40, CHECKPOINT, 2 * CHECKPOINT, 200, MOST_TOKENS - 1))
        stops = {pick.randrange(1, tokens) for _ in range(pick.randrange(4)) if tokens > 1}
        return Course(
            tokens=tokens,
            salt=pick.randrange(len(DOCUMENTS)),
            stops=tuple(sorted(stops)),
            gap=pick.choice((0.0, 0.002, 0.02)),
            start=0,
            offered=pick.choice((0.0, 0.01)),
            wanted=pick.choice((0.0, 0.01)),
        )

    def quiet(self) -> None:
        for _ in range(4):
            self.wave()
        self.must_succeed(self.rooms)

    def reconnect(self) -> None:
        """A decode gives a prefill up while requests are under way, and connects to it again."""
        link = self.random.choice([*self.world.shape.links()])
        self.strike("reconnect", link, self.world.addresses(link))
        self.settle()
        touched = {(room.link, room.sinks[0]) for room in self.rooms} & {(link, self.victim)}
        self.must_succeed([r for r in self.rooms if (r.link, r.sinks[0]) not in touched])
        self.world.ensure()


@dataclass
class Slice:
    """One engine and one family, for some seconds, with these faults. `engines` makes the engines
    of some processes.
    """

    engine: str
    family: str
    seconds: float
    seed: int
    faults: Sequence[str] = USUAL
    engines: Mapping[str, Callable[[], Engine]] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    rounds: Counter[str] = field(default_factory=Counter)
    """How many, by fault."""
    rooms: Counter[str] = field(default_factory=Counter)
    prefix: Counter[str] = field(default_factory=Counter)
    """Requests on the long-lived processes that began with a reused prefix."""
    late: int = 0
    """Rounds in which something came later than it must, which a busy machine causes too."""

    @property
    def name(self) -> str:
        return f"{self.engine} {self.family}"

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.rounds.total():,} rounds, {self.rooms['succeeded']:,} rooms "
            f"succeeded, {self.rooms['failed']:,} failed, {self.prefix['hits']:,} reused prefixes, "
            f"{self.late:,} late"
        )

    def run(self) -> Iterator[float]:
        """Makes rounds until the time is over and there are enough samples; yields the seconds
        since the beginning after each. Raises Violation.
        """
        prefill, decode = FAMILIES[self.family]
        shape = Shape(self.name, self.engine, prefill, decode, keys=True)
        world = World(shape, child=SoakChild, engines=self.engines)
        began, pick = time.monotonic(), random.Random(f"{self.seed} {self.name}")
        try:
            world.ensure()
            while (now := time.monotonic() - began) < self.seconds or self._few():
                self._round(world, pick)
                self._look(world)
                yield now
            world.close()
        finally:
            world.kill()

    def _few(self) -> bool:
        return min(len(self.samples.get(name, ())) for name in LONG_LIVED) < LEAST

    def _round(self, world: World, pick: random.Random) -> None:
        fault = pick.choice(self.faults)
        side, strike = FAULTS[fault]
        victim = side + ("1" if fault in DEADLY else pick.choice("01"))
        run = SoakRun(world, Outcome(0, fault, self.name), pick, victim)
        world.rooms.clear()
        try:
            strike(run)
        except Late:
            self.late += 1
            self._recover(run)
        try:
            run.rejoin()
        except Late:
            self.late += 1
        run.settle()
        run.check()
        self.rounds[fault] += 1
        self.rooms["succeeded"] += run.outcome.succeeded
        self.rooms["failed"] += run.outcome.failed

    def _recover(self, run: Run) -> None:
        """After a fault whose effect came late: all processes run, and all rooms end."""
        for name in [*run.world.peers]:
            run.world.ask(name, "untrip")
        run.world.ensure()
        run.settle()

    def _look(self, world: World) -> None:
        self.prefix.clear()
        for name in LONG_LIVED:
            audit = world.ask(name, "audit")
            leases = audit["leases"]
            items = sum(every - free for every, free in audit["items"].values())
            items += sum(leases.leased.values()) + sum(leases.quarantined.values())
            entry = sample(world.peers[name].process.pid, items)
            self.samples.setdefault(name, []).append(entry)
            self.prefix["hits"] += audit["prefix"].hits
