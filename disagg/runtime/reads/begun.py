"""A read that has begun: the parts still to be posted, and those in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from disagg.plan.columns import Columns
from disagg.protocol.decode_state import Read
from disagg.runtime.reads.context import ReadContext
from disagg.runtime.staging import ReadPart

if TYPE_CHECKING:
    from kvpool.device import Event


@dataclass(eq=False, slots=True)
class InFlight:
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


@dataclass(eq=False, slots=True)
class BegunRead:
    """`columns` hold its runs; `next` is the part that waits for a buffer. With a `problem` it has
    failed, and ends once none of its bytes can land any more.
    """

    read: Read
    parts: Iterator[ReadPart]
    columns: Columns
    left: bool = True
    """Whether there may be parts to post."""
    next: ReadPart | None = None
    in_flight: deque[InFlight] = field(default_factory=deque)
    problem: str | None = None

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
