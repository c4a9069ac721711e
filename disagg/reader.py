"""Decode's reads: bound, cut into parts, posted to the engine and polled. Ranks are read side by
side, the reads of one rank one after another, so that what fails takes nothing else along.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from disagg.bind import Columns, CopyBatch
from disagg.decode_room import Link, Read
from disagg.engines.base import Engine, TransferError
from disagg.metrics import RoomMetrics
from disagg.plan import TransferPlan

log = logging.getLogger("disagg")

DEPTH = 2
"""Parts of one read that are in flight at once."""
SPIN_SECONDS = 1.0
"""How long parts in flight are polled without a pause after the last one has arrived."""


@dataclass(eq=False, slots=True)
class _Part:
    """A part of a read that is in flight."""

    transfer: Any
    nbytes: int
    posted: float


@dataclass(eq=False, slots=True)
class _Active:
    """A read that has begun: the parts still to be posted, and those in flight."""

    read: Read
    parts: Iterator[CopyBatch]
    metrics: RoomMetrics
    left: bool = True
    in_flight: deque[_Part] = field(default_factory=deque)


@dataclass(eq=False, slots=True)
class _Lane:
    """Reads from one life of one rank. `peer` is the engine's, once connected."""

    queue: deque[Read] = field(default_factory=deque)
    active: _Active | None = None
    columns: Columns = field(default_factory=Columns)
    peer: Any = None
    connected: bool = False
    prepared: TransferPlan | None = None


@dataclass(eq=False, slots=True)
class _Fence:
    """A peer that is given up, and the read of which bytes may land until that is done."""

    peer: Any
    read: Read | None
    problem: str | None
    hopeless: bool = False


class Reader:
    """Works through reads with one engine; used by one thread.

    `wanted(read)` gives the metrics to count in, or None if the room has failed meanwhile.
    `ended(read, problem)` is called for each, once nothing of it can land any more; before it
    `failed(read, problem)` if that takes time. A part that takes longer than `timeout` seconds has
    failed.
    """

    def __init__(
        self,
        engine: Engine,
        timeout: float,
        wanted: Callable[[Read], RoomMetrics | None],
        failed: Callable[[Read, str], None],
        ended: Callable[[Read, str | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._timeout, self._clock = engine, timeout, clock
        self._wanted, self._failed, self._ended = wanted, failed, ended
        self._lanes: dict[tuple[int, int, str], _Lane] = {}
        self._fences: list[_Fence] = []
        self._moved = 0.0

    def add(self, read: Read) -> None:
        """Takes a read over."""
        key = id(read.link), read.source, read.hello.generation
        self._lanes.setdefault(key, _Lane()).queue.append(read)

    def part(self, link: Link, source: int) -> None:
        """Gives a rank up, in all its lives: its rooms have failed."""
        for key in [key for key in self._lanes if key[:2] == (id(link), source)]:
            lane = self._lanes.pop(key)
            while lane.queue:
                self._ended(lane.queue.popleft(), None)
            active = lane.active
            if active is not None and not active.in_flight:
                self._ended(active.read, None)
                active = None
            if lane.connected:
                self._fences.append(_Fence(lane.peer, active.read if active else None, None))

    def step(self) -> bool:
        """One step of every rank; whether the next should follow at once."""
        moved = [self._step(lane) for lane in list(self._lanes.values())]
        self._fences = [fence for fence in self._fences if not self._fenced(fence)]
        now = self._clock()
        if any(moved):
            self._moved = now
        in_flight = any(lane.active and lane.active.in_flight for lane in self._lanes.values())
        return any(moved) or (in_flight and now - self._moved < SPIN_SECONDS)

    def stop(self) -> None:
        """Ends what is left, once the engine is closed and nothing can land."""
        for lane in self._lanes.values():
            if lane.active is not None:
                self._ended(lane.active.read, "the endpoint was closed.")
            for read in lane.queue:
                self._ended(read, "the endpoint was closed.")
        for fence in self._fences:
            if fence.read is not None:
                self._ended(fence.read, fence.problem)
        self._lanes.clear()
        self._fences.clear()

    def _step(self, lane: _Lane) -> bool:
        """Begins, posts or polls one thing; whether anything has moved."""
        active = lane.active
        read = active.read if active else lane.queue.popleft() if lane.queue else None
        if read is None:
            return False
        try:
            if active is None:
                self._begin(lane, read)
                return True
            return self._go_on(lane, active)
        except Exception as error:  # whatever goes wrong in one read fails that room and no other
            self._give_up(lane, read, error)
            return True

    def _begin(self, lane: _Lane, read: Read) -> None:
        metrics = self._wanted(read)
        if metrics is None:
            self._ended(read, None)
            return
        if not lane.connected:
            lane.peer = self._engine.connect(read.hello.metadata)
            lane.connected, lane.prepared = True, None
        if lane.prepared is not read.plan:  # another rank of the link may have come back
            self._engine.prepare(lane.peer, read.plan)
            lane.prepared = read.plan
        began = time.perf_counter()
        batch = read.plan.bind(
            read.source,
            read.source_address,
            read.dest_address,
            tokens=read.tokens,
            columns=lane.columns,
        )
        metrics.bound(batch, time.perf_counter() - began)
        parts = batch.split(self._engine.max_bytes, self._engine.max_runs)
        lane.active = _Active(read, parts, metrics)

    def _go_on(self, lane: _Lane, active: _Active) -> bool:
        moved = False
        while active.in_flight and self._engine.poll(active.in_flight[0].transfer):
            part = active.in_flight.popleft()
            active.metrics.moved(part.nbytes, self._clock() - part.posted)
            moved = True
        if active.in_flight:
            spent = self._clock() - active.in_flight[0].posted
            if spent > self._timeout:
                raise TransferError(f"nothing has arrived for {spent:.1f} s. The peer is stuck.")
        if active.left and not self._wanted(active.read):
            active.left = False
        if active.left and len(active.in_flight) < DEPTH:
            batch = next(active.parts, None)
            if batch is None:
                active.left = False
            else:
                posted = self._clock()
                transfer = self._engine.read(lane.peer, batch)
                active.in_flight.append(_Part(transfer, batch.total, posted))
                moved = True
        if not active.left and not active.in_flight:
            lane.active = None
            self._ended(active.read, None)
            moved = True
        return moved

    def _give_up(self, lane: _Lane, read: Read, error: Exception) -> None:
        """Its room fails now, its pages come back once nothing can land; the next reconnects."""
        problem = f"read from {read.link.name(read.source)}: {error}"
        touched, lane.active = lane.active is not None, None
        if touched:
            self._failed(read, problem)
        else:  # nothing of it was posted
            self._ended(read, problem)
        if not lane.connected:
            return
        fence = _Fence(lane.peer, read if touched else None, problem)
        lane.peer, lane.connected = None, False
        if not self._fenced(fence):
            self._fences.append(fence)

    def _fenced(self, fence: _Fence) -> bool:
        """Whether a peer is given up. Where that can never be known, pages stay in quarantine."""
        try:
            if fence.hopeless or not self._engine.fence(fence.peer, 0):
                return False
        except Exception as error:
            log.error("pages stay in quarantine, a peer cannot be fenced: %s", error)
            fence.hopeless = True
            return False
        if fence.read is not None:
            self._ended(fence.read, fence.problem)
        return True
