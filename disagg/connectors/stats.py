"""What an operator sees: rooms, bytes, seconds by phase and failures. A rank counts; the serving
engine carries the numbers, as plain data, to its log and to Prometheus.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from disagg.protocol.metrics import PHASES, RoomMetrics
from disagg.protocol.status import Failure

Numbers = dict[str, dict[str, Any]]
"""By series and label. `rooms`: read, failed to be read, served and not served; `bytes`; `failures`
by `side/kind`; `seconds` by phase, lists of one number a room.
"""
ROOMS = ("read", "failed", "served", "unserved")


class Series(NamedTuple):
    """A counter of Prometheus, or a histogram if it has `buckets`; `label` is its own."""

    name: str
    help: str
    label: str | None = None
    buckets: tuple[float, ...] = ()


SERIES = (
    Series("rooms", "Hand-offs that ended, by outcome.", "outcome"),
    Series("failures", "Failed hand-offs, by side and kind.", "kind"),
    Series("bytes", "Bytes of KV state read from prefill."),
    Series(
        "seconds",
        "Seconds of a hand-off, by phase.",
        "phase",
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    ),
)


def empty() -> Numbers:
    """No room."""
    return {
        "rooms": dict.fromkeys(ROOMS, 0),
        "failures": {},
        "bytes": {"": 0},
        "seconds": {phase: [] for phase in PHASES},
    }


class Stats:
    """Numbers of one rank since they were taken."""

    def __init__(self) -> None:
        self._numbers = empty()

    def sent(self, failure: Failure | None) -> None:
        """Counts a room of prefill that has ended."""
        self._count("unserved" if failure else "served", failure)

    def received(self, metrics: RoomMetrics, failure: Failure | None) -> None:
        """Counts a room of decode that has ended."""
        self._count("failed" if failure else "read", failure)
        if failure is None:
            for phase, seconds in self._numbers["seconds"].items():
                seconds.append(getattr(metrics, f"{phase}_seconds"))
        self._numbers["bytes"][""] += metrics.bytes_moved

    def take(self) -> Numbers | None:
        """The numbers since the last call; None where nothing has ended."""
        if not any(self._numbers["rooms"].values()):
            return None
        taken, self._numbers = self._numbers, empty()
        return taken

    def _count(self, what: str, failure: Failure | None) -> None:
        self._numbers["rooms"][what] += 1
        if failure:
            failures = self._numbers["failures"]
            kind = f"{failure.side}/{failure.kind}"
            failures[kind] = failures.get(kind, 0) + 1


def total(first: Numbers, second: Mapping[str, Any]) -> Numbers:
    """The numbers of two ranks, or of two intervals, together."""
    both = {name: dict(values) for name, values in first.items()}
    for name, values in second.items():
        for label, value in values.items():
            both[name][label] = both[name][label] + value if label in both[name] else value
    return both


def summary(numbers: Numbers) -> dict[str, int | float]:
    """One log line: counts, MB, and the mean milliseconds of each phase."""
    line: dict[str, int | float] = {f"Rooms {what}": n for what, n in numbers["rooms"].items()}
    line["MB read"] = round(numbers["bytes"][""] / 1e6, 3)
    for phase, seconds in numbers["seconds"].items():
        if seconds and any(seconds):
            line[f"Mean {phase} (ms)"] = round(1e3 * sum(seconds) / len(seconds), 3)
    for kind, count in numbers["failures"].items():
        line[f"Failures {kind}"] = count
    return line


def observations(numbers: Mapping[str, Any]) -> Iterator[tuple[Series, tuple[str, ...], float]]:
    """What Prometheus is told: a series, the value of its label, and a count or an observation."""
    for series in SERIES:
        for label, value in numbers[series.name].items():
            for observation in value if series.buckets else (value,):
                yield series, (label,) if series.label else (), observation
