"""What an operator sees. A rank counts; its engine carries plain data to its log and Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from disagg.protocol.metrics import PHASES, RoomMetrics
from disagg.protocol.status import Failure

if TYPE_CHECKING:
    from disagg.store import StoreStats

Numbers = dict[str, Any]
"""By `series label`: counts of `rooms` (read, failed to be read, served and not served), of
`failures` by side and kind, and of `bytes`; of `seconds`, by phase, a list of one number a room. Of
a store, by outcome, how often (`store`), and `store_tokens` or `store_bytes`.
"""


class Series(NamedTuple):
    """A counter of Prometheus, or a histogram if it has `buckets`; `label` is its own."""

    help: str
    label: str | None = None
    buckets: tuple[float, ...] = ()


BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SERIES = {
    "rooms": Series("Hand-offs that ended, by outcome.", "outcome"),
    "failures": Series("Failed hand-offs, by side and kind.", "kind"),
    "bytes": Series("Bytes of KV state read from prefill."),
    "seconds": Series("Seconds of a hand-off, by phase.", "phase", BUCKETS),
    "store": Series("What a store was asked for and was given, by outcome.", "outcome"),
    "store_tokens": Series("Tokens of lookups and failed reads of a store, by outcome.", "outcome"),
    "store_bytes": Series("Bytes read from a store and given to it, by outcome.", "outcome"),
}
IN_BYTES = "read", "written", "already there", "not written", "dropped", "gone"
"""Outcomes at a store (`disagg.store.stats`) that are counted in bytes, the others in tokens."""


class Stats:
    """Numbers of one rank since they were taken."""

    def __init__(self) -> None:
        self._numbers: Numbers = {}
        self._store: StoreStats | None = None

    def sent(self, failure: Failure | None) -> None:
        """Counts a room of prefill that has ended."""
        self._ended("unserved" if failure else "served", failure)

    def received(self, metrics: RoomMetrics, failure: Failure | None) -> None:
        """Counts a room of decode that has ended."""
        self._ended("failed" if failure else "read", failure)
        self._count("bytes", metrics.bytes_moved)
        for phase in PHASES if failure is None else ():
            seconds = self._numbers.setdefault(f"seconds {phase}", [])
            seconds.append(getattr(metrics, f"{phase}_seconds"))

    def stored(self, stats: StoreStats) -> None:
        """Counts what has become of a store's lookups, reads and writes since the last call."""
        before, self._store = self._store, stats
        for name, count in stats.counts.items():
            more = count - (before.counts[name] if before else 0)
            if more:
                size = stats.sizes[name] - (before.sizes[name] if before else 0)
                unit = "bytes" if name in IN_BYTES else "tokens"
                self._count(f"store {name}", more)
                self._count(f"store_{unit} {name}", size)

    def take(self) -> Numbers | None:
        """The numbers since the last call; None where nothing has ended."""
        taken, self._numbers = self._numbers, {}
        return taken or None

    def _ended(self, outcome: str, failure: Failure | None) -> None:
        self._count(f"rooms {outcome}", 1)
        if failure:
            self._count(f"failures {failure.side}/{failure.kind}", 1)

    def _count(self, name: str, more: int) -> None:
        self._numbers[name] = self._numbers.get(name, 0) + more


def instruments(prefix: str, labels: Sequence[str], counter: Any, histogram: Any) -> dict[str, Any]:
    """Prometheus' counters and histograms, by series; `labels`: those of the engine."""
    made = {}
    for name, series in SERIES.items():
        own = [*labels, *([series.label] if series.label else [])]
        named = {"name": f"{prefix}{name}", "documentation": series.help, "labelnames": own}
        made[name] = (
            histogram(**named, buckets=series.buckets) if series.buckets else counter(**named)
        )
    return made


def total(first: Numbers, second: Numbers) -> Numbers:
    """The numbers of two ranks, or of two intervals, together."""
    shared = {name: first[name] + second[name] for name in first.keys() & second.keys()}
    return first | second | shared


def summary(numbers: Numbers) -> dict[str, int | float]:
    """One log line: counts, MB, and the mean milliseconds of each phase."""
    line: dict[str, int | float] = {}
    for name, value in numbers.items():
        if name == "bytes":
            line["MB read"] = round(value / 1e6, 3)
        elif not isinstance(value, list):
            line[name.replace("_", " ").capitalize()] = value
        elif any(value):
            phase = name.removeprefix("seconds ")
            line[f"Mean {phase} (ms)"] = round(1e3 * sum(value) / len(value), 3)
    return line


def observations(numbers: Numbers) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """What Prometheus is told: a series, the value of its label, and a count or an observation."""
    for name, value in numbers.items():
        series, *label = name.split(" ", 1)
        for observation in value if SERIES[series].buckets else (value,):
            yield series, tuple(label), observation
