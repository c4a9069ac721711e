"""`disagg.connectors.stats` in vLLM's log ("KV Transfer metrics") and on /metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from disagg.connectors import stats

SECONDS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]


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
    """`vllm:kvpool_*`: rooms and failures counted, bytes, seconds by phase."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        counter, histogram = self._counter_cls, self._histogram_cls
        self._rooms = self._metric(counter, "rooms", "Hand-offs that ended, by outcome.", "outcome")
        self._failures = self._metric(
            counter, "failures", "Failed hand-offs, by side and kind.", "kind"
        )
        self._bytes = self._metric(counter, "bytes", "Bytes of KV state read from prefill.")
        self._seconds = self._metric(
            histogram, "seconds", "Seconds of a hand-off, by phase.", "phase", buckets=SECONDS
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for outcome, count in transfer_stats_data["rooms"].items():
            self._rooms.labels(*labels, outcome).inc(count)
        for kind, count in transfer_stats_data["failures"].items():
            self._failures.labels(*labels, kind).inc(count)
        self._bytes.labels(*labels).inc(transfer_stats_data["bytes"])
        for phase, seconds in transfer_stats_data["seconds"].items():
            for value in seconds:
                self._seconds.labels(*labels, phase).observe(value)

    def _metric(self, kind: Any, name: str, what: str, *labels: str, **more: Any) -> Any:
        names = [*self._labelnames, *labels]
        return kind(name=f"vllm:kvpool_{name}", documentation=what, labelnames=names, **more)
