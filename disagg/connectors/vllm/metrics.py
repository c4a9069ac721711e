"""`disagg.connectors.stats` in vLLM's log ("KV Transfer metrics") and on /metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from disagg.connectors import stats


class KvpoolStats(KVConnectorStats):
    """`stats.Numbers` as vLLM carries them."""

    def reset(self) -> None:
        self.data = stats.empty()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return KvpoolStats(stats.total(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return stats.summary(self.data)

    def is_empty(self) -> bool:
        return not any(self.data["rooms"].values())


class KvpoolPromMetrics(KVConnectorPromMetrics):
    """`vllm:kvpool_*`: `stats.SERIES`, by engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._metrics = {series: self._metric(series) for series in stats.SERIES}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for series, label, value in stats.observations(transfer_stats_data):
            metric = self._metrics[series].labels(*engine, *label)
            (metric.observe if series.buckets else metric.inc)(value)

    def _metric(self, series: stats.Series) -> Any:
        labels = [*self._labelnames, *([series.label] if series.label else [])]
        named = {"name": f"vllm:kvpool_{series.name}", "documentation": series.help}
        if series.buckets:
            return self._histogram_cls(**named, labelnames=labels, buckets=series.buckets)
        return self._counter_cls(**named, labelnames=labels)
