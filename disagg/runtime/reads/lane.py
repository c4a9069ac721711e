"""Reads from one generation of one rank. They begin in order; small ones that are ready in one step
are bound one after the other and posted together. Those that another's failure has stopped go on
after it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from disagg.engines.base import TransferError
from disagg.plan.bind import CopyBatch
from disagg.plan.columns import Columns
from disagg.protocol.events import ReadFailed
from disagg.protocol.link import Link
from disagg.protocol.messages import Hello
from disagg.protocol.read import Read
from disagg.runtime.reads.begun import BegunReads, InFlight
from disagg.runtime.reads.context import ReadContext, problem_of
from disagg.runtime.reads.fence import Fence
from disagg.runtime.staging import NUM_BUFFERS

log = logging.getLogger("disagg")

STAGED_IN_FLIGHT = NUM_BUFFERS // 2
"""Parts of one rank that are in buffers at once: a rank that is stuck leaves some to the others."""
READS_AT_ONCE = 64
"""Reads of one rank that are in flight together, at most, and reads that are posted together."""
SMALL_RUNS, SMALL_BYTES = 256, 256 << 10
"""Reads of at most so much are posted together."""


class Stuck(TransferError):
    """A peer of which nothing arrives."""


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
        self._begun: list[BegunReads] = []
        self._peer: Any = None
        self._spare: list[Columns] = []
        self._scratch = Columns()
        self._apart: set[Read] = set()
        self._dropped = False

    def reads(self) -> Iterator[Read]:
        """All its reads that have not ended."""
        yield from self.queue
        for begun in (self._begun, *(fence.reads for fence in self.fences)):
            yield from (read for each in begun for read in each.reads)

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
        waiting = [read for each in self._begun if not each.in_flight for read in each.reads]
        for read in (*self.queue, *waiting):
            self._context.end(read)
        self.queue.clear()
        self._begun.clear()
        if self.connected:
            self.fences.append(Fence(self._peer, landing, self._context.clock()))

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
        return not self._begun or sum(b.moving for b in self._begun) < self._engine.max_bytes

    def _begin(self) -> bool:
        """Begins the next read, or the next small ones, and posts the first parts; whether more
        may begin in this step.
        """
        first = self.queue[0]
        try:
            self._connect(first.hello)
        except Exception as error:
            self._context.end(self.queue.popleft(), problem_of(first, error))
            return False
        columns = self._spare.pop() if self._spare else Columns()
        reads: list[Read] = []
        batches: list[CopyBatch] = []
        while self.queue and len(reads) < READS_AT_ONCE:
            read, into = self.queue[0], self._scratch if reads else columns
            batch = self._bind(read, into)
            small = batch is not None and _small(batch) and read not in self._apart
            if batch is None:
                self.queue.popleft()
                continue
            if reads and not small:
                break  # it begins in the next turn of this
            self._apart.discard(self.queue.popleft())
            reads.append(read)
            if reads[1:]:
                batch = CopyBatch(batch.src.copy(), batch.dst.copy(), batch.nbytes.copy())
            batches.append(batch)
            if not small:
                break
        if not reads:
            self._spare.append(columns)
            return True
        return self._post_first(reads, batches, columns)

    def _bind(self, read: Read, columns: Columns) -> CopyBatch | None:
        """Its runs; None if there is nothing to be read of it: it has ended."""
        problem = None
        try:
            if not read.cancelled:
                began = time.perf_counter()
                batch = read.bind(columns)
                read.metrics.bound(batch, time.perf_counter() - began)
                return batch
        except Exception as error:  # nothing of it was posted
            problem = problem_of(read, error)
        self._context.end(read, problem)
        return None

    def _post_first(self, reads: list[Read], batches: list[CopyBatch], columns: Columns) -> bool:
        """Begins reads that are bound; whether more may begin in this step."""
        batch = batches[0]
        if batches[1:]:
            src, dst, nbytes = (np.concatenate(columns) for columns in zip(*batches))
            batch = CopyBatch(src, dst, nbytes)
        source = reads[0].plan.sources[reads[0].source]
        totals = [each.total for each in batches]
        try:
            parts = self._context.stage.parts(batch, source, self._engine)
        except Exception as error:
            for read in reads:
                self._context.end(read, problem_of(read, error))
            return False
        now = self._context.clock()
        for read in reads:
            read.begun = now
        begun = BegunReads(reads, totals, parts, columns)
        self._begun.append(begun)
        return self._go_on(begun) is not None

    def _go_on(self, begun: BegunReads) -> bool | None:
        """Whether anything of reads has moved; None if they have failed."""
        try:
            self._connect(begun.reads[0].hello)  # again, after another's failure
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
        if begun.left and begun.cancelled:
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
            self._end(begun)
            moved = True
        return moved

    def _land(self, begun: BegunReads) -> bool:
        """Takes parts off that have arrived; whether there were any."""
        moved, context = False, self._context
        while begun.in_flight and begun.in_flight[0].landed(context):
            flight, now = begun.in_flight.popleft(), context.clock()
            begun.arrived(flight, now)
            for other in self.in_flight():  # what was posted later may have waited for it
                if other.posted >= flight.posted:
                    other.since = now
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
        flight = InFlight(None, part, posted, buffer, posted)
        begun.in_flight.append(flight)  # also if the engine raises: some bytes may land
        begun.moving += part.read.total
        flight.transfer = self._engine.read(self._peer, read)
        begun.next = None
        return True

    def _end(self, begun: BegunReads) -> None:
        """Reads have nothing left to do, and nothing in flight."""
        self._begun.remove(begun)
        self._spare.append(begun.columns)
        self._finish(begun)

    def _finish(self, begun: BegunReads) -> None:
        """Ends reads of which nothing can land any more, or begins each of them anew."""
        if begun.apart is not None and begun.problem is None and not self._dropped:
            self._apart.update(begun.reads)
            self.queue.extendleft(reversed(begun.reads))
            return
        for read in begun.reads:
            self._context.end(read, begun.problem)

    def _give_up(self, begun: BegunReads, error: Exception) -> None:
        """Their rooms fail now, and the pages come back once nothing can land; of several rooms
        none does, but each is read for itself. The next read, or the next part of another,
        reconnects.
        """
        if len({read.room for read in begun.reads}) > 1 and not isinstance(error, Stuck):
            begun.apart = error
        else:
            begun.problem = problem_of(begun.reads[0], error)
        if not self.connected:  # nothing is in flight
            self._end(begun)
            return
        if begun.problem is not None:
            self._context.events += [ReadFailed(read, begun.problem) for read in begun.reads]
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


def _small(batch: CopyBatch) -> bool:
    return batch.runs <= SMALL_RUNS and batch.total <= SMALL_BYTES
