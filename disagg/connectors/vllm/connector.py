"""vLLM's side of the connector: its two roles, and what vLLM's interface asks of each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics

from disagg.connectors.blocks import Blocks
from disagg.connectors.contracts import ServingEngine, drain_at_sigterm, serve_contract
from disagg.connectors.conventions import conventions
from disagg.connectors.memory import SharedAllocation
from disagg.connectors.rank import stats
from disagg.connectors.rank.instruments import Classes, Instruments
from disagg.connectors.rank.rank import Rank
from disagg.connectors.scales import scale_conventions
from disagg.connectors.settings import Settings
from disagg.connectors.steps import Step
from disagg.connectors.vllm.layout import SPECS, engine_layout
from disagg.connectors.vllm.registered import module_scales
from disagg.connectors.vllm.scheduler import ConnectorScheduler, log
from disagg.connectors.vllm_store.engine import stored_blocks, stored_requests
from disagg.connectors.worker import ConnectorWorker
from disagg.protocol.messages import Convention

base.KVConnectorMetadata.register(Step)
EXTRA = "kv_connector_extra_config"
Finished = tuple[bool, dict[str, Any] | None]


class KvpoolStats(metrics.KVConnectorStats):
    """`stats.Numbers` as vLLM carries them to its log ("KV Transfer metrics")."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: metrics.KVConnectorStats) -> metrics.KVConnectorStats:
        return KvpoolStats(stats.total(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return stats.summary(self.data)

    def is_empty(self) -> bool:
        """Whether the log has nothing to say: gauges alone are for /metrics."""
        return not self.reduce()


class KvpoolPromMetrics(metrics.KVConnectorPromMetrics):
    """The series of `disagg.series` on vLLM's /metrics, by its labels and engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        classes: Classes = {
            "counter": self._counter_cls,
            "gauge": self._gauge_cls,
            "histogram": self._histogram_cls,
        }
        self._instruments = Instruments(self._labelnames, classes, mode="mostrecent")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        self._instruments.observe(transfer_stats_data, values)


@dataclass
class Handshake(base.KVConnectorHandshakeMetadata):
    """Of one rank: prefill's address, its layout, encoded, and its conventions."""

    address: str | None
    layout: bytes
    conventions: dict[str, Convention]


class KvpoolConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """A KV connector over kvpool: decode engines pull what prefill engines have computed.

    --kv-transfer-config '{"kv_connector": "KvpoolConnector", "kv_role": "kv_producer",
                           "kv_connector_module_path": "disagg.connectors.vllm"}'

    `kv_connector_extra_config` takes `disagg.connectors.settings.Settings`.
    """

    _scheduler: ConnectorScheduler
    _worker: ConnectorWorker

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any) -> None:
        if getattr(vllm_config.model_config, "enable_sleep_mode", False):
            raise ValueError(
                "enable_sleep_mode True: peers know KV memory's addresses, and cannot read it once "
                "vLLM unmaps it. Leave --enable-sleep-mode out."
            )
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.read(transfer.kv_connector_extra_config, EXTRA)
        self._roles = {"produces": transfer.is_kv_producer, "consumes": transfer.is_kv_consumer}
        stream = self._settings.stream
        # microbatches compute a layer several times a step, each time for some requests
        self._by_layer = stream == "layers" and not vllm_config.parallel_config.use_ubatching
        if role == base.KVConnectorRole.SCHEDULER:
            kinds = _kinds(kv_cache_config)
            drafts = vllm_config.speculative_config is not None
            # vLLM cannot be told of a block that did not come where it has several groups, asks
            # what has come before its drafter runs, and an engine that waits for another must not
            # be one that another waits for
            whole = kinds != {"kv"} or len(kv_cache_config.kv_cache_groups) > 1 or drafts
            store = stored_requests(
                self._settings, vllm_config, kv_cache_config, _specs(kv_cache_config)
            )
            refusal = None
            if transfer.is_kv_consumer:
                refusal = _keep_windows_private(vllm_config, kv_cache_config, store is not None)
            self._scheduler = ConnectorScheduler(
                kv_cache_config,
                **self._roles,
                stream=stream is not None,
                recomputes=max(1, vllm_config.num_prefill_lookahead_tokens),
                state="state" in kinds,
                window=kinds != {"kv"},
                drafts=drafts,
                waits=stream == "layers" and not (whole or transfer.is_kv_producer),
                refusal=refusal,
                store=store,
            )

    # scheduler

    def on_new_request(self, request: Any) -> None:
        self._scheduler.arrived(request)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._scheduler.scheduled(scheduler_output)
        return self._scheduler.step()

    def request_finished_all_groups(self, request: Any, block_ids: Blocks) -> Finished:
        return self._scheduler.finished(request, block_ids)

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> Finished:
        return self._scheduler.finished(request, (block_ids,))

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.received(connector_output.finished_recving or ())
        if self._scheduler.store is not None:
            self._scheduler.store.received(connector_output)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        ranks = [metadata[rank] for rank in sorted(metadata)]
        self._scheduler.serve([rank.address for rank in ranks if rank.address])
        if self._scheduler.store is not None:
            self._scheduler.store.open(ranks)
        number = self._vllm_config.parallel_config.data_parallel_index
        engine = ServingEngine(package="vllm", size=len(ranks), number=number, **self._roles)
        self._contract = serve_contract(self._settings, engine, ranks, log)
        if self._contract is not None:
            drain_at_sigterm(self._contract)

    def reset_cache(self) -> bool | None:
        """Of an engine whose weights may be others from now on."""
        if self._scheduler.store is not None:
            self._scheduler.store.reset()
        return True

    # worker

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        shared = self._settings.shared_memory and self._settings.engine == "local"
        return SharedAllocation() if shared else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._vllm_config
        layout = engine_layout(config, self._kv_cache_config, kv_caches)
        modules = config.compilation_config.static_forward_context
        scales = module_scales(modules, layout.layers)
        conventions = engine_conventions(config) | scale_conventions(layout.layout, scales)
        parallel = config.parallel_config
        options: dict[str, Any] = {
            "readers": parallel.world_size,
            "conventions": conventions,
            "log": log,
        }
        # of a dense model each replica is an engine of its own, which knows its index
        number = parallel.data_parallel_index * parallel.world_size + parallel.rank
        rank = Rank(self._settings, layout.layout, **self._roles, **options, number=number)
        cleared = []
        if self._kv_cache_config.needs_kv_cache_zeroing and self._roles["consumes"]:
            for group in self._kv_cache_config.transfer_groups:
                views = [kv_caches[name] for name in group.layer_names if name in kv_caches]
                blocks = self._kv_cache_config.num_blocks
                cleared.append([view.view(blocks, -1, *view.shape[1:]) for view in views])
        store = stored_blocks(self._settings, layout.layout, layout.groups, parallel.rank)
        self._said = dict(self._settings.options(conventions)["conventions"])
        self._worker = ConnectorWorker(
            rank=rank, groups=layout.groups, layers=layout.layers, cleared=cleared, store=store
        )

    def get_handshake_metadata(self) -> base.KVConnectorHandshakeMetadata | None:
        rank = self._worker.rank
        if rank.address is None and self._settings.contract is None:
            return None
        return Handshake(rank.address, rank.layout.to_msgpack(), self._said)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._worker.settle(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.begin(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker.wait_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        step = self._get_connector_metadata()
        if self._by_layer and step.sends:
            self._worker.save_layer(layer_name, step)

    def wait_for_save(self) -> None:
        self._worker.save(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        results = self._worker.results(finished_req_ids)
        return base.KVConnectorTransferResults(results.sent, results.received, results.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.invalid_blocks()

    def get_kv_connector_stats(self) -> KvpoolStats | None:
        scheduler = self.role == base.KVConnectorRole.SCHEDULER
        counted = self._scheduler.store if scheduler else self._worker.rank.stats
        numbers = None if counted is None else counted.take()
        return None if numbers is None else KvpoolStats(numbers)

    def shutdown(self) -> None:
        half = getattr(self, "_worker", None) or self._scheduler.store
        for part in filter(None, (half, getattr(self, "_contract", None))):
            part.close()

    # both

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return extra_config.get("stream") == "layers"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvpoolStats:
        return KvpoolStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> metrics.KVConnectorPromMetrics:
        return KvpoolPromMetrics(*args)


def _keep_windows_private(config: Any, kv_cache_config: Any, store: bool) -> str | None:
    """Turns prefix caching off where windows are handed over. vLLM would give the first block of a
    window to other requests as a whole: of positions 128 to 191 those from 172 on, if the window
    begins there, are what was handed over. Raises ValueError where recurrent state needs caching.
    With a store, which gives whole blocks, caching stays on; returns why nothing is handed over.
    """
    specs = _specs(kv_cache_config)
    kept = (s for s in specs if SPECS.get(type(s).__name__) == "swa")
    if not config.cache_config.enable_prefix_caching or not any(
        getattr(spec, "prefix_cacheable", True) for spec in kept
    ):
        return None
    why = "only what a sliding window sees is handed over, and its blocks cannot serve others"
    if store:
        return f"enable_prefix_caching with a store: {why}. Use --no-enable-prefix-caching."
    if any(SPECS.get(type(spec).__name__) == "state" for spec in specs):
        raise ValueError(f"enable_prefix_caching: {why}. Use --no-enable-prefix-caching.")
    log.warning("prefix caching is off: %s.", why)
    config.cache_config.enable_prefix_caching = False
    return None


def engine_conventions(config: Any) -> dict[str, Convention]:
    """Of the model and, by names that begin with `draft.`, of the model that drafts."""
    conventions = _conventions(config, config.model_config)
    speculative = config.speculative_config
    if speculative is not None and speculative.uses_draft_kv_cache():
        draft = _conventions(config, speculative.draft_model_config)
        # of several modules, each runs for a token of its own: fewer leave the others' state empty
        draft["lookahead"] = config.num_prefill_lookahead_tokens
        conventions |= {f"draft.{name}": value for name, value in draft.items()}
    return conventions


def _conventions(config: Any, model: Any) -> dict[str, Convention]:
    loaded = config.load_config.load_format != "dummy"
    return conventions(
        model.hf_text_config,
        revision=getattr(model.revision, "resolved", None) if loaded else None,
        folder=model.model if loaded else None,
        quantization=model.quantization,
        index_keys="plain",  # vLLM's indexer turns none
        compressor_scores="biased",
    )


def _kinds(kv_cache_config: Any) -> set[str | None]:
    """What the cache groups hold, as SPECS names it."""
    flat = _specs(kv_cache_config)
    # a window that is replayed is that of the token that decode computes, as a recurrent state is
    replayed = any(getattr(spec, "bounded_replay", False) for spec in flat)
    return {SPECS.get(type(spec).__name__) for spec in flat} | ({"state"} if replayed else set())


def _specs(kv_cache_config: Any) -> list[Any]:
    """Of the cache groups that are handed over, and of the layers of those that have several."""
    specs = [group.kv_cache_spec for group in kv_cache_config.transfer_groups]
    inner = [getattr(spec, "kv_cache_specs", {"": spec}).values() for spec in specs]
    return [spec for group in inner for spec in group]
