"""Decode's reads: bound, cut into parts, posted to the engine and polled. Ranks are read side by
side, each in its lane, so that one failure stops no other rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from disagg.engines.base import Engine
from disagg.protocol.events import ReaderEvent
from disagg.protocol.messages import Hello
from disagg.protocol.peers.link import Link, Read
from disagg.runtime.reads.begun import ReadContext, TrackedRead
from disagg.runtime.reads.lane import Lane
from disagg.runtime.staging import StagingBuffers

LOOKS_PER_TIMEOUT = 4
"""A longer pause between two steps than this part of the time-out is no time that a read took."""
SPIN_SECONDS = 1.0
"""How long parts in flight are polled without a pause after the last one has arrived, unless they
arrive in the background.
"""


class Reader:
    """Works through reads with one engine, in one thread; reports events, and changes nothing of
    the machine's. Every read ends with a ReadEnded, once none of its bytes can land any more; if
    that takes time, a ReadFailed comes before it. A part that takes longer than `timeout` seconds
    has failed.
    """

    def __init__(
        self,
        engine: Engine,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
        stage: StagingBuffers | None = None,
    ) -> None:
        self._context = ReadContext(
            engine=engine, stage=stage or StagingBuffers(), timeout=timeout, clock=clock
        )
        self._lanes: dict[tuple[int, int, str], Lane] = {}
        self._active: dict[Lane, None] = {}  # those with work: a turn costs nothing for others
        self._dropped: list[Lane] = []
        self._moved, self._looked = 0.0, clock()
        self.busy = False
        """Whether the next step should follow at once."""

    @property
    def waits(self) -> bool:
        """Whether there is something to ask an engine for, again and again."""
        return bool(self._dropped or self._active)

    def add(self, read: Read) -> None:
        """Takes a read over."""
        lane = self._lane(read.link, read.source, read.hello)
        lane.queue.append(TrackedRead(read))
        self._active[lane] = None

    def connect(self, link: Link, source: int, hello: Hello) -> None:
        """Connects the engine to a rank in the next step, so that its first read need not. What
        goes wrong then is for that read to find.
        """
        lane = self._lane(link, source, hello)
        lane.connects_early = True
        self._active[lane] = None

    def cancel(self, attempt: str) -> None:
        """Posts nothing more of an attempt's reads."""
        for tracked in self._reads():
            tracked.cancelled = tracked.cancelled or tracked.read.attempt == attempt

    def drop_peer(self, link: Link, source: int) -> None:
        """Gives a rank up, in all its generations: its rooms have failed."""
        for key in [key for key in self._lanes if key[:2] == (id(link), source)]:
            lane = self._lanes.pop(key)
            self._active.pop(lane, None)
            lane.drop()
            self._dropped.append(lane)

    def step(self, waits: bool = True) -> list[ReaderEvent]:
        """One step of every rank that has work; returns what has happened. With `waits=False` what
        may take time is left to the next step: to connect, to give up a peer, and all reads of an
        engine that copies in its calls.
        """
        self._excuse(self._context.clock())
        background, lanes = self._context.engine.background, list(self._active)
        steps = [waits or (background and lane.connected) for lane in lanes]
        moved = [lane.step() for lane, step in zip(lanes, steps) if step]
        if waits:
            for lane in (*lanes, *self._dropped):
                lane.step_fences()
            self._dropped = [lane for lane in self._dropped if lane.fences]
        for lane in lanes:
            if not (lane.has_work or lane.fences):
                del self._active[lane]
        now = self._context.clock()
        if any(moved):
            self._moved = now
        in_flight = any(lane.in_flight() for lane in lanes)
        spins = in_flight and not background and now - self._moved < SPIN_SECONDS
        later = any(lane.has_work for lane, step in zip(lanes, steps) if not step)
        self.busy = any(moved) or spins or later
        return self._context.take_events()

    def close(self) -> list[ReaderEvent]:
        """Ends what is left, once the engine is closed and nothing can land."""
        for tracked in (*self._reads(), *self._context.quarantined):
            self._context.end(tracked, "the endpoint was closed.")
        self._context.quarantined.clear()
        self._lanes.clear()
        self._active.clear()
        self._dropped.clear()
        return self._context.take_events()

    def _lane(self, link: Link, source: int, hello: Hello) -> Lane:
        """The lane of one generation of a rank."""
        key = id(link), source, hello.generation
        if key not in self._lanes:
            self._lanes[key] = Lane(self._context, link, source, hello)
        return self._lanes[key]

    def _reads(self) -> list[TrackedRead]:
        """All reads that have not ended, but those in quarantine."""
        return [tracked for lane in (*self._active, *self._dropped) for tracked in lane.reads()]

    def _excuse(self, now: float) -> None:
        """Time in which nobody looked counts as no read's: its engine could not go on."""
        pause = now - self._looked - self._context.timeout / LOOKS_PER_TIMEOUT
        self._looked = now
        for lane in self._active if pause > 0 else ():
            for part in lane.in_flight():
                part.posted = min(part.posted + pause, now)
                part.since = min(part.since + pause, now)
