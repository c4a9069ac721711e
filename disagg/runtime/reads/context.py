"""What all reads of an endpoint share: the engine, the buffers, the clock, and what is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from disagg.engines.base import Engine
from disagg.protocol.events import ReadEnded, ReaderEvent, ReadFailed, ReadMoved
from disagg.protocol.read import Read
from disagg.runtime.staging import StagingBuffers
from kvpool.layout.sentences import one_line
from kvpool.layout.types import MAX_REASON


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
    """A part that takes longer than `timeout` seconds has failed. `quarantined` are reads whose
    bytes may land at any time: their pages and buffers stay as they are until the endpoint is
    closed.
    """

    engine: Engine
    stage: StagingBuffers
    timeout: float
    clock: Callable[[], float]
    events: list[ReaderEvent] = field(default_factory=list)
    quarantined: list[TrackedRead] = field(default_factory=list)
    _moved: dict[Read, tuple[int, float]] = field(default_factory=dict)
    """Bytes and seconds of parts that are not reported yet."""

    def moved(self, tracked: TrackedRead, nbytes: int, seconds: float) -> None:
        """A part has arrived. All parts of a read that arrive in one step are one event."""
        before = self._moved.get(tracked.read, (0, 0.0))
        self._moved[tracked.read] = before[0] + nbytes, before[1] + seconds

    def fail(self, tracked: TrackedRead, problem: str) -> None:
        """A read has failed, and its bytes may still land."""
        self._report_moved(tracked.read)
        self.events.append(ReadFailed(tracked.read, problem))

    def end(self, tracked: TrackedRead, problem: str | None = None) -> None:
        """None of a read's bytes can land any more."""
        self._report_moved(tracked.read)
        self.events.append(ReadEnded(tracked.read, problem))

    def take_events(self) -> list[ReaderEvent]:
        """What has happened since the last call."""
        for read in list(self._moved):
            self._report_moved(read)
        events, self.events = self.events, []
        return events

    def _report_moved(self, read: Read) -> None:
        # before the read ends: that may end its room, whose bytes are counted then
        if read in self._moved:
            nbytes, seconds = self._moved.pop(read)
            self.events.append(ReadMoved(read, nbytes, seconds))
