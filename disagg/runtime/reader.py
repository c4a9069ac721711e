"""Decode's reads: bound, cut into parts, posted to the engine and polled. Ranks are read side by
side, the reads of one rank one after another, so that one failure stops no other rank.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from disagg.engines.base import Engine, TransferError
from disagg.plan.bind import Columns
from disagg.protocol.decode_state import Link, Read
from disagg.protocol.events import ReadEnded, ReadFailed
from disagg.protocol.messages import Hello
from disagg.runtime.staging import NUM_BUFFERS, ReadPart, StagingBuffers

if TYPE_CHECKING:
    from kvpool.device import Event

log = logging.getLogger("disagg")

STAGED_IN_FLIGHT = NUM_BUFFERS // 2
"""Parts of one read that are in buffers at once: a rank that is stuck leaves some to the others."""
LOOKS_PER_TIMEOUT = 4
"""A longer pause between two steps than this part of the time-out is no time that a read took."""
SPIN_SECONDS = 1.0
"""How long parts in flight are polled without a pause after the last one has arrived, unless they
arrive in the background.
"""


ReadEvent = ReadFailed | ReadEnded


@dataclass(eq=False, slots=True)
class _InFlight:
    """A part of a read that was posted; with a staging buffer, until it is scattered from there."""

    transfer: Any
    part: ReadPart
    posted: float
    buffer: int | None
    arrived: bool = False
    event: Event | None = None

    def copying(self) -> bool:
        """Whether a device still copies out of the buffer."""
        return self.event is not None and not self.event.query()


@dataclass(eq=False, slots=True)
class _Active:
    """A read that has begun: the parts still to be posted, and those in flight."""

    read: Read
    parts: Iterator[ReadPart]
    left: bool = True
    next: ReadPart | None = None
    landed: float = -math.inf
    """When the last part arrived."""
    in_flight: deque[_InFlight] = field(default_factory=deque)
    buffers: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class _Lane:
    """Reads from one generation of one rank. `peer` is the engine's, once connected; `early` is
    what to connect to before the first read, until that was tried.
    """

    queue: deque[Read] = field(default_factory=deque)
    active: _Active | None = None
    columns: Columns = field(default_factory=Columns)
    peer: Any = None
    connected: bool = False
    early: tuple[Link, int, Hello] | None = None

    def connect(self, engine: Engine, hello: Hello) -> None:
        """Connects the engine, unless it is."""
        if not self.connected:
            self.peer = engine.connect(hello.metadata)
            self.connected = True


@dataclass(eq=False, slots=True)
class _Fence:
    """A peer that is given up, and the read whose bytes may land until that is done."""

    peer: Any
    active: _Active | None
    problem: str | None
    unfenceable: bool = False


class Reader:
    """Works through reads with one engine; used by one thread.

    Every read ends with a ReadEnded, once none of its bytes can land any more; if that takes time,
    a ReadFailed comes before it. A part that takes longer than `timeout` seconds has failed.
    """

    def __init__(
        self,
        engine: Engine,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
        stage: StagingBuffers | None = None,
    ) -> None:
        self._engine, self._timeout, self._clock = engine, timeout, clock
        self._stage = stage or StagingBuffers()
        self._lanes: dict[tuple[int, int, str], _Lane] = {}
        self._fences: list[_Fence] = []
        self._events: list[ReadEvent] = []
        self._moved, self._looked = 0.0, clock()
        self.busy = False
        """Whether the next step should follow at once."""

    def add(self, read: Read) -> None:
        """Takes a read over."""
        key = id(read.link), read.source, read.hello.generation
        self._lanes.setdefault(key, _Lane()).queue.append(read)

    def connect(self, link: Link, source: int, hello: Hello) -> None:
        """Connects the engine to a rank in the next step, so that its first read need not. What
        goes wrong then is for that read to find.
        """
        self._lanes.setdefault((id(link), source, hello.generation), _Lane()).early = (
            link,
            source,
            hello,
        )

    def cancel(self, attempt: str) -> None:
        """Posts nothing more of an attempt's reads."""
        for lane in self._lanes.values():
            for read in (*lane.queue, *([lane.active.read] if lane.active else ())):
                read.cancelled = read.cancelled or read.attempt == attempt

    def drop_peer(self, link: Link, source: int) -> None:
        """Gives a rank up, in all its generations: its rooms have failed."""
        for key in [key for key in self._lanes if key[:2] == (id(link), source)]:
            lane = self._lanes.pop(key)
            while lane.queue:
                self._end(lane.queue.popleft(), None)
            active = lane.active
            if active is not None and not active.in_flight:
                self._end(active.read, None)
                active = None
            if lane.connected:
                self._fences.append(_Fence(lane.peer, active, None))

    def step(self) -> list[ReadEvent]:
        """One step of every rank; returns the reads that have failed or ended."""
        self._excuse(self._clock())
        moved = [self._step(lane) for lane in list(self._lanes.values())]
        self._fences = [fence for fence in self._fences if not self._fenced(fence)]
        now = self._clock()
        if any(moved):
            self._moved = now
        in_flight = any(lane.active and lane.active.in_flight for lane in self._lanes.values())
        spins = in_flight and not self._engine.background and now - self._moved < SPIN_SECONDS
        self.busy = any(moved) or spins
        return self._take_events()

    def close(self) -> list[ReadEvent]:
        """Ends what is left, once the engine is closed and nothing can land."""
        for lane in self._lanes.values():
            if lane.active is not None:
                self._end(lane.active.read, "the endpoint was closed.")
            for read in lane.queue:
                self._end(read, "the endpoint was closed.")
        for fence in self._fences:
            if fence.active is not None:
                self._end(fence.active.read, fence.problem)
        self._lanes.clear()
        self._fences.clear()
        return self._take_events()

    def _excuse(self, now: float) -> None:
        """Time in which nobody looked counts as no read's: its engine could not go on."""
        pause = now - self._looked - self._timeout / LOOKS_PER_TIMEOUT
        self._looked = now
        for lane in self._lanes.values() if pause > 0 else ():
            for part in lane.active.in_flight if lane.active else ():
                part.posted = min(part.posted + pause, now)

    def _take_events(self) -> list[ReadEvent]:
        events, self._events = self._events, []
        return events

    def _end(self, read: Read, problem: str | None) -> None:
        self._events.append(ReadEnded(read, problem))

    def _step(self, lane: _Lane) -> bool:
        """Connects, begins a read, posts or polls its parts; whether anything has moved."""
        if lane.early is not None:
            self._connect_early(lane, *lane.early)
            return True
        active = lane.active
        read = active.read if active else lane.queue.popleft() if lane.queue else None
        if read is None:
            return False
        try:
            if active is not None:
                return self._go_on(lane, active)
            self._begin(lane, read)
            if lane.active is not None:
                self._go_on(lane, lane.active)
            return True
        except Exception as error:  # whatever goes wrong in one read fails that room and no other
            self._give_up(lane, read, error)
            return True

    def _connect_early(self, lane: _Lane, link: Link, source: int, hello: Hello) -> None:
        try:
            lane.connect(self._engine, hello)
        except Exception as error:
            log.info("%s: a read will try to connect again: %s", link.name(source), error)
        lane.early = None
        link.unconnected.discard(source)

    def _begin(self, lane: _Lane, read: Read) -> None:
        if read.cancelled:
            self._end(read, None)
            return
        lane.connect(self._engine, read.hello)
        began = time.perf_counter()
        batch = read.bind(lane.columns)
        read.metrics.bound(batch, time.perf_counter() - began)
        source = read.plan.sources[read.source]
        lane.active = _Active(read, self._stage.parts(batch, source, self._engine))

    def _go_on(self, lane: _Lane, active: _Active) -> bool:
        moved = False
        while active.in_flight and self._landed(active, active.in_flight[0]):
            part = active.in_flight.popleft()
            active.landed = self._clock()
            active.read.metrics.moved(part.part.payload, active.landed - part.posted)
            moved = True
        if active.in_flight:
            spent = self._clock() - max(active.in_flight[0].posted, active.landed)
            if spent > self._timeout:
                raise TransferError(f"nothing has arrived for {spent:.1f} s. The peer is stuck.")
        if active.left and active.read.cancelled:
            active.left = False
        while active.left and len(active.in_flight) < self._engine.parts_in_flight:
            if not self._post(lane, active):
                break
            moved = True
        if not active.left and not active.in_flight:
            lane.active = None
            self._end(active.read, None)
            moved = True
        return moved

    def _post(self, lane: _Lane, active: _Active) -> bool:
        """Posts the next part; False while it waits for a buffer."""
        part = active.next or next(active.parts, None)
        if part is None:
            active.left = False
            return True
        read, buffer = part.read, None
        if part.scatter is not None:
            if len(active.buffers) < STAGED_IN_FLIGHT:
                buffer = self._stage.take()
            active.next = part if buffer is None else None
            if buffer is None:
                return False
            active.buffers.add(buffer)
            read = replace(read, dst=read.dst + buffer)
        posted = self._clock()
        transfer = self._engine.read(lane.peer, read)
        active.in_flight.append(_InFlight(transfer, part, posted, buffer))
        return True

    def _landed(self, active: _Active, flight: _InFlight) -> bool:
        """Whether a part has arrived where it belongs."""
        if not flight.arrived:
            flight.arrived = self._engine.poll(flight.transfer)
            if not flight.arrived:
                return False
            if flight.part.scatter is not None and flight.buffer is not None:
                flight.event = self._stage.scatter(flight.part.scatter, flight.buffer)
        if flight.copying():
            return False
        if flight.buffer is not None:
            active.buffers.remove(flight.buffer)
            self._stage.give(flight.buffer)
        return True

    def _give_up(self, lane: _Lane, read: Read, error: Exception) -> None:
        """Its room fails now, its pages come back once nothing can land; the next reconnects."""
        problem = f"read from {read.link.name(read.source)}: {error}"
        active, lane.active = lane.active, None
        if active is not None:
            self._events.append(ReadFailed(read, problem))
        else:  # nothing of it was posted
            self._end(read, problem)
        if not lane.connected:
            return
        fence = _Fence(lane.peer, active, problem)
        lane.peer, lane.connected = None, False
        if not self._fenced(fence):
            self._fences.append(fence)

    def _fenced(self, fence: _Fence) -> bool:
        """Whether a peer is given up. Where that can never be known, pages and buffers stay in
        quarantine.
        """
        active = fence.active
        if fence.unfenceable:
            return False
        try:
            if active is not None and any(part.copying() for part in active.in_flight):
                return False
            if not self._engine.fence(fence.peer, 0):
                return False
        except Exception as error:
            log.error("pages stay in quarantine, a read cannot be ended for sure: %s", error)
            fence.unfenceable = True
            if active is not None:
                self._stage.mark_lost(len(active.buffers))
            return False
        if active is not None:
            self._stage.give(*active.buffers)
            self._end(active.read, fence.problem)
        return True
