"""Bytes, runs and seconds of a room, and of all rooms of an endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace

from disagg.protocol.peers.liveness import Leases
from disagg.protocol.rooms.offered import LayerRange
from disagg.protocol.status import Failure

PHASES = ("plan", "bind", "wait", "wire", "verify", "total")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTimes:
    """One read that has ended: positions `start` to `stop`, of `layers` or of all, from rank
    `source` of prefill. In seconds after the room's request: when its chunk was `ready`, when the
    read had its turn (`begun`; None: it had none), and when its bytes were there, or could land no
    more (`ended`).
    """

    source: int
    start: int
    stop: int
    layers: LayerRange | None
    ready: float
    begun: float | None
    ended: float


@dataclass(slots=True, kw_only=True)
class RoomMetrics:
    """Bytes and runs of one room on one decode rank; times in seconds.

    `plan_seconds` is the link's. `asked_seconds` is from the request of the room until prefill was
    asked, `wait_seconds` to the first chunk, `done_seconds` until all was read, and verified,
    `total_seconds` to the room's end. Times of concurrent reads add up; `reads` has those of each.
    `released` has, by rank of prefill, the seconds until it said that its pages are free.
    """

    chunks: int = 0
    runs: int = 0
    bytes_bound: int = 0
    bytes_moved: int = 0
    plan_seconds: float = 0.0
    asked_seconds: float = 0.0
    bind_seconds: float = 0.0
    wait_seconds: float = 0.0
    wire_seconds: float = 0.0
    verify_seconds: float = 0.0
    done_seconds: float = 0.0
    total_seconds: float = 0.0
    reads: list[ReadTimes] = field(default_factory=list)
    released: dict[int, float] = field(default_factory=dict)

    @property
    def bytes_per_run(self) -> float:
        """Mean length of a run."""
        return self.bytes_bound / self.runs if self.runs else 0.0

    @property
    def rate(self) -> float:
        """Bytes a second while reading."""
        return self.bytes_moved / self.wire_seconds if self.wire_seconds else 0.0

    def bound(self, runs: int, nbytes: int, seconds: float) -> None:
        """Counts a chunk of one rank that is bound and about to be read."""
        self.chunks += 1
        self.runs += runs
        self.bytes_bound += nbytes
        self.bind_seconds += seconds

    def moved(self, nbytes: int, seconds: float) -> None:
        """Counts bytes that have arrived."""
        self.bytes_moved += nbytes
        self.wire_seconds += seconds

    def copy(self) -> RoomMetrics:
        """The numbers now."""
        return replace(self, reads=list(self.reads), released=dict(self.released))


@dataclass(slots=True, kw_only=True)
class Totals:
    """What rooms that have ended add up to, on one endpoint since it was made: `failures` by side
    and kind, `seconds` by phase (`PHASES`).
    """

    rooms: dict[str, int] = field(default_factory=lambda: {"success": 0, "failed": 0})
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    chunks: int = 0
    runs: int = 0
    bytes_bound: int = 0
    bytes_moved: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def add(self, room: RoomMetrics, failure: Failure | None = None) -> None:
        """Counts a room that has ended."""
        self.rooms["failed" if failure else "success"] += 1
        if failure:
            self.failures[failure.side, failure.kind] += 1
        self.chunks += room.chunks
        self.runs += room.runs
        self.bytes_bound += room.bytes_bound
        self.bytes_moved += room.bytes_moved
        for phase in PHASES:
            if phase != "plan":  # rooms of a link share its plan, which the machine counts
                self.seconds[phase] += getattr(room, f"{phase}_seconds")

    def copy(self) -> Totals:
        """The numbers now."""
        return deepcopy(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An endpoint at one moment: `totals` is a copy, `peers` are those that are alive, `telemetry`
    is the engine's, `plans` those that were known (`hit`) and those that were made (`miss`).
    """

    totals: Totals
    open_rooms: int
    peers: int
    leases: Leases
    engine: str
    telemetry: Mapping[str, float]
    plans: Mapping[str, int] = field(default_factory=dict)
