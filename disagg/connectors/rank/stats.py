"""What a rank counts, as plain data, which its engine carries to its log and to Prometheus.

Its endpoints and stores are asked for the series of `disagg.series`; counters are told as what has
come since the last time, gauges as they are. Times are told room by room: Prometheus' histograms
take nothing else.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from disagg.protocol.metrics import RoomMetrics, Snapshot
from disagg.protocol.status import Failure
from disagg.series import ENDPOINT, STORE, Series
from disagg.store.stats import StoreStats

Numbers = dict[str, Any]
"""By series and values of its labels, joined by tabs: how much more a counter is, the observations
of a histogram as a list, or a gauge by rank. So the numbers of ranks, and of intervals, are added
up by `total`, for any series.
"""
SECONDS = 1.0
"""How often sources are asked while no room ends."""
PHASE_SERIES = next(series for series in ENDPOINT if series.kind == "histogram")
LOGGED = {
    "kvpool_rooms_total": "rooms",
    "kvpool_failures_total": "failures",
    "kvpool_refusals_total": "refusals",
    "kvpool_lost_peers_total": "lost peers",
    "kvpool_store_outcomes_total": "store",
    "kvpool_store_tokens_total": "tokens",
    "kvpool_store_bytes_total": "bytes",
}
"""Counters that the log has, as it names them."""


class _SeriesSource(NamedTuple):
    """What is asked for the series of a table."""

    table: Sequence[Series[Any]]
    state: Callable[[], Any]


class Stats:
    """Numbers of one rank since they were taken. Any thread may call."""

    def __init__(self, rank: int | str = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank, self._clock, self._lock = str(rank), clock, threading.Lock()
        self._sources: dict[str, _SeriesSource] = {}
        """By the value of the label that names them."""
        self._counted: dict[str, float] = {}
        self._gauges: Numbers = {}
        self._observed: Numbers = {}
        self._due = -math.inf

    def watch_endpoint(self, side: str, snapshot: Callable[[], Snapshot]) -> None:
        self._watch(side, _SeriesSource(ENDPOINT, snapshot))

    def watch_store(self, stats: Callable[[], StoreStats]) -> None:
        self._watch("kv", _SeriesSource(STORE, stats))

    def received(self, metrics: RoomMetrics, failure: Failure | None) -> None:
        """A room of decode has ended."""
        with self._lock:
            for phase, seconds in () if failure else metrics.phases.items():
                self._observed.setdefault(_key(PHASE_SERIES, "decode", phase), []).append(seconds)
        self.changed()

    def end(self) -> None:
        """Its sources end: gauges are 0 from now on, and nothing more is counted."""
        with self._lock:
            self._sources.clear()
        self.changed()

    def changed(self) -> None:
        """Sources are asked when the numbers are taken next: something has ended."""
        self._due = -math.inf

    def take(self) -> Numbers | None:
        """The numbers since the last call; None where nothing is new."""
        now = self._clock()
        if now < self._due:
            return None
        with self._lock:
            self._due = now + SECONDS
            taken, self._observed = self._observed, {}
            gauges: Numbers = {}
            for label, source in self._sources.items():
                state = source.state()
                for series in source.table:
                    if series.kind != "histogram":
                        numbers = gauges if series.kind == "gauge" else taken
                        self._add(numbers, series, label, series.samples(state))
            # a gauge that no source has any more is 0: a space without leased items
            gauges |= {key: {self._rank: 0} for key in self._gauges.keys() - gauges.keys()}
            if taken or gauges != self._gauges:
                self._gauges = gauges
                taken |= gauges
        return taken or None

    def _watch(self, label: str, source: _SeriesSource) -> None:
        with self._lock:
            self._sources[label] = source
            # one that was made again counts from 0
            kept = {k: n for k, n in self._counted.items() if k.split("\t")[1] != label}
            self._counted = kept
        self.changed()

    def _add(
        self, numbers: Numbers, series: Series[Any], label: str, samples: Mapping[Any, Any]
    ) -> None:
        for values, number in samples.items():
            key = _key(series, label, *values)
            if series.kind == "gauge":
                numbers[key] = {self._rank: number}
            elif number != self._counted.get(key):  # also a first 0: the series exists from then on
                numbers[key] = number - self._counted.get(key, 0)
                self._counted[key] = number


def total(first: Numbers, second: Numbers) -> Numbers:
    """The numbers of two ranks, or of two intervals, together."""
    together = first | second
    for key in first.keys() & second.keys():
        left, right = first[key], second[key]
        together[key] = left | right if isinstance(left, dict) else left + right
    return together


def summary(numbers: Numbers) -> dict[str, int | float]:
    """One log line: counts, MB, and the mean milliseconds of each phase."""
    line: dict[str, int | float] = {}
    for key, number in numbers.items():
        name, source, *values = key.split("\t")
        words = "/".join(values)
        if name == PHASE_SERIES.name:
            line[f"{source} mean {words} (ms)"] = round(1e3 * sum(number) / len(number), 3)
        elif name == "kvpool_moved_bytes_total" and number:
            line[f"{source} MB"] = round(number / 1e6, 3)
        elif name in LOGGED and number:
            line[f"{source} {LOGGED[name]} {words}".strip()] = number
    return line


def _key(series: Series[Any], *values: str) -> str:
    return "\t".join((series.name, *values))
