"""vLLM's side of the connector: its two roles, and what vLLM's interface asks of each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from disagg.connectors.vllm import stats
from disagg.connectors.vllm.layout import engine_layout
from disagg.connectors.vllm.memory import SharedAllocation
from disagg.connectors.vllm.scheduler import Scheduler, Step
from disagg.connectors.vllm.settings import Settings
from disagg.connectors.vllm.worker import Worker

KVConnectorMetadata.register(Step)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """The endpoint address of one prefill rank."""

    address: str


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
        self._rooms = self._counter("rooms", "Hand-offs that ended, by outcome.", "outcome")
        self._failures = self._counter("failures", "Failed hand-offs, by side and kind.", "kind")
        self._bytes = create_metric_per_engine(
            self._counter_cls(
                name="vllm:kvpool_bytes",
                documentation="Bytes of KV state read from prefill.",
                labelnames=self._labelnames,
            ),
            self.per_engine_labelvalues,
        )
        self._seconds = self._histogram_cls(
            name="vllm:kvpool_seconds",
            documentation="Seconds of a hand-off, by phase.",
            buckets=[0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0],
            labelnames=[*self._labelnames, "phase"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for outcome, count in transfer_stats_data["rooms"].items():
            self._rooms.labels(*labels, outcome).inc(count)
        for kind, count in transfer_stats_data["failures"].items():
            self._failures.labels(*labels, kind).inc(count)
        self._bytes[engine_idx].inc(transfer_stats_data["bytes"])
        for phase, seconds in transfer_stats_data["seconds"].items():
            for value in seconds:
                self._seconds.labels(*labels, phase).observe(value)

    def _counter(self, name: str, what: str, label: str) -> Any:
        return self._counter_cls(
            name=f"vllm:kvpool_{name}", documentation=what, labelnames=[*self._labelnames, label]
        )


class KvpoolConnector(KVConnectorBase_V1, SupportsHMA):
    """A KV connector over kvpool: decode engines pull what prefill engines have computed.

    --kv-transfer-config '{"kv_connector": "KvpoolConnector", "kv_role": "kv_producer",
                           "kv_connector_module_path": "disagg.connectors.vllm"}'

    `kv_connector_extra_config` takes `settings.Settings`.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.read(transfer.kv_connector_extra_config)
        self._scheduler: Any = None
        self._worker: Any = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(
                kv_cache_config,
                produces=transfer.is_kv_producer,
                consumes=transfer.is_kv_consumer,
                stream=self._settings.stream is not None,
                cuts=_moves_on(kv_cache_config),
            )

    # scheduler

    def on_new_request(self, request: Any) -> None:
        self._scheduler.arrived(request)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        matched: tuple[int, bool] = self._scheduler.matched(request, num_computed_tokens)
        return matched

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._scheduler.scheduled(scheduler_output)
        return self._scheduler.step()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        finished: tuple[bool, dict[str, Any] | None] = self._scheduler.finished(request, block_ids)
        return finished

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.received(connector_output.finished_recving or ())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._scheduler.serve([metadata[rank].address for rank in sorted(metadata)])

    # worker

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        shared = self._settings.shared_memory and self._settings.engine == "local"
        return SharedAllocation() if shared else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config, transfer = self._vllm_config.parallel_config, self._kv_transfer_config
        self._worker = Worker(
            self._settings,
            engine_layout(self._vllm_config, self._kv_cache_config, kv_caches),
            produces=transfer.is_kv_producer,
            consumes=transfer.is_kv_consumer,
            ranks=config.tensor_parallel_size * config.pipeline_parallel_size,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        prefill = self._worker.prefill
        return None if prefill is None else Handshake(prefill.address)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.begin(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests wait for their whole state before they are scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """A step's state is offered in `wait_for_save`."""

    def wait_for_save(self) -> None:
        self._worker.save(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._worker.results()
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        numbers = None if self._worker is None else self._worker.stats.take()
        return None if numbers is None else KvpoolStats(numbers)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # both

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return KvpoolStats(stats.empty() if data is None else data)

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVConnectorPromMetrics:
        return KvpoolPromMetrics(*args)


def _moves_on(kv_cache_config: Any) -> bool:
    """Whether a token more changes or drops state of the tokens before."""
    groups: Sequence[Any] = kv_cache_config.transfer_groups
    specs = [group.kv_cache_spec for group in groups]
    inner = [one for spec in specs for one in getattr(spec, "kv_cache_specs", {"": spec}).values()]
    names = ("Mamba", "SlidingWindow", "ChunkedLocal", "CircularBuffer")
    return any(base.__name__.startswith(names) for spec in inner for base in type(spec).__mro__)
