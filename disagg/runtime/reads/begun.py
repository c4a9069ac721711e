"""Reads that have begun: the parts still to be posted, and those in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from disagg.runtime.reads.context import ReadContext, TrackedRead
from disagg.runtime.staging import ReadPart

if TYPE_CHECKING:
    from kvpool.device import Event


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
    `next` is the part that waits for a buffer. With a `problem` they
    have failed, and end once none of their bytes can land any more.
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

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants any of it."""
        return all(read.cancelled for read in self.reads)

    def arrived(self, context: ReadContext, flight: InFlight, now: float) -> None:
        """Reports a part that has arrived. What each room has of it is known of a single read; of
        several, they all have theirs at the end.
        """
        self.moving -= flight.part.read.total
        if len(self.reads) == 1:
            context.moved(self.reads[0], flight.part.payload, now - flight.posted)
        elif not self.left and not self.in_flight:
            for read, nbytes in zip(self.reads, self.nbytes):
                context.moved(read, nbytes, now - flight.posted)

    def fail(self, context: ReadContext, error: Exception) -> None:
        """Their rooms fail; their pages come back once nothing can land."""
        self.problem = self.reads[0].problem(error)
        for read in self.reads:
            context.fail(read, self.problem)

    def stopped(self) -> None:
        """Parts in flight, of which no byte can land any more, are to be posted again."""
        again = [flight.part for flight in self.in_flight]
        waiting = [] if self.next is None else [self.next]
        self.parts, self.next = chain(again, waiting, self.parts), None
        self.left = self.left or bool(again)
        self.in_flight.clear()
        self.moving = 0
