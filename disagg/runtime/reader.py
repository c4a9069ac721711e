"""Decode's reads: bound, cut into parts, posted to the engine and polled. Ranks are read side by
side, so that one failure stops no other rank. The reads of one rank begin in order; small ones are
in flight together, and those that another's failure has stopped go on after it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
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
READS_AT_ONCE = 64
"""Reads of one rank that are in flight together, at most."""
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
    since: float
    """When a part that was posted no later than this one has arrived last, or this was posted."""
    arrived: bool = False
    event: Event | None = None

    def copying(self) -> bool:
        """Whether a device still copies out of the buffer."""
        return self.event is not None and not self.event.query()


@dataclass(eq=False, slots=True)
class _Active:
    """A read that has begun: the parts still to be posted, and those in flight. `columns` hold its
    runs.
    """

    read: Read
    parts: Iterator[ReadPart]
    columns: Columns
    left: bool = True
    next: ReadPart | None = None
    in_flight: deque[_InFlight] = field(default_factory=deque)

    @property
    def buffers(self) -> list[int]:
        """Staging buffers that its parts take up."""
        return [part.buffer for part in self.in_flight if part.buffer is not None]

    def stopped(self) -> None:
        """Parts in flight, of which no byte can land any more, are to be posted again."""
        again = [flight.part for flight in self.in_flight]
        held = [] if self.next is None else [self.next]
        self.parts, self.next = chain(again, held, self.parts), None
        self.left = self.left or bool(again)
        self.in_flight.clear()


@dataclass(eq=False, slots=True)
class _Lane:
    """Reads from one generation of one rank: those that wait, and those that have begun. `peer` is
    the engine's, once connected; `early` is what to connect to before the first read, until that
    was tried. `spare` are columns that no read uses.
    """

    queue: deque[Read] = field(default_factory=deque)
    active: list[_Active] = field(default_factory=list)
    spare: list[Columns] = field(default_factory=list)
    peer: Any = None
    connected: bool = False
    early: tuple[Link, int, Hello] | None = None

    def connect(self, engine: Engine, hello: Hello) -> None:
        """Connects the engine, unless it is."""
        if not self.connected:
            self.peer = engine.connect(hello.metadata)
            self.connected = True

    @property
    def in_flight(self) -> list[_InFlight]:
        """All parts in flight."""
        return [part for active in self.active for part in active.in_flight]

    def room_for_more(self, most: int) -> bool:
        """Whether another read may begin, with at most `most` bytes in flight before it."""
        if any(active.left for active in self.active) or len(self.active) >= READS_AT_ONCE:
            return False
        return not self.active or sum(part.part.read.total for part in self.in_flight) < most

    def end(self, active: _Active) -> None:
        """A read has nothing left to do."""
        self.active.remove(active)
        self.spare.append(active.columns)


@dataclass(eq=False, slots=True)
class _Fence:
    """A peer that is given up, and the reads whose bytes may land until that is done: the one that
    has failed, and others of its lane, which go on then.
    """

    peer: Any
    failed: _Active | None
    problem: str | None
    others: list[_Active] = field(default_factory=list)
    lane: _Lane | None = None

    @property
    def reads(self) -> list[_Active]:
        """All of them."""
        return [*self.others, *([self.failed] if self.failed else ())]


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
        self._quarantined: list[tuple[Read, str | None]] = []
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
        begun = [active for lane in self._lanes.values() for active in lane.active]
        begun += [active for fence in self._fences for active in fence.others]
        waiting = [read for lane in self._lanes.values() for read in lane.queue]
        for read in (*waiting, *(active.read for active in begun)):
            read.cancelled = read.cancelled or read.attempt == attempt

    def drop_peer(self, link: Link, source: int) -> None:
        """Gives a rank up, in all its generations: its rooms have failed."""
        for key in [key for key in self._lanes if key[:2] == (id(link), source)]:
            lane = self._lanes.pop(key)
            while lane.queue:
                self._end(lane.queue.popleft(), None)
            landing = [active for active in lane.active if active.in_flight]
            for active in lane.active:
                if not active.in_flight:
                    self._end(active.read, None)
            if lane.connected:
                self._fences.append(_Fence(lane.peer, None, None, landing))

    def step(self, waits: bool = True) -> list[ReadEvent]:
        """One step of every rank; returns the reads that have failed or ended. With `waits=False`
        what may take time is left to the next step: to connect, to give up a peer, and all reads of
        an engine that copies in its calls.
        """
        self._excuse(self._clock())
        lanes = list(self._lanes.values())
        steps = [waits or (self._engine.background and lane.connected) for lane in lanes]
        moved = [self._step(lane) for lane, step in zip(lanes, steps) if step]
        if waits:
            self._fences = [fence for fence in self._fences if not self._fenced(fence)]
        now = self._clock()
        if any(moved):
            self._moved = now
        in_flight = any(active.in_flight for lane in lanes for active in lane.active)
        spins = in_flight and not self._engine.background and now - self._moved < SPIN_SECONDS
        left = [lane for lane, step in zip(lanes, steps) if not step]
        later = any(lane.queue or lane.early or lane.active for lane in left)
        self.busy = any(moved) or spins or later
        return self._take_events()

    def close(self) -> list[ReadEvent]:
        """Ends what is left, once the engine is closed and nothing can land."""
        for lane in self._lanes.values():
            for read in (*(active.read for active in lane.active), *lane.queue):
                self._end(read, "the endpoint was closed.")
        for fence in self._fences:
            for active in fence.reads:
                self._end(active.read, fence.problem)
        for read, problem in self._quarantined:
            self._end(read, problem)
        self._quarantined.clear()
        self._lanes.clear()
        self._fences.clear()
        return self._take_events()

    def _excuse(self, now: float) -> None:
        """Time in which nobody looked counts as no read's: its engine could not go on."""
        pause = now - self._looked - self._timeout / LOOKS_PER_TIMEOUT
        self._looked = now
        for lane in self._lanes.values() if pause > 0 else ():
            for part in lane.in_flight:
                part.posted = min(part.posted + pause, now)
                part.since = min(part.since + pause, now)

    def _take_events(self) -> list[ReadEvent]:
        events, self._events = self._events, []
        return events

    def _end(self, read: Read, problem: str | None) -> None:
        self._events.append(ReadEnded(read, problem))

    def _step(self, lane: _Lane) -> bool:
        """Connects, polls parts, begins reads and posts theirs; whether anything has moved."""
        if lane.early is not None:
            self._connect_early(lane, *lane.early)
            return True
        moved = False
        for active in list(lane.active):
            try:
                lane.connect(self._engine, active.read.hello)  # again, after another's failure
                moved |= self._go_on(lane, active)
            except Exception as error:  # what goes wrong in one read fails that room and no other
                self._give_up(lane, active, error)
                return True
        while lane.queue and lane.room_for_more(self._engine.max_bytes):
            moved = True
            if not self._begin(lane, lane.queue.popleft()):
                break
        return moved

    def _connect_early(self, lane: _Lane, link: Link, source: int, hello: Hello) -> None:
        try:
            lane.connect(self._engine, hello)
        except Exception as error:
            log.info("%s: a read will try to connect again: %s", link.name(source), error)
        lane.early = None
        link.unconnected.discard(source)

    def _begin(self, lane: _Lane, read: Read) -> bool:
        """Begins a read and posts its first parts; whether the next may begin in this step."""
        if read.cancelled:
            self._end(read, None)
            return True
        try:
            lane.connect(self._engine, read.hello)
            began = time.perf_counter()
            columns = lane.spare.pop() if lane.spare else Columns()
            batch = read.bind(columns)
            read.metrics.bound(batch, time.perf_counter() - began)
            parts = self._stage.parts(batch, read.plan.sources[read.source], self._engine)
        except Exception as error:  # nothing of it was posted
            self._end(read, _problem(read, error))
            return False
        active = _Active(read, parts, columns)
        lane.active.append(active)
        try:
            self._go_on(lane, active)
        except Exception as error:
            self._give_up(lane, active, error)
            return False
        return True

    def _go_on(self, lane: _Lane, active: _Active) -> bool:
        moved = False
        while active.in_flight and self._landed(active.in_flight[0]):
            part, now = active.in_flight.popleft(), self._clock()
            active.read.metrics.moved(part.part.payload, now - part.posted)
            for other in lane.in_flight:  # what was posted later may have waited for it
                if other.posted >= part.posted:
                    other.since = now
            moved = True
        if active.in_flight:
            spent = self._clock() - active.in_flight[0].since
            if spent > self._timeout:
                raise TransferError(f"nothing has arrived for {spent:.1f} s. The peer is stuck.")
        if active.left and active.read.cancelled:
            active.left = False
        while active.left and len(active.in_flight) < self._engine.parts_in_flight:
            if not self._post(lane, active):
                break
            moved = True
        if not active.left and not active.in_flight:
            lane.end(active)
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
            if sum(part.buffer is not None for part in lane.in_flight) < STAGED_IN_FLIGHT:
                buffer = self._stage.take()
            active.next = part if buffer is None else None
            if buffer is None:
                return False
            read = replace(read, dst=read.dst + buffer)
        posted = self._clock()
        flight = _InFlight(None, part, posted, buffer, posted)
        active.in_flight.append(flight)  # also if the engine raises: some bytes may land
        flight.transfer = self._engine.read(lane.peer, read)
        active.next = None
        return True

    def _landed(self, flight: _InFlight) -> bool:
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
            self._stage.give(flight.buffer)
        return True

    def _give_up(self, lane: _Lane, active: _Active, error: Exception) -> None:
        """Its room fails now, its pages come back once nothing can land. The next read, or the next
        part of another, reconnects.
        """
        problem = _problem(active.read, error)
        if not lane.connected:  # nothing is in flight
            lane.end(active)
            self._end(active.read, problem)
            return
        self._events.append(ReadFailed(active.read, problem))
        others = [other for other in lane.active if other is not active]
        fence = _Fence(lane.peer, active, problem, others, lane)
        lane.active, lane.peer, lane.connected = [], None, False
        if not self._fenced(fence):
            self._fences.append(fence)

    def _fenced(self, fence: _Fence) -> bool:
        """Whether a peer is given up, or can never be for sure; others' reads then go on."""
        waits = False
        for active in fence.reads:
            try:
                waits |= any(flight.copying() for flight in active.in_flight)
            except Exception as error:
                self._quarantine(fence, active, error)
        try:
            if waits or not self._engine.fence(fence.peer, 0):
                return False
        except Exception as error:
            for active in fence.reads:
                self._quarantine(fence, active, error)
            return True
        for active in fence.reads:
            self._stage.give(*active.buffers)
        if fence.failed is not None:
            self._end(fence.failed.read, fence.problem)
        for other in fence.others:
            other.stopped()
            if fence.lane is None or not any(fence.lane is lane for lane in self._lanes.values()):
                self._end(other.read, None)  # its peer was dropped
            else:
                fence.lane.active.append(other)
        return True

    def _quarantine(self, fence: _Fence, active: _Active, error: Exception) -> None:
        """Pages and buffers of a read stay as they are until the endpoint is closed."""
        log.error("pages stay in quarantine, a read cannot be ended for sure: %s", error)
        problem = fence.problem
        if active is fence.failed:
            fence.failed = None
        else:
            fence.others.remove(active)
            problem = _problem(active.read, error)
            self._events.append(ReadFailed(active.read, problem))
        self._stage.mark_lost(len(active.buffers))
        self._quarantined.append((active.read, problem))


def _problem(read: Read, error: Exception) -> str:
    return f"read from {read.link.name(read.source)}: {error}"
