"""Reads that have begun, until none of their bytes can land any more: the parts still to be posted,
those in flight, and the fence of a peer that is given up.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from disagg.engines.base import Engine, TransferError
from disagg.protocol.events import ReadEnded, ReaderEvent, ReadFailed, ReadMoved
from disagg.protocol.peers.link import Read
from disagg.runtime.staging import ReadPart, StagingBuffers
from kvpool.layout.sentences import one_line
from kvpool.layout.types import MAX_REASON

if TYPE_CHECKING:
    from kvpool.device import Event

log = logging.getLogger("disagg")


@dataclass(eq=False, slots=True)
class TrackedRead:
    """A read, and what the reader keeps of it. With `cancelled`, nothing more of it is posted; with
    `alone`, it is not joined with others, as one of those that it was joined with has failed.
    """

    read: Read
    cancelled: bool = False
    alone: bool = False

    def problem(self, error: Exception) -> str:
        """Why it has failed."""
        # an engine may quote what its peer wrote
        reason = one_line(str(error), MAX_REASON)
        return f"read from {self.read.link.ranks[self.read.source]}: {reason}"


@dataclass(eq=False, slots=True, kw_only=True)
class ReadContext:
    """What all reads of an endpoint share: engine, buffers, clock, and what is reported. A part
    that takes longer than `timeout` seconds has failed. `quarantined` are reads whose bytes may
    land at any time: their pages and buffers stay as they are until the endpoint is closed.
    """

    engine: Engine
    stage: StagingBuffers
    timeout: float
    clock: Callable[[], float]
    events: list[ReaderEvent] = field(default_factory=list)
    quarantined: list[TrackedRead] = field(default_factory=list)

    def end(self, tracked: TrackedRead, problem: str | None = None) -> None:
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
            if self.part.scatter is not None and self.buffer is not None:
                self.event = context.stage.scatter(self.part.scatter, self.buffer)
        if self.copying():
            return False
        if self.buffer is not None:
            context.stage.give(self.buffer)
        return True


@dataclass(eq=False, slots=True, kw_only=True)
class BegunReads:
    """One read, or small ones of several rooms that are posted together; `nbytes` are each one's.
    `next` waits for a buffer. With a `problem` they have failed, and end once no byte can land.
    """

    reads: list[TrackedRead]
    nbytes: list[int]
    parts: Iterator[ReadPart]
    left: bool = True
    """Whether there may be parts to post."""
    next: ReadPart | None = None
    in_flight: deque[InFlight] = field(default_factory=deque)
    moving: int = 0
    """Bytes of the parts in flight."""
    problem: str | None = None
    apart: Exception | None = None
    """What has failed, where nobody knows which of them did: each is to be read for itself."""

    @property
    def buffers(self) -> list[int]:
        """Staging buffers that its parts take up."""
        return [part.buffer for part in self.in_flight if part.buffer is not None]

    def arrived(self, context: ReadContext, flight: InFlight, now: float) -> None:
        """Reports a part that has arrived. What each room has of it is known of a single read; of
        several, they all have theirs at the end.
        """
        self.moving -= flight.part.read.total
        if len(self.reads) == 1:
            sizes = [flight.part.payload]
        else:
            sizes = [] if self.left or self.in_flight else self.nbytes
        for tracked, nbytes in zip(self.reads, sizes):
            context.events.append(ReadMoved(tracked.read, nbytes, now - flight.posted))

    def fail(self, context: ReadContext, error: Exception) -> None:
        """Their rooms fail; their pages come back once nothing can land."""
        self.problem = self.reads[0].problem(error)
        context.events.extend(ReadFailed(tracked.read, self.problem) for tracked in self.reads)

    def stopped(self) -> None:
        """Parts in flight, of which no byte can land any more, are to be posted again."""
        again = [flight.part for flight in self.in_flight]
        waiting = [] if self.next is None else [self.next]
        self.parts, self.next = chain(again, waiting, self.parts), None
        self.left = self.left or bool(again)
        self.in_flight.clear()
        self.moving = 0


@dataclass(eq=False, slots=True)
class Fence:
    """A peer that is given up. `reads` are those whose bytes may land until it is passed: the one
    that has failed, and others from the same peer. `since` is when it was given up.
    """

    peer: Any
    reads: list[BegunReads]
    since: float

    def passed(self, context: ReadContext) -> bool:
        """Whether no byte of `reads` can land. A read of which that can never be certain leaves
        them: it stays in quarantine. Rooms that have not failed do so if it takes too long.
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
            late = TransferError(
                f"its peer was given up {context.timeout:g} s ago, and bytes may still land."
            )
            for begun in self.reads:
                self._fail(context, begun, late)
        return passed

    def _fail(self, context: ReadContext, begun: BegunReads, error: Exception) -> None:
        """Its rooms fail, unless they have."""
        if begun.problem is None:
            begun.fail(context, begun.apart or error)

    def _quarantine(self, context: ReadContext, begun: BegunReads, error: Exception) -> None:
        log.error("pages stay in quarantine, a read cannot be ended for sure: %s", error)
        self._fail(context, begun, error)
        context.stage.mark_lost(len(begun.buffers))
        context.quarantined.extend(begun.reads)
        self.reads.remove(begun)
