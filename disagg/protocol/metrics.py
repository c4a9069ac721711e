"""Bytes, runs and seconds of a room and of an endpoint, and what is told of a room that has ended:
a line of the log, and a span of the trace that its request belongs to.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from disagg.log import log
from disagg.plan.runs import Route
from disagg.protocol.peers.counts import RefusalKind
from disagg.protocol.peers.liveness import Leases
from disagg.protocol.rooms.offered import LayerRange
from disagg.protocol.status import Failure, Side
from kvpool.layout.types import MAX_REASON

PHASES = ("bind", "wait", "wire", "verify", "total")
LOGGED = ("asked", "wait", "bind", "wire", "verify", "done")
BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Of a histogram's buckets, in seconds."""

Shares = Iterable[tuple[Route, int, int]]
"""Runs and bytes of routes (`CopyBatch.shares`)."""
Roles = tuple[str, str]
"""An owner, and the roles that share runs: `("target", "latent, rope")`."""


class RoleMetrics(NamedTuple):
    """Runs and bytes bound for some roles."""

    runs: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class Histogram:
    """How many observations are at most each of BOUNDS and above the one before, those above all of
    them last; and their sum.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(BOUNDS, value)] += 1
        self.total += value

    def copy(self) -> Histogram:
        return Histogram(list(self.counts), self.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTimes:
    """One read that has ended: positions `start` to `stop`, of `layers` or of all, from rank
    `source` of prefill, and the bytes that have arrived since it was `begun`. In seconds after the
    room's request: when its chunk was `ready`, when the read had its turn (`begun`; None: it had
    none), and when its bytes were there, or could land no more (`ended`).
    """

    source: int
    start: int
    stop: int
    layers: LayerRange | None
    nbytes: int
    ready: float
    begun: float | None
    ended: float


@dataclass(slots=True, kw_only=True)
class RoomMetrics:
    """Bytes and runs of one room on one decode rank; times in seconds. A room of prefill, which
    sees no reads, has `chunks`, `asked_seconds` until a decode asks for it, `done_seconds` until
    all is computed, and `total_seconds`.

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
    by_role: dict[Roles, RoleMetrics] = field(default_factory=dict)
    reads: list[ReadTimes] = field(default_factory=list)
    released: dict[int, float] = field(default_factory=dict)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase, of those that have taken any (PHASES)."""
        seconds = {phase: getattr(self, f"{phase}_seconds") for phase in PHASES}
        return {phase: taken for phase, taken in seconds.items() if taken}

    @property
    def bytes_per_run(self) -> float:
        """Mean length of a run."""
        return self.bytes_bound / self.runs if self.runs else 0.0

    @property
    def rate(self) -> float:
        """Bytes a second while reading."""
        return self.bytes_moved / self.wire_seconds if self.wire_seconds else 0.0

    def bound(self, shares: Shares, seconds: float) -> None:
        """Counts a chunk of one rank that is bound and about to be read."""
        for route, runs, nbytes in shares:
            _add(self.by_role, (route.keys[0][0], route.roles), runs, nbytes)
            self.runs += runs
            self.bytes_bound += nbytes
        self.chunks += 1
        self.bind_seconds += seconds

    def moved(self, nbytes: int, seconds: float) -> None:
        """Counts what was read in so much time."""
        self.bytes_moved += nbytes
        self.wire_seconds += seconds

    def times(self) -> dict[str, float]:
        """Seconds of what there was, by name."""
        seconds = ((name, getattr(self, f"{name}_seconds")) for name in LOGGED)
        return {name: round(value, 6) for name, value in seconds if value}

    def copy(self) -> RoomMetrics:
        """The figures of now, which do not change any more."""
        reads, released = list(self.reads), dict(self.released)
        return replace(self, by_role=dict(self.by_role), reads=reads, released=released)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomSpan:
    """A room that has ended just now, of a request that has a `traceparent`. `facts` are those of
    the log.
    """

    side: Side
    traceparent: str
    failure: Failure | None
    metrics: RoomMetrics
    facts: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class Totals:
    """What rooms that have ended add up to, on one endpoint since it was made: `failures` by side
    and kind; of those that succeeded the seconds of each phase (`RoomMetrics.phases`).
    """

    rooms: dict[str, int] = field(default_factory=lambda: {"success": 0, "failed": 0})
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    chunks: int = 0
    bytes_moved: int = 0
    by_role: dict[Roles, RoleMetrics] = field(default_factory=dict)
    phases: dict[str, Histogram] = field(default_factory=dict)

    def count_ended(self, room: RoomMetrics, failure: Failure | None = None) -> None:
        """Counts a room that has ended."""
        self.rooms["failed" if failure else "success"] += 1
        if failure:
            self.failures[failure.side, failure.kind] += 1
        self.chunks += room.chunks
        self.bytes_moved += room.bytes_moved
        for roles, (runs, nbytes) in room.by_role.items():
            _add(self.by_role, roles, runs, nbytes)
        for phase, seconds in () if failure else room.phases.items():
            self.phases.setdefault(phase, Histogram()).observe(seconds)

    def copy(self) -> Totals:
        return replace(
            self,
            rooms=dict(self.rooms),
            failures=self.failures.copy(),
            by_role=dict(self.by_role),
            phases={phase: histogram.copy() for phase, histogram in self.phases.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An endpoint at one moment: `totals` is a copy, `peers` are those that are alive, `losses` how
    many were lost, `refusals` those of peers by side and kind (PeerCounts), `links` decode's by
    state (LINK_STATES), `quarantined_rooms` ended ones to which an engine may still write;
    `draining`: it takes no new ones. `telemetry` is the engine's, `plans` those that were known
    (`hit`) and those that were made (`miss`), which took `plan_seconds`.
    """

    totals: Totals
    open_rooms: int
    peers: int
    leases: Leases
    engine: str
    telemetry: Mapping[str, float]
    losses: int = 0
    refusals: Mapping[tuple[Side, RefusalKind], int] = field(default_factory=dict)
    links: Mapping[str, int] = field(default_factory=dict)
    quarantined_rooms: int = 0
    draining: bool = False
    plans: Mapping[str, int] = field(default_factory=dict)
    plan_seconds: float = 0.0


def _add(by_role: dict[Roles, RoleMetrics], roles: Roles, runs: int, nbytes: int) -> None:
    before = by_role.get(roles)
    if before is not None:
        runs, nbytes = before.runs + runs, before.nbytes + nbytes
    by_role[roles] = RoleMetrics(runs, nbytes)


def is_logged(failure: Failure | None) -> bool:
    """Whether the log takes the line of a room that has ended."""
    return log.isEnabledFor(_level(failure))


def log_end(side: Side, failure: Failure | None, **facts: object) -> None:
    """Logs a room that has ended on a side as one line of JSON: a success for debugging, an abort
    as information, all else as a warning. `facts`: `room`, the `trace` of its request, `peer`,
    `generation`, positions `start` and `tokens`, `bytes_moved`, `seconds`, and `times` of what.
    """
    why = {"event": "room succeeded", "side": side}
    if failure is not None:
        reason = failure.reason[:MAX_REASON]
        why = {"event": "room failed", "side": failure.side, "kind": failure.kind, "reason": reason}
    log.log(_level(failure), "%s", json.dumps(why | facts))


def _level(failure: Failure | None) -> int:
    if failure is None:
        return logging.DEBUG
    return logging.INFO if failure.kind == "abort" else logging.WARNING
