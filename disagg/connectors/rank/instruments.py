"""A rank's numbers as metrics of its engine's own Prometheus client."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from disagg.connectors.rank.stats import Numbers
from disagg.series import SOURCES, UP

Classes = Mapping[Literal["counter", "gauge", "histogram"], Any]


class Instruments:
    """Counters, gauges and histograms of one process, of an engine's `classes` and with its
    `labels` before a series' own. `mode`: how the gauges of several processes add up.
    """

    def __init__(self, labels: Sequence[str], classes: Classes, mode: str) -> None:
        self._metrics: dict[str, Any] = {}
        self._gauges: defaultdict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
        """Each rank's, as it was told last: not every rank tells at the same time."""
        for source in "endpoint", "store":
            for series in SOURCES[source]:
                if series is UP:
                    continue
                self._unregister(series.name)
                more: dict[str, Any] = {}
                if series.kind == "gauge":
                    more["multiprocess_mode"] = mode
                elif series.kind == "histogram":
                    more["buckets"] = series.buckets
                self._metrics[series.name] = classes[series.kind](
                    name=series.name,
                    documentation=series.help,
                    labelnames=[*labels, source, *series.labels.split()],
                    **more,
                )

    def observe(self, numbers: Numbers, values: Sequence[str] = ()) -> None:
        """Takes a rank's numbers, or several's. `values` are those of the engine's labels."""
        for key, number in numbers.items():
            name, *own = key.split("\t")
            labels = [*values, *own]
            metric = self._metrics[name].labels(*labels)
            if isinstance(number, dict):
                gauge = name, *labels
                ranks = self._gauges[gauge]
                ranks.update(number)
                metric.set(sum(ranks.values()))
            elif isinstance(number, list):
                for observation in number:
                    metric.observe(observation)
            else:
                metric.inc(number)

    @staticmethod
    def _unregister(name: str) -> None:
        """Frees a name that an earlier engine of this process has used, as vLLM does its own."""
        from prometheus_client import REGISTRY

        collector = REGISTRY._names_to_collectors.get(name)
        if collector is not None:
            REGISTRY.unregister(collector)


def prometheus_classes() -> Classes:
    """Those of `prometheus_client`, which chooses when it is first imported, by a variable of the
    environment, whether several processes count together.
    """
    import prometheus_client as client

    return {"counter": client.Counter, "gauge": client.Gauge, "histogram": client.Histogram}
