"""What a room's transfer moved, and what it took."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.bind import CopyBatch


@dataclass(slots=True)
class RoomMetrics:
    """Bytes and runs of one room on one decode rank; times in seconds."""

    runs: int = 0
    bytes_bound: int = 0
    bytes_moved: int = 0
    bind_seconds: float = 0.0
    wire_seconds: float = 0.0

    @property
    def bytes_per_run(self) -> float:
        """Mean length of a run."""
        return self.bytes_bound / self.runs if self.runs else 0.0

    @property
    def rate(self) -> float:
        """Bytes a second while reading."""
        return self.bytes_moved / self.wire_seconds if self.wire_seconds else 0.0

    def bound(self, batch: CopyBatch, seconds: float) -> None:
        """Counts a chunk that is to be read."""
        self.runs += batch.runs
        self.bytes_bound += batch.total
        self.bind_seconds += seconds

    def moved(self, nbytes: int, seconds: float) -> None:
        """Counts bytes that have arrived."""
        self.bytes_moved += nbytes
        self.wire_seconds += seconds
