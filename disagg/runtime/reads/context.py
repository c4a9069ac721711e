"""What all reads of an endpoint share: the engine, the buffers, the clock, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from disagg.engines.base import Engine
from disagg.protocol.events import ReadEnded, ReadFailed
from disagg.protocol.read import Read
from disagg.runtime.staging import StagingBuffers
from kvpool.layout.sentences import one_line
from kvpool.layout.types import MAX_REASON

ReadEvent = ReadFailed | ReadEnded


@dataclass(eq=False, slots=True)
class ReadContext:
    """A part that takes longer than `timeout` seconds has failed. `quarantined` are reads whose
    bytes may land for ever: their pages and buffers stay as they are until the endpoint is closed.
    """

    engine: Engine
    stage: StagingBuffers
    timeout: float
    clock: Callable[[], float]
    events: list[ReadEvent] = field(default_factory=list)
    quarantined: list[Read] = field(default_factory=list)

    def end(self, read: Read, problem: str | None = None) -> None:
        """None of a read's bytes can land any more."""
        self.events.append(ReadEnded(read, problem))

    def take_events(self) -> list[ReadEvent]:
        """What has happened since the last call."""
        events, self.events = self.events, []
        return events


def problem_of(read: Read, error: Exception) -> str:
    """Why a read has failed."""
    # an engine may quote what its peer wrote
    return f"read from {read.link.name(read.source)}: {one_line(str(error), MAX_REASON)}"
