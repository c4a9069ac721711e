"""What a store asks of vLLM's configuration, which is read by name, and its halves in vLLM's
scheduler and workers. An engine without a store imports nothing of one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import lcm
from typing import TYPE_CHECKING, Any

from disagg.connectors.blocks import BlockGroup
from disagg.connectors.settings import Settings
from kvpool.layout import PoolLayout

if TYPE_CHECKING:
    from disagg.connectors.store.worker import StoreWorker
    from disagg.connectors.vllm_store.requests import StoredRequests

log = logging.getLogger("vllm.kvpool")


def stored_requests(
    settings: Settings, config: Any, kv_cache_config: Any, specs: Sequence[Any]
) -> StoredRequests | None:
    """The scheduler's half; None without a store. Sees to it that what a store does not give is
    computed. `specs` are those of the cache groups. Raises ValueError.
    """
    if settings.store is None:
        return None
    from disagg.connectors.vllm_store.media import encoder
    from disagg.connectors.vllm_store.requests import StoredRequests

    transfer = config.kv_transfer_config
    if transfer.kv_role != "kv_both":
        raise ValueError(
            f"kv_role {transfer.kv_role} with a store: this engine reads from it and writes to it. "
            "Set kv_both; hand-offs work as before."
        )
    if any(getattr(spec, "bounded_replay", False) for spec in specs):
        raise ValueError(
            "a store: vLLM computes the windows of this model again behind a hit, which is not "
            "known with a store. Leave the store out."
        )
    if transfer.kv_load_failure_policy != "recompute":
        log.warning("kv_load_failure_policy is now recompute, which a store needs.")
        transfer.kv_load_failure_policy = "recompute"
    return StoredRequests(
        settings,
        kv_cache_config,
        recomputes=max(1, config.num_prefill_lookahead_tokens),
        unit=cached_unit(config, kv_cache_config.kv_cache_groups),
        stops=_stops(settings.chunk_tokens, specs),
        encoder=encoder(config),
    )


def cached_unit(config: Any, groups: Sequence[Any]) -> int:
    """Of how many tokens vLLM's own prefix cache gives requests a multiple: a block of each of the
    cache `groups`; 1 without it.
    """
    if not config.cache_config.enable_prefix_caching:
        return 1
    ranks = config.parallel_config.decode_context_parallel_size
    return lcm(*(group.kv_cache_spec.block_size * ranks for group in groups))


def _stops(chunk: int, specs: Sequence[Any]) -> bool:
    """Whether vLLM can end a step of each prompt where its last chunk ends, so that recurrent state
    is stored there.
    """
    states = [spec for spec in specs if hasattr(spec, "mamba_cache_mode")]
    if not states:
        return False
    if any(spec.mamba_cache_mode != "align" for spec in states):
        why = "without prefix caching vLLM ends no step there. Use --enable-prefix-caching"
    elif any(chunk % spec.block_size for spec in states):
        sizes = ", ".join(sorted({str(spec.block_size) for spec in states}))
        why = (
            f"blocks of {sizes} tokens do not divide it. Use --block-size {chunk}, or chunk_tokens"
        )
    else:
        return True
    log.warning("state is stored only where a step ends with a chunk of %s tokens: %s.", chunk, why)
    return False


def stored_blocks(
    settings: Settings, layout: PoolLayout, groups: Sequence[BlockGroup], rank: int
) -> StoreWorker | None:
    """A worker's half; None without a store."""
    if settings.store is None:
        return None
    from disagg.connectors.store.worker import StoreWorker

    return StoreWorker(settings, layout, groups, rank=rank, log=log)
