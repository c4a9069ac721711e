"""Reads from one generation of one rank. They begin in order; small ones that are ready in one step
are posted together. Those that another's failure has stopped go on after it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from disagg.engines.base import TransferError
from disagg.plan.bind import CopyBatch
from disagg.protocol.events import EngineConnected, ReadBegun
from disagg.protocol.messages import Hello
from disagg.protocol.peers.link import Link
from disagg.runtime.reads.begun import BegunReads, Fence, InFlight, ReadContext, TrackedRead
from disagg.runtime.staging import NUM_BUFFERS

log = logging.getLogger("disagg")

STAGED_IN_FLIGHT = NUM_BUFFERS // 2
"""Parts of one rank that are in buffers at once: a rank that is stuck leaves some to the others."""
# a room that is read alone costs a turn of the loop, which comes 5 ms late on a busy host
READS_AT_ONCE = 64
"""Reads of one rank that are in flight together, at most, and reads that are posted together."""
SMALL_RUNS, SMALL_BYTES = 256, 256 << 10
"""Reads of at most so much are posted together."""


class Stuck(TransferError):
    """A peer of which nothing arrives."""


@dataclass(frozen=True, slots=True)
class BoundRead:
    """A read that is about to begin, and the seconds that it took to bind it."""

    tracked: TrackedRead
    batch: CopyBatch
    seconds: float

    @property
    def small(self) -> bool:
        """Whether it may be posted together with others."""
        few = self.batch.runs <= SMALL_RUNS and self.batch.total <= SMALL_BYTES
        return few and not self.tracked.alone


class Lane:
    """Reads that wait (`queue`), that have begun, and those of peers that are being given up
    (`fences`), of rank `source` of a link that has said `hello`.
    """

    def __init__(self, context: ReadContext, link: Link, source: int, hello: Hello) -> None:
        self.queue: deque[TrackedRead] = deque()
        self.connects_early = False
        """Whether to connect before the first read, until that was tried."""
        self.connected = False
        self._link, self._source, self._hello = link, source, hello
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
        """All parts in flight."""
        return [flight for begun in self._begun for flight in begun.in_flight]

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do."""
        return bool(self.queue or self.connects_early or self._begun)

    def step(self) -> bool:
        """Connects, polls parts, begins reads and posts theirs; whether anything has moved."""
        if self.connects_early:
            self._connect_early()
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
        """Asks again whether peers are given up."""
        fences, self.fences = self.fences, []
        for fence in fences:
            self._fence(fence)

    def drop(self) -> None:
        """Gives the rank up: its rooms have failed."""
        self._dropped = True
        landing = [begun for begun in self._begun if begun.in_flight]
        waiting = [read for begun in self._begun if not begun.in_flight for read in begun.reads]
        for read in (*self.queue, *waiting):
            self._context.end(read)
        self.queue.clear()
        self._begun.clear()
        if self.connected:
            self.fences.append(Fence(self._peer, landing, self._context.clock()))

    def _connect(self) -> None:
        """Connects the engine, unless it is."""
        if not self.connected:
            self._peer = self._engine.connect(self._hello.metadata)
            self.connected = True

    def _connect_early(self) -> None:
        try:
            self._connect()
        except Exception as error:
            rank = self._link.ranks[self._source]
            log.info("%s: a read will try to connect again: %s", rank, error)
        self.connects_early = False
        self._context.events.append(EngineConnected(self._link, self._source))

    def _room_for_more(self) -> bool:
        """Whether another read may begin."""
        if any(begun.left for begun in self._begun) or len(self._begun) >= READS_AT_ONCE:
            return False
        return not self._begun or sum(b.moving for b in self._begun) < self._engine.max_bytes

    def _begin(self) -> bool:
        """Begins and posts the next read, or small ones; whether more may begin in this step."""
        try:
            self._connect()
        except Exception as error:
            first = self.queue.popleft()
            self._context.end(first, first.problem(error))
            return False
        joined: list[BoundRead] = []
        while self.queue and len(joined) < READS_AT_ONCE:
            bound = self._bind(self.queue[0])
            if joined and bound and not bound.small:
                break  # it begins in the next turn of this
            self.queue.popleft()
            if bound is not None:
                joined.append(bound)
                if not bound.small:
                    break
        return self._post_first(joined) if joined else True

    def _bind(self, tracked: TrackedRead) -> BoundRead | None:
        """Its runs; None if there is nothing to be read of it: it has ended."""
        problem = None
        try:
            if not tracked.cancelled:
                began = time.perf_counter()
                batch = tracked.read.bind()
                return BoundRead(tracked, batch, time.perf_counter() - began)
        except Exception as error:  # nothing of it was posted
            problem = tracked.problem(error)
        self._context.end(tracked, problem)
        return None

    def _post_first(self, joined: list[BoundRead]) -> bool:
        """Begins reads that are bound; whether more may begin in this step."""
        now, batch = self._context.clock(), joined[0].batch
        for bound in joined:
            begun = ReadBegun(bound.tracked.read, now, bound.seconds, bound.batch.shares)
            self._context.events.append(begun)
        if joined[1:]:
            src, dst, nbytes = map(np.concatenate, zip(*(bound.batch for bound in joined)))
            batch = CopyBatch(src, dst, nbytes)
        read = joined[0].tracked.read
        try:
            parts = self._context.stage.parts(batch, read.plan.sources[read.source], self._engine)
        except Exception as error:
            for bound in joined:
                self._context.end(bound.tracked, bound.tracked.problem(error))
            return False
        reads, sizes = [b.tracked for b in joined], [b.batch.total for b in joined]
        self._begun.append(BegunReads(reads=reads, nbytes=sizes, parts=parts))
        return self._go_on(self._begun[-1]) is not None

    def _go_on(self, begun: BegunReads) -> bool | None:
        """Whether anything of reads has moved; None if they have failed."""
        try:
            self._connect()  # again, after another's failure
            return self._move(begun)
        except Exception as error:  # what goes wrong in one read fails that room and no other
            self._give_up(begun, error)
            return None

    def _move(self, begun: BegunReads) -> bool:
        context = self._context
        moved = self._land(begun)
        if begun.in_flight:
            spent = context.clock() - begun.in_flight[0].since
            if spent > context.timeout:
                raise Stuck(f"nothing has arrived for {spent:.1f} s. The peer is stuck.")
        if all(tracked.cancelled for tracked in begun.reads):
            begun.left = False
        posted = False
        while begun.left and len(begun.in_flight) < self._engine.parts_in_flight:
            if not self._post(begun):
                break
            posted = True
        if posted:  # it may be there already
            moved = True
            self._land(begun)
        if not begun.left and not begun.in_flight:
            self._begun.remove(begun)
            self._finish(begun)
            moved = True
        return moved

    def _land(self, begun: BegunReads) -> bool:
        """Takes parts off that have arrived; whether there were any."""
        moved, context = False, self._context
        while begun.in_flight and begun.in_flight[0].landed(context):
            flight, now = begun.in_flight.popleft(), context.clock()
            begun.arrived(context, flight, now)
            for later in self.in_flight():  # it may have waited for this one
                if later.posted >= flight.posted:
                    later.since = now
            moved = True
        return moved

    def _post(self, begun: BegunReads) -> bool:
        """Posts the next part; False while it waits for a buffer."""
        part = begun.next or next(begun.parts, None)
        if part is None:
            begun.left = False
            return True
        read, buffer = part.read, None
        if part.scatter is not None:
            if sum(flight.buffer is not None for flight in self.in_flight()) < STAGED_IN_FLIGHT:
                buffer = self._context.stage.take()
            begun.next = part if buffer is None else None
            if buffer is None:
                return False
            read = replace(read, dst=read.dst + buffer)
        posted = self._context.clock()
        flight = InFlight(part=part, posted=posted, since=posted, buffer=buffer)
        begun.in_flight.append(flight)  # also if the engine raises: some bytes may land
        begun.moving += part.read.total
        flight.transfer = self._engine.read(self._peer, read)
        begun.next = None
        return True

    def _finish(self, begun: BegunReads) -> None:
        """Ends reads of which nothing can land any more, or queues each of them again."""
        if begun.apart is not None and begun.problem is None and not self._dropped:
            for tracked in begun.reads:
                tracked.alone = True
            self.queue.extendleft(reversed(begun.reads))
            return
        for read in begun.reads:
            self._context.end(read, begun.problem)

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
        fence = Fence(self._peer, self._begun, self._context.clock())
        self._begun, self._peer, self.connected = [], None, False
        self._fence(fence)

    def _fence(self, fence: Fence) -> None:
        """Ends the failed reads of a peer that is given up, and lets the others go on."""
        if not fence.passed(self._context):
            self.fences.append(fence)
            return
        for begun in fence.reads:
            self._context.stage.give(*begun.buffers)
            if begun.problem is None and begun.apart is None and not self._dropped:
                begun.stopped()
                self._begun.append(begun)
            else:
                self._finish(begun)
