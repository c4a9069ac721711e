"""Decode's reads: bound, cut into parts, posted to the engine and polled. Ranks are read side by
side, each in its lane, so that one failure stops no other rank. Reads of a lane begin in order;
small ones that are ready in one step are posted together. Reads that a failure stops go on later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from disagg.engines.base import Engine, TransferError
from disagg.log import log
from disagg.plan.bind import CopyBatch
from disagg.protocol.events import EngineConnected, ReadBegun, ReaderEvent
from disagg.protocol.messages import Hello
from disagg.protocol.peers.link import PrefillRank, Read
from disagg.runtime.reads import BegunReads, Fence, InFlight, ReadContext, TrackedRead
from disagg.runtime.sockets.offered import check_engine_host
from disagg.runtime.staging import StagingBuffers
from kvpool.layout import PoolLayout

LOOKS_PER_TIMEOUT = 4
"""A pause between two steps counts as a read's time up to this part of the time-out."""
SPIN_SECONDS = 1.0
"""How long parts in flight are polled without a pause after the last one has arrived, unless they
arrive in the background.
"""
# a room that is read alone costs a turn of the loop, which comes 5 ms late on a busy host
READS_AT_ONCE = 64
"""Reads of one rank that are in flight together, at most, and reads that are posted together."""


class Stuck(TransferError):
    """Nothing arrives from a peer."""


class Reader:
    """Works through reads with one engine, in one thread; reports events, and changes nothing of
    the machine's. Every read ends with a ReadEnded, once none of its bytes can land any more; if
    that takes time, a ReadFailed comes before it. A part fails after `timeout` seconds.
    """

    def __init__(
        self,
        engine: Engine,
        layout: PoolLayout,
        timeout: float,
        clock: Callable[[], float],
        stage: StagingBuffers,
    ) -> None:
        self._context = ReadContext(
            engine=engine, stage=stage, layout=layout, timeout=timeout, clock=clock
        )
        self._lanes: dict[tuple[PrefillRank, str], Lane] = {}
        self._active: dict[Lane, None] = {}  # those with work: a turn costs nothing for others
        self._dropped: list[Lane] = []
        self._moved, self._looked = 0.0, clock()
        self.busy = False
        """Whether the next step should follow at once."""

    @property
    def waits(self) -> bool:
        """Whether there is something to ask an engine for, again and again."""
        return bool(self._dropped or self._active)

    def add_read(self, read: Read) -> None:
        self._lane(read.rank, read.hello).queue.append(TrackedRead(read))

    def connect(self, rank: PrefillRank, hello: Hello) -> None:
        """Connects the engine to a rank in the next step; what goes wrong its first read finds."""
        self._lane(rank, hello).connects_early = True

    def cancel(self, attempt: str) -> None:
        """Posts nothing more of an attempt's reads."""
        for tracked in self._reads():
            tracked.cancelled = tracked.cancelled or tracked.read.attempt == attempt

    def drop_peer(self, rank: PrefillRank) -> None:
        """Gives a rank up, in all its generations: its rooms have failed."""
        for key in [key for key in self._lanes if key[0] is rank]:
            lane = self._lanes.pop(key)
            self._active.pop(lane, None)
            lane.drop()
            self._dropped.append(lane)

    def step(self, waits: bool = True) -> list[ReaderEvent]:
        """One step of every rank that has work; returns what has happened. With `waits=False` what
        may take time is left to the next step: to connect, to give up a peer, and all reads of an
        engine that copies in its calls.
        """
        now = self._context.clock()
        # time without a step is not a read's: its engine could not go on
        pause = now - self._looked - self._context.timeout / LOOKS_PER_TIMEOUT
        self._looked = now
        for lane in self._active if pause > 0 else ():
            for part in lane.in_flight():
                part.posted = min(part.posted + pause, now)
                part.since = min(part.since + pause, now)
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
            self._context.end_read(tracked, "the endpoint was closed.")
        self._context.quarantined.clear()
        self._lanes.clear()
        self._active.clear()
        self._dropped.clear()
        return self._context.take_events()

    def _lane(self, rank: PrefillRank, hello: Hello) -> Lane:
        """The lane of one generation of a rank, which has work now."""
        key = rank, hello.generation
        if key not in self._lanes:
            self._lanes[key] = Lane(self._context, rank, hello)
        self._active[self._lanes[key]] = None
        return self._lanes[key]

    def _reads(self) -> list[TrackedRead]:
        """All reads that have not ended, but those in quarantine."""
        return [tracked for lane in (*self._active, *self._dropped) for tracked in lane.reads()]


class Lane:
    """Reads that wait (`queue`), that have begun, and those of peers that are being given up
    (`fences`), of a rank that has said `hello`.
    """

    def __init__(self, context: ReadContext, rank: PrefillRank, hello: Hello) -> None:
        self.queue: deque[TrackedRead] = deque()
        self.connects_early = False
        """Whether the first read has to connect; False once that was tried."""
        self.connected = False
        self._rank, self._hello = rank, hello
        self.fences: list[Fence] = []
        self._context, self._engine = context, context.engine
        self._begun: list[BegunReads] = []
        self._peer: Any = None
        self._dropped = False

    def reads(self) -> Iterator[TrackedRead]:
        """All its reads that have not ended."""
        yield from self.queue
        for begun in (*self._begun, *(begun for fence in self.fences for begun in fence.reads)):
            yield from begun.reads

    def in_flight(self) -> list[InFlight]:
        return [flight for begun in self._begun for flight in begun.in_flight]

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do."""
        return bool(self.queue or self.connects_early or self._begun)

    def step(self) -> bool:
        """Connects, polls parts, begins reads and posts theirs; whether anything has moved."""
        if self.connects_early:
            self.connects_early = False
            try:
                self._connect()
            except Exception as error:
                log.info("%s: a read will try to connect again: %s", self._rank, error)
            self._context.events.append(EngineConnected(self._rank))
            return True
        moved = False
        for begun in list(self._begun):
            went_on = self._go_on(begun)
            if went_on is None:
                return True
            moved |= went_on
        while self.queue and self._room_for_more():
            moved = True
            if not self._begin():
                break
        return moved

    def step_fences(self) -> None:
        """Asks whether peers are given up: then their failed reads end, and the others go on."""
        fences, self.fences = self.fences, []
        for fence in fences:
            if not fence.passed(self._context):
                self.fences.append(fence)
                continue
            for begun in fence.reads:
                self._context.stage.give(*begun.buffers)
                if begun.problem is None and begun.apart is None and not self._dropped:
                    begun.stopped()
                    self._begun.append(begun)
                else:
                    self._finish(begun)

    def drop(self) -> None:
        """Gives the rank up: its rooms have failed."""
        self._dropped = True
        landing = [begun for begun in self._begun if begun.in_flight]
        waiting = [read for begun in self._begun if not begun.in_flight for read in begun.reads]
        for read in (*self.queue, *waiting):
            self._context.end_read(read)
        self.queue.clear()
        self._begun.clear()
        if self.connected:
            self.fences.append(Fence(self._peer, landing, self._context.clock()))

    def _connect(self) -> None:
        if not self.connected:
            check_engine_host(self._rank.address, self._engine, self._hello.metadata)
            self._peer = self._engine.connect(self._hello.metadata)
            self.connected = True

    def _room_for_more(self) -> bool:
        if any(begun.next for begun in self._begun) or len(self._begun) >= READS_AT_ONCE:
            return False
        return sum(flight.nbytes for flight in self.in_flight()) < self._engine.max_bytes

    def _begin(self) -> bool:
        """Begins and posts the next read, or small ones; whether more may begin in this step."""
        try:
            self._connect()
        except Exception as error:
            first = self.queue.popleft()
            self._context.end_read(first, first.problem(error))
            return False
        joined: list[TrackedRead] = []
        while self.queue and len(joined) < READS_AT_ONCE:
            tracked, problem = self.queue[0], None
            try:
                if not tracked.cancelled:
                    tracked.find_runs(self._context)
            except Exception as error:  # nothing of it was posted
                problem = tracked.problem(error)
            if tracked.cancelled or problem:
                self._context.end_read(self.queue.popleft(), problem)
                continue
            if joined and not tracked.small:
                break  # it begins in the next turn of this
            joined.append(self.queue.popleft())
            if not tracked.small:
                break
        return self._post_first(joined) if joined else True

    def _post_first(self, joined: list[TrackedRead]) -> bool:
        now, read, batch = self._context.clock(), joined[0].read, joined[0].batch
        for tracked in joined:
            begun = ReadBegun(tracked.read, now, tracked.bind_seconds, tracked.batch.shares)
            self._context.events.append(begun)
        if joined[1:]:
            src, dst, nbytes = map(np.concatenate, zip(*(tracked.batch for tracked in joined)))
            batch = CopyBatch(src, dst, nbytes)
        try:
            source = read.plan.sources[read.rank.source]
            parts = self._context.stage.parts(batch, source, self._engine)
            parts = chain(joined[0].converted or (), parts)
            self._begun.append(BegunReads(reads=joined, parts=parts, next=next(parts, None)))
        except Exception as error:
            for tracked in joined:
                self._context.end_read(tracked, tracked.problem(error))
            return False
        return self._go_on(self._begun[-1]) is not None

    def _go_on(self, begun: BegunReads) -> bool | None:
        """Whether anything of reads has moved; None if they have failed."""
        context = self._context
        try:
            self._connect()  # again, after another's failure
            moved = begun.land(context, self._begun)
            if begun.in_flight:
                spent = context.clock() - begun.in_flight[0].since
                if spent > context.timeout:
                    raise Stuck(f"nothing has arrived for {spent:.1f} s. The peer is stuck.")
            if all(tracked.cancelled for tracked in begun.reads):
                begun.next = None
            posted = False
            while begun.next and len(begun.in_flight) < self._engine.parts_in_flight:
                if not begun.post(begun.next, self._peer, context, self._begun):
                    break
                posted = True
            if posted and not moved:  # it may be there already
                begun.land(context, self._begun)
        except Exception as error:  # what goes wrong in one read fails that room and no other
            self._give_up(begun, error)
            return None
        ended = begun.next is None and not begun.in_flight
        if ended:
            self._begun.remove(begun)
            self._finish(begun)
        return moved or posted or ended

    def _finish(self, begun: BegunReads) -> None:
        """Ends reads whose bytes can no longer land, or queues each of them again."""
        if begun.apart is not None and begun.problem is None and not self._dropped:
            for tracked in begun.reads:
                tracked.alone = True
            self.queue.extendleft(reversed(begun.reads))
            return
        for read in begun.reads:
            self._context.end_read(read, begun.problem)

    def _give_up(self, begun: BegunReads, error: Exception) -> None:
        """Their rooms fail now, and the pages come back once nothing can land; of several rooms
        none does, but each is read for itself. What is posted next reconnects.
        """
        rooms = {tracked.read.room for tracked in begun.reads}
        if len(rooms) > 1 and not isinstance(error, Stuck):
            begun.apart = error
        elif self.connected:
            begun.fail(self._context, error)
        else:
            begun.problem = begun.reads[0].problem(error)
        if not self.connected:  # nothing is in flight
            self._begun.remove(begun)
            self._finish(begun)
            return
        self.fences.append(Fence(self._peer, self._begun, self._context.clock()))
        self._begun, self._peer, self.connected = [], None, False
        self.step_fences()
