"""Reads that have begun, until none of their bytes can land any more: the parts still to be posted,
those in flight, and the fence of a peer that is given up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from disagg.engines.base import Engine, TransferError
from disagg.log import log
from disagg.plan.bind import CopyBatch
from disagg.plan.planner import Cast
from disagg.portable.conversion import Converter, WantedRows
from disagg.protocol.events import ReadEnded, ReaderEvent, ReadFailed, ReadMoved
from disagg.protocol.peers.link import Read
from disagg.runtime.staging import NUM_BUFFERS, ReadPart, StagingBuffers
from kvpool.layout import PoolLayout
from kvpool.layout.text import one_line
from kvpool.layout.types import MAX_REASON

if TYPE_CHECKING:
    from kvpool.device import Event

STAGED_IN_FLIGHT = NUM_BUFFERS // 2
"""Parts of one rank that are in buffers at once: a rank that is stuck leaves some to the others."""
SMALL_RUNS, SMALL_BYTES = 256, 256 << 10
"""Reads of at most so much are posted together."""


@dataclass(eq=False, slots=True)
class TrackedRead:
    """A read, and what the reader keeps of it. With `cancelled`, nothing more of it is posted; with
    `alone`, it is not joined with others, as one of those that it was joined with has failed.
    """

    read: Read
    cancelled: bool = False
    alone: bool = False
    batch: CopyBatch = field(init=False)
    """Its runs, once it is bound, and the seconds that this took."""
    converted: Iterator[ReadPart] | None = field(init=False, default=None)
    """What is read of rows that are converted, each part bound when it is asked for."""
    bind_seconds: float = field(init=False)

    def find_runs(self, context: ReadContext) -> None:
        """Finds its runs. Raises as TransferPlan.bind."""
        began = time.perf_counter()
        self.batch = self.read.bound_runs()
        if self.read.plan.cast is not None:
            most = min(context.stage.buffer_bytes, context.engine.max_bytes)
            parts = self._conversions(self.read.plan.cast, context.layout, most)
            first = next(parts, None)
            self.converted = chain([first], parts) if first else None
        self.bind_seconds = time.perf_counter() - began

    def _conversions(self, cast: Cast, layout: PoolLayout, most: int) -> Iterator[ReadPart]:
        read, some = self.read, self.read.layers
        wanted = WantedRows(
            source=read.rank.source,
            source_address=read.source_address,
            dest_address=read.dest_address,
            tokens=read.tokens,
            layers=some.layers if some else None,
            owner=some.owner if some else "",
            count=read.count,
            arrived=read.arrived,
        )
        for part in Converter(cast, layout).parts(wanted, most):
            yield ReadPart(part.read, store=part.store)

    @property
    def small(self) -> bool:
        """Whether it may be posted together with others."""
        if self.converted:
            return False
        few = self.batch.runs <= SMALL_RUNS and self.batch.total <= SMALL_BYTES
        return few and not self.alone

    def problem(self, error: Exception) -> str:
        """Why it has failed."""
        # an engine may quote what its peer wrote
        reason = one_line(str(error), MAX_REASON)
        return f"read from {self.read.rank}: {reason}"


@dataclass(eq=False, slots=True, kw_only=True)
class ReadContext:
    """What all reads of an endpoint share, and report. `quarantined` are reads whose bytes may land
    at any time: their pages and buffers stay as they are until the endpoint is closed.
    """

    engine: Engine
    stage: StagingBuffers
    layout: PoolLayout
    timeout: float
    clock: Callable[[], float]
    events: list[ReaderEvent] = field(default_factory=list)
    quarantined: list[TrackedRead] = field(default_factory=list)

    def end_read(self, tracked: TrackedRead, problem: str | None = None) -> None:
        """None of a read's bytes can land any more."""
        self.events.append(ReadEnded(tracked.read, problem))

    def take_events(self) -> list[ReaderEvent]:
        """What has happened since the last call."""
        events, self.events = self.events, []
        return events


@dataclass(eq=False, slots=True, kw_only=True)
class InFlight:
    """A part of a read that was posted; with a staging buffer, until it is scattered from there."""

    part: ReadPart
    nbytes: int
    posted: float
    since: float
    """When a part that was posted no later than this one has arrived last, or this was posted."""
    buffer: int | None
    transfer: Any = None
    arrived: bool = False
    event: Event | None = None

    def copying(self) -> bool:
        """Whether a device still copies out of the buffer."""
        return self.event is not None and not self.event.query()

    def landed(self, context: ReadContext) -> bool:
        """Whether it has arrived where it belongs; then its buffer is free."""
        if not self.arrived:
            self.arrived = context.engine.poll(self.transfer)
            if not self.arrived:
                return False
            if self.buffer is not None:
                self.event = context.stage.finish(self.part, self.buffer)
        if self.copying():
            return False
        if self.buffer is not None:
            context.stage.give(self.buffer)
        return True


@dataclass(eq=False, slots=True, kw_only=True)
class BegunReads:
    """One read, or small ones of several rooms that are posted together. With a `problem` they have
    failed, and end once no byte can land.
    """

    reads: list[TrackedRead]
    parts: Iterator[ReadPart]
    next: ReadPart | None
    """To be posted before `parts`, once there is a buffer for it; None if all were posted."""
    in_flight: deque[InFlight] = field(default_factory=deque)
    problem: str | None = None
    apart: Exception | None = None
    """What has failed, if it is unknown which of them did: each is then read alone."""

    @property
    def buffers(self) -> list[int]:
        """Staging buffers that its parts take up."""
        return [part.buffer for part in self.in_flight if part.buffer is not None]

    def post(
        self, part: ReadPart, peer: Any, context: ReadContext, siblings: Sequence[BegunReads]
    ) -> bool:
        """Posts `next`; False while it waits for a buffer. `siblings` are reads of its rank."""
        read, buffer = part.read, None
        if part.staged:
            if sum(len(begun.buffers) for begun in siblings) < STAGED_IN_FLIGHT:
                buffer = context.stage.take_buffer()
            if buffer is None:
                return False
            read = replace(read, dst=read.dst + buffer)
        now = context.clock()
        flight = InFlight(part=part, nbytes=read.total, posted=now, since=now, buffer=buffer)
        self.in_flight.append(flight)  # also if the engine raises: some bytes may land
        self.next = next(self.parts, None)
        flight.transfer = context.engine.read(peer, read)
        return True

    def land(self, context: ReadContext, siblings: Sequence[BegunReads]) -> bool:
        """Takes parts off that have arrived; whether there were any."""
        before = len(self.in_flight)
        while self.in_flight and self.in_flight[0].landed(context):
            flight, now = self.in_flight.popleft(), context.clock()
            sizes = [flight.part.payload]
            if len(self.reads) > 1:  # what each room has of it is known at the end only
                last = not (self.next or self.in_flight)
                sizes = [tracked.batch.total for tracked in self.reads if last]
            for tracked, nbytes in zip(self.reads, sizes):
                context.events.append(ReadMoved(tracked.read, nbytes, now - flight.posted))
            for later in chain.from_iterable(begun.in_flight for begun in siblings):
                if later.posted >= flight.posted:  # it may have waited for this one
                    later.since = now
            if flight.buffer is not None and self.next:
                break  # the next part is posted before another is copied or stored
        return len(self.in_flight) < before

    def fail(self, context: ReadContext, error: Exception) -> None:
        """Their rooms fail, unless they have; their pages come back once nothing can land."""
        if self.problem is None:
            self.problem = self.reads[0].problem(self.apart or error)
            context.events.extend(ReadFailed(tracked.read, self.problem) for tracked in self.reads)

    def stopped(self) -> None:
        """Posts parts in flight again; no byte of them can land any more."""
        again = [flight.part for flight in self.in_flight]
        self.parts = chain(again, [self.next] if self.next else [], self.parts)
        self.next = next(self.parts, None)
        self.in_flight.clear()


@dataclass(eq=False, slots=True)
class Fence:
    """A peer that is given up. `reads` are those whose bytes may land until it is passed: the one
    that has failed, and others from the same peer. `since` is when it was given up.
    """

    peer: Any
    reads: list[BegunReads]
    since: float

    def passed(self, context: ReadContext) -> bool:
        """Whether no byte of `reads` can land. A read that may never stop
        leaves them: it stays in quarantine. Rooms that have not failed do so if it takes too long.
        """
        waits = False
        for begun in list(self.reads):
            try:
                waits |= any(flight.copying() for flight in begun.in_flight)
            except Exception as error:
                self._quarantine(context, begun, error)
        try:
            passed = not waits and context.engine.fence(self.peer, 0)
        except Exception as error:
            for begun in list(self.reads):
                self._quarantine(context, begun, error)
            return True
        if not passed and context.clock() - self.since > context.timeout:
            late = f"its peer was given up {context.timeout:g} s ago, and bytes may still land."
            for begun in self.reads:
                begun.fail(context, TransferError(late))
        return passed

    def _quarantine(self, context: ReadContext, begun: BegunReads, error: Exception) -> None:
        log.error("pages stay in quarantine, a read cannot be ended for sure: %s", error)
        begun.fail(context, error)
        context.stage.mark_lost(len(begun.buffers))
        context.quarantined.extend(begun.reads)
        self.reads.remove(begun)
