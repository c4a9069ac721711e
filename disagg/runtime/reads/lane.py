"""Reads from one generation of one rank. They begin in order; small ones are in flight together,
and those that another's failure has stopped go on after it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from disagg.engines.base import TransferError
from disagg.plan.columns import Columns
from disagg.protocol.decode_state import Link, Read
from disagg.protocol.events import ReadFailed
from disagg.protocol.messages import Hello
from disagg.runtime.reads.begun import BegunRead, InFlight
from disagg.runtime.reads.context import ReadContext, problem_of
from disagg.runtime.reads.fence import Fence
from disagg.runtime.staging import NUM_BUFFERS

log = logging.getLogger("disagg")

STAGED_IN_FLIGHT = NUM_BUFFERS // 2
"""Parts of one rank that are in buffers at once: a rank that is stuck leaves some to the others."""
READS_AT_ONCE = 64
"""Reads of one rank that are in flight together, at most."""


class Lane:
    """Reads that wait (`queue`), that have begun, and those of peers that are being given up
    (`fences`). `early` is what to connect to before the first read, until that was tried.
    """

    def __init__(self, context: ReadContext) -> None:
        self.queue: deque[Read] = deque()
        self.early: tuple[Link, int, Hello] | None = None
        self.connected = False
        self.fences: list[Fence] = []
        self._context, self._engine = context, context.engine
        self._begun: list[BegunRead] = []
        self._peer: Any = None
        self._spare: list[Columns] = []
        self._dropped = False

    def reads(self) -> Iterator[Read]:
        """All its reads that have not ended."""
        yield from self.queue
        for begun in (self._begun, *(fence.reads for fence in self.fences)):
            yield from (each.read for each in begun)

    def in_flight(self) -> list[InFlight]:
        """All parts in flight."""
        return [flight for begun in self._begun for flight in begun.in_flight]

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do."""
        return bool(self.queue or self.early or self._begun)

    def step(self) -> bool:
        """Connects, polls parts, begins reads and posts theirs; whether anything has moved."""
        if self.early is not None:
            self._connect_early(*self.early)
            return True
        moved = False
        for begun in list(self._begun):
            went_on = self._go_on(begun)
            if went_on is None:
                return True
            moved |= went_on
        while self.queue and self._room_for_more():
            moved = True
            if not self._begin(self.queue.popleft()):
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
        for read in (*self.queue, *(each.read for each in self._begun if not each.in_flight)):
            self._context.end(read)
        self.queue.clear()
        self._begun.clear()
        if self.connected:
            self.fences.append(Fence(self._peer, landing))

    def _connect(self, hello: Hello) -> None:
        """Connects the engine, unless it is."""
        if not self.connected:
            self._peer = self._engine.connect(hello.metadata)
            self.connected = True

    def _connect_early(self, link: Link, source: int, hello: Hello) -> None:
        try:
            self._connect(hello)
        except Exception as error:
            log.info("%s: a read will try to connect again: %s", link.name(source), error)
        self.early = None
        link.unconnected.discard(source)

    def _room_for_more(self) -> bool:
        """Whether another read may begin."""
        if any(begun.left for begun in self._begun) or len(self._begun) >= READS_AT_ONCE:
            return False
        moving = sum(flight.part.read.total for flight in self.in_flight())
        return not self._begun or moving < self._engine.max_bytes

    def _begin(self, read: Read) -> bool:
        """Begins a read and posts its first parts; whether the next may begin in this step."""
        context = self._context
        if read.cancelled:
            context.end(read)
            return True
        try:
            self._connect(read.hello)
            began = time.perf_counter()
            columns = self._spare.pop() if self._spare else Columns()
            batch = read.bind(columns)
            read.metrics.bound(batch, time.perf_counter() - began)
            parts = context.stage.parts(batch, read.plan.sources[read.source], self._engine)
        except Exception as error:  # nothing of it was posted
            context.end(read, problem_of(read, error))
            return False
        begun = BegunRead(read, parts, columns)
        self._begun.append(begun)
        return self._go_on(begun) is not None

    def _go_on(self, begun: BegunRead) -> bool | None:
        """Whether anything of a read has moved; None if it has failed."""
        try:
            self._connect(begun.read.hello)  # again, after another's failure
            return self._move(begun)
        except Exception as error:  # what goes wrong in one read fails that room and no other
            self._give_up(begun, error)
            return None

    def _move(self, begun: BegunRead) -> bool:
        moved, context = False, self._context
        while begun.in_flight and begun.in_flight[0].landed(context):
            flight, now = begun.in_flight.popleft(), context.clock()
            begun.read.metrics.moved(flight.part.payload, now - flight.posted)
            for other in self.in_flight():  # what was posted later may have waited for it
                if other.posted >= flight.posted:
                    other.since = now
            moved = True
        if begun.in_flight:
            spent = context.clock() - begun.in_flight[0].since
            if spent > context.timeout:
                raise TransferError(f"nothing has arrived for {spent:.1f} s. The peer is stuck.")
        if begun.left and begun.read.cancelled:
            begun.left = False
        while begun.left and len(begun.in_flight) < self._engine.parts_in_flight:
            if not self._post(begun):
                break
            moved = True
        if not begun.left and not begun.in_flight:
            self._end(begun)
            moved = True
        return moved

    def _post(self, begun: BegunRead) -> bool:
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
        flight = InFlight(None, part, posted, buffer, posted)
        begun.in_flight.append(flight)  # also if the engine raises: some bytes may land
        flight.transfer = self._engine.read(self._peer, read)
        begun.next = None
        return True

    def _end(self, begun: BegunRead) -> None:
        """A read has nothing left to do, and nothing in flight."""
        self._begun.remove(begun)
        self._spare.append(begun.columns)
        self._context.end(begun.read, begun.problem)

    def _give_up(self, begun: BegunRead, error: Exception) -> None:
        """Its room fails now, its pages come back once nothing can land. The next read, or the next
        part of another, reconnects.
        """
        begun.problem = problem_of(begun.read, error)
        if not self.connected:  # nothing is in flight
            self._end(begun)
            return
        self._context.events.append(ReadFailed(begun.read, begun.problem))
        fence = Fence(self._peer, self._begun)
        self._begun, self._peer, self.connected = [], None, False
        self._fence(fence)

    def _fence(self, fence: Fence) -> None:
        """Ends the failed reads of a peer that is given up, and lets the others go on."""
        if not fence.passed(self._context):
            self.fences.append(fence)
            return
        for begun in fence.reads:
            self._context.stage.give(*begun.buffers)
            if begun.problem is None and not self._dropped:
                begun.stopped()
                self._begun.append(begun)
            else:
                self._context.end(begun.read, begun.problem)
