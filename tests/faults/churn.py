"""Thousands of requests through one pair of endpoints, each in a process of its own.

`python -m tests.faults.churn --requests 10000` prints memory, files and threads of both.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.engines.base import create_engine
from disagg.runtime.staging import MIN_STAGING
from kvpool import Allocator, OutOfPages
from kvpool.allocation.allocator import Request
from kvpool.layout import RequestAddress
from tests import pools
from tests.disagg.runtime.farm import FORKS
from tests.faults.values import put, wrong

AT_ONCE = 8
PREFIX, PREFIX_SALT = 40, 99
"""Tokens of a prefix that both sides hold from the beginning, and that requests share in part."""
# about as many pages as concurrent requests need on average, so that some must wait
pool = pools.mla.but(kv_lora_rank=64, qk_rope_head_dim=16, page_size=8, num_pages=90)


@dataclass(frozen=True)
class Turn:
    """One request; both sides draw the same."""

    number: int
    tokens: int
    shared: int
    """Tokens of the shared prefix."""
    edges: tuple[int, ...]
    aborted_by: str

    @property
    def salt(self) -> int:
        """Salt of the values after the prefix."""
        return self.number % 32


def turns(count: int) -> Iterator[Turn]:
    """All requests, in order."""
    pick = random.Random(count)
    for number in range(count):
        shared = pick.choice((0, 0, 8, 13, PREFIX))
        tokens = shared + pick.randrange(1, 160)
        edges = {pick.randrange(1, tokens + 1) for _ in range(pick.randrange(3))} | {tokens}
        aborted = pick.choice(("prefill", "decode")) if pick.random() < 0.1 else ""
        yield Turn(number, tokens, shared, (0, *sorted(edges)), aborted)


@dataclass
class Sample:
    """What a process holds after a number of requests. Memory in bytes."""

    requests: int
    seconds: float
    memory: int
    files: int
    threads: int


@dataclass
class Report:
    """What one side has seen."""

    samples: list[Sample] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    waited: int = 0
    """How often there were no pages for the next request."""
    problems: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Open:
    """A request under way."""

    turn: Turn
    request: Request
    address: RequestAddress
    chunks: int = 0
    ended: bool = False


class Side:
    """One endpoint, its pool, and the requests under way."""

    def __init__(self, endpoint: Any, held: Any, received: bool) -> None:
        self.endpoint, self._pool, self._received = endpoint, held, received
        self.report = Report()
        self._allocator = Allocator(held)
        self._prefix = self._allocator.new_request()
        self._allocator.extend(self._prefix, PREFIX)
        put(held, self._prefix.address(), range(PREFIX), PREFIX_SALT)
        self._free = self._allocator.free_pages
        self._open: list[Open] = []

    def run(self, count: int, every: int) -> None:
        """Makes all requests; every so often it waits until none is open, and looks at itself."""
        began, waiting = time.monotonic(), turns(count)
        for done in range(0, count, every):
            batch = list(islice(waiting, every))
            while batch or self._open:
                while batch and len(self._open) < AT_ONCE and self._begin(batch[0]):
                    del batch[0]
                still = [each for each in self._open if not self._step(each)]
                if len(still) == len(self._open):
                    time.sleep(0.0005)
                self._open = still
            self._look(done + every, time.monotonic() - began)

    def _begin(self, turn: Turn) -> bool:
        """Allocates, and begins the request; False if there are no pages."""
        request = None
        try:
            if turn.shared:
                request = self._allocator.fork(self._prefix, turn.shared)
            else:
                request = self._allocator.new_request()
            more = turn.tokens - turn.shared
            self._allocator.extend(request, more, received=self._received)
        except OutOfPages:
            if request is not None:
                self._allocator.free(request)
            self.report.waited += 1
            return False
        found = Open(turn, request, request.address())
        if self._received:
            self.endpoint.receive(turn.number, found.address, start=turn.shared)
        self._open.append(found)
        return True

    def _step(self, each: Open) -> bool:
        """Whether a request is over, and its pages are back."""
        turn, name = each.turn, each.turn.number
        if not self._received:
            self._offer(each)
        state = self.endpoint.poll(name)
        mine = turn.aborted_by == ("decode" if self._received else "prefill")
        if mine and state is KVPoll.Transferring:
            self.endpoint.abort(name, "no longer needed")
            state = self.endpoint.poll(name)
        if state.ended and not each.ended:
            each.ended = True
            self._end(each, state)
        if not each.ended or (self._received and self.endpoint.reading(name)):
            return False
        self.endpoint.forget(name)
        self._allocator.free(each.request)
        return True

    def _offer(self, each: Open) -> None:
        edges = each.turn.edges
        begun = each.chunks > 0  # until then the room may not be known here
        if each.chunks == len(edges) - 1 or (begun and self.endpoint.poll(each.turn.number).ended):
            return
        start, stop = edges[each.chunks : each.chunks + 2]
        put(self._pool, each.address, range(max(start, each.turn.shared), stop), each.turn.salt)
        last = stop == each.turn.tokens
        self.endpoint.send(each.turn.number, each.address, tokens=range(start, stop), last=last)
        each.chunks += 1

    def _end(self, each: Open, state: KVPoll) -> None:
        turn, report = each.turn, self.report
        report.ends[f"{state}{', to be aborted' * bool(turn.aborted_by)}"] += 1
        if state is KVPoll.Failed and not turn.aborted_by:
            report.problems.append(f"{turn}: {self.endpoint.failure(turn.number)}")
        if self._received and state is KVPoll.Success:
            behind = range(turn.shared, turn.tokens)
            count = wrong(self._pool, each.address, behind, turn.salt)
            count += wrong(self._pool, each.address, range(turn.shared), PREFIX_SALT)
            if count:
                report.problems.append(f"{turn}: {count} wrong bytes")

    def _look(self, requests: int, seconds: float) -> None:
        gc.collect()
        self._allocator.check_integrity()
        leases = self.endpoint.leases()
        if self._allocator.free_pages != self._free:
            self.report.problems.append(f"{self._allocator.free_pages} of {self._free} pages free")
        if any(leases.leased.values()) or any(leases.quarantined.values()):
            self.report.problems.append(f"still leased: {leases}")
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        memory = pages * resource.getpagesize()
        self.report.samples.append(Sample(requests, seconds, memory, files, threads))


def _main(pipe: Any, engine: str, side: str, count: int, every: int) -> None:
    held = pool()
    if side == "prefill":
        endpoint: Any = PrefillEndpoint(held.layout, create_engine(engine), lease=60.0)
        pipe.send(endpoint.address)
    else:
        # buffers for small runs become resident one by one, as they are first used
        endpoint = DecodeEndpoint(held.layout, create_engine(engine), staging=MIN_STAGING)
        endpoint.connect([pipe.recv()], timeout=60)
    with endpoint:
        this = Side(endpoint, held, side == "decode")
        this.run(count, every)
        pipe.send(this.report)
        pipe.recv()  # until the other side has ended too


def churn(engine: str, count: int, every: int) -> dict[str, Report]:
    """Makes `count` requests; both sides take a sample after each `every`."""
    pipes, processes, found = {}, [], {}
    for side in ("prefill", "decode"):
        pipes[side], there = FORKS.Pipe()
        given = (there, engine, side, count, every)
        processes.append(FORKS.Process(target=_main, args=given, daemon=True))
        processes[-1].start()
        there.close()
    try:
        pipes["decode"].send(pipes["prefill"].recv())
        for side, pipe in pipes.items():
            found[side] = pipe.recv()
        for pipe, process in zip(pipes.values(), processes):
            pipe.send(None)
            process.join(60)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    return found


def main(arguments: Sequence[str]) -> int:
    """Prints a table for each side; returns how many problems there were."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.churn", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--engine", default="local")
    given = parser.parse_args(arguments)
    problems = 0
    for side, report in churn(given.engine, given.requests, given.requests // 10).items():
        ends = ", ".join(f"{end} {count:,}" for end, count in sorted(report.ends.items()))
        print(f"{side}: {ends}; waited for pages {report.waited:,} times\n")
        print("| requests | seconds | memory, MiB | files | threads |\n|--:|--:|--:|--:|--:|")
        for at in report.samples:
            memory = at.memory / (1 << 20)
            print(
                f"| {at.requests} | {at.seconds:.0f} | {memory:.1f} | {at.files} | {at.threads} |"
            )
        print(*report.problems, sep="\n")
        problems += len(report.problems)
    return problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
