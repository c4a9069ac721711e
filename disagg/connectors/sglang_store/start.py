"""Makes SGLang's radix cache with a store below it, or says why there cannot be one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.runtime_context import get_parallel

from disagg.connectors.conventions import weights_digest
from disagg.connectors.scales import scale_conventions
from disagg.connectors.settings import Settings
from disagg.connectors.sglang.conventions import engine_conventions
from disagg.connectors.sglang.manager import SETTINGS, model_ranks
from disagg.connectors.sglang.metrics import publish_store
from disagg.connectors.sglang.pools import SglangLayout, engine_layout
from disagg.connectors.sglang.scales import rank_scales
from disagg.connectors.sglang_store.cache import KvpoolRadixCache
from disagg.connectors.store.steps import Opening
from kvpool.layout import PoolLayout

NO_URL = (
    f"radix cache kvpool: {SETTINGS} names no store. Set it to a JSON object such as "
    '{"store": "file:///cache"}.'
)


def make_cache(ctx: Any) -> KvpoolRadixCache:
    """SGLang's factory of the radix cache. Raises ValueError that names what cannot be."""
    settings = Settings.of_environment(SETTINGS, unused=("stream", "shared_memory"))
    if settings.store is None:
        raise ValueError(NO_URL)
    for what, instead in refused(ctx, settings):
        raise ValueError(f"radix cache kvpool does not know {what}. Use {instead}.")
    layout, rank = rank_layout(ctx), get_parallel().attn_tp_rank
    runner = ctx.tp_worker.model_runner
    loaded = ctx.server_args.load_format != "dummy"
    conventions = engine_conventions(ctx.model_config, [*runner.model.modules()], loaded)
    conventions |= scale_conventions(layout.layout, rank_scales([runner]))
    if loaded and (weights := digest(ctx.model_config)):
        conventions["weights"] = weights
    opening = Opening.of([(data, conventions) for data in all_layouts(ctx, layout.layout)])
    store = opening.store(settings, rank, layout.layout)
    cache: KvpoolRadixCache = create_unified_radix_cache(ctx, cache_class=KvpoolRadixCache)
    on_host = all(buffer.on_host for buffer in layout.layout.buffers)
    cache.open(store, layout, leads=rank == 0, stream=None if on_host else runner.forward_stream)
    publish_store(store.stats, rank, ctx.server_args)
    return cache


def digest(model: Any) -> str | None:
    """Of a model's weights; of one of a hub, of its files on this host."""
    folder = model.model_path
    if not Path(folder).is_dir():
        from huggingface_hub import snapshot_download  # of SGLang's requirements

        with suppress(Exception):  # there are many reasons why there is none
            folder = snapshot_download(folder, revision=model.revision, local_files_only=True)
    return weights_digest(folder)


def refused(ctx: Any, settings: Settings) -> Iterator[tuple[str, str]]:
    """What cannot be, and what to use instead."""
    options, params, parallel = ctx.server_args, ctx.params, get_parallel()
    allocator = params.token_to_kv_pool_allocator
    rings = getattr(allocator, "swa_req_ring", False)
    pure = ctx.is_hybrid_swa and ctx.full_tokens_per_layer == 0
    chunk = settings.chunk_tokens
    for wrong, what, instead in (
        (not hasattr(BasePrefixCache, "checkpoint"), "this SGLang", "0.5.23 or later"),
        (not hasattr(Scheduler.__init__, "__wrapped__"), "a Scheduler without its hook: the plugin "
         "group has not run", "SGLANG_PLUGINS with kvpool in it, or none"),
        (ctx.disable_radix_cache, "disable_radix_cache", "a radix cache"),
        (params.pp_size > 1, f"pp_size {params.pp_size}", "1"),
        (params.attn_cp_size > 1, f"attn_cp_size {params.attn_cp_size}", "1"),
        (parallel.dcp_enabled, "dcp_size above 1", "1"),
        (parallel.attn_dp_enabled, "enable_dp_attention", "tensor parallelism"),
        (options.speculative_algorithm is not None,
         f"speculative_algorithm {options.speculative_algorithm}", "none"),
        (options.disaggregation_mode == "decode", "disaggregation_mode decode",
         "it on prefill, or on engines that do both"),
        (ctx.enable_hierarchical_cache, "enable_hierarchical_cache", "the store alone"),
        (options.enable_lmcache, "enable_lmcache", "the store alone"),
        (options.enable_flexkv, "enable_flexkv", "the store alone"),
        (options.enable_memory_saver, "enable_memory_saver", "memory that stays where it is"),
        (options.enable_unified_memory, "enable_unified_memory", "a pool for each kind of state"),
        (options.enable_hisparse, "enable_hisparse", "the device's pool"),
        (options.enable_streaming_session, "enable_streaming_session", "requests of their own"),
        (options.dllm_algorithm is not None, "dllm_algorithm", "a model that goes left to right"),
        (pure or rings, "a model of windows alone, or windows in a ring a request",
         "SGLang's own radix cache"),
        (params.enable_mamba_extra_buffer, "mamba_radix_cache_strategy extra_buffer", "no_buffer"),
        (options.enable_linear_replayssm, "enable_linear_replayssm", "states without a ring"),
        (chunk % params.page_size, f"page_size {params.page_size}, which does not divide "
         f"chunk_tokens {chunk}", "a page size that does"),
    ):  # fmt: skip
        if wrong:
            yield what, instead


def rank_layout(ctx: Any) -> SglangLayout:
    """What this rank's pools mean."""
    runner, params, parallel = ctx.tp_worker.model_runner, ctx.params, get_parallel()
    ranks = model_ranks(
        ctx.model_config,
        [*runner.model.modules()],
        window=params.sliding_window_size,
        tp=(parallel.attn_tp_rank, parallel.attn_tp_size),
    )
    return engine_layout(
        runner.token_to_kv_pool,
        ranks,
        state_types=[
            name
            for name, is_hybrid in (("swa", ctx.is_hybrid_swa), ("mamba", ctx.is_hybrid_ssm))
            if is_hybrid
        ],
        total_layers=ctx.model_config.num_hidden_layers,
        requests=params.req_to_token_pool,
        model=ctx.model_config.model_path,
    )


def all_layouts(ctx: Any, own: PoolLayout) -> list[bytes]:
    """The layouts of all ranks, encoded, which each of them tells the others."""
    group, size = ctx.params.attn_tp_cache_group, get_parallel().attn_tp_size
    told = [own.to_msgpack()] * size
    if size > 1:
        torch.distributed.all_gather_object(told, told[0], group=group)
    return told
