"""An oracle in SGLang's scheduler, loaded as a plugin of SGLang's: it saves what SGLang's own
tensors hold of each room, and counts what is not free.

Tests only. It does not use layouts: positions are looked up in `req_to_token`, and state in the
pools' tensors by plain indexing, as SGLang's kernels do.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from disagg.connectors.rank.stats import Stats
from kvpool.prefix.chain import Chain, token_ids
from tests.engines.pair import saved

read: list[int] = []
"""Bytes of the requests that this rank has read."""


def register() -> None:
    """Called by SGLang's plugin group."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    Scheduler.kvpool_counts = counts
    internal_state = Scheduler.get_internal_state

    def with_held(scheduler: Any, asked: Any) -> Any:
        """What an API server's `/server_info` has of each scheduler."""
        answer = internal_state(scheduler, asked)
        answer.internal_state["kvpool"] = held(scheduler)
        return answer

    Scheduler.get_internal_state = with_held
    received = Stats.received

    def saw_received(stats: Stats, metrics: Any, failure: Any) -> None:
        read.append(metrics.bytes_moved)
        received(stats, metrics, failure)

    Stats.received = saw_received
    if path := os.environ.get("KVPOOL_HANG"):
        hang(Path(path))
    if not os.environ.get("KVPOOL_WATCH"):
        return
    if os.environ.get("KVPOOL_WATCH_STORE"):
        target = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint"
        HookRegistry.register(target, saw_checkpoint, HookType.AROUND)
        return
    where = "sglang.srt.disaggregation"
    HookRegistry.register(
        f"{where}.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk",
        saw_send,
        HookType.AROUND,
    )
    HookRegistry.register(
        f"{where}.decode.DecodeTransferQueue._commit_transfer_to_req", saw_commit, HookType.AROUND
    )


def saw_send(original: Any, scheduler: Any, req: Any, last_chunk: bool = False, *more: Any) -> Any:
    """Prefill has computed a request."""
    if last_chunk:
        save("prefill", scheduler, req)
    return original(scheduler, req, last_chunk, *more)


def saw_commit(original: Any, queue: Any, decode_req: Any) -> Any:
    """Decode has received a request."""
    if os.environ.get("KVPOOL_NOISE"):
        for _, tensor in tensors(queue.scheduler):
            tensor.copy_(tensor.roll(1, -1))
    save("decode", queue.scheduler, decode_req.req)
    return original(queue, decode_req)


def hang(path: Path) -> None:
    """A folder as a floor does not answer while a file is there."""
    from disagg.store.floors.folder import FolderFloor

    def waiting(call: Any) -> Any:
        def wait(*given: Any) -> Any:
            while path.exists():
                time.sleep(0.01)
            return call(*given)

        return wait

    for name in ("create", "read", "exists", "list"):
        setattr(FolderFloor, name, waiting(getattr(FolderFloor, name)))


def saw_checkpoint(original: Any, cache: Any, req: Any, **more: Any) -> Any:
    """A request's state goes to the tree: that of whole chunks of its prompt, by their key. It was
    read if SGLang counts tokens as cached.
    """
    chunk = json.loads(os.environ["KVPOOL_SGLANG"]).get("chunk_tokens", 256)
    tokens = (len(req.origin_input_ids) - 1) // chunk * chunk
    if tokens and more["up_to"] >= tokens:
        chain = Chain(chunk, req.cache_salt or "")
        chain.append(token_ids(req.origin_input_ids[:tokens]))
        side = "decode" if req.cached_tokens else "prefill"
        save(side, cache, req, chain.keys[-1].hex(), tokens)
    return original(cache, req, **more)


def save(side: str, scheduler: Any, req: Any, room: str = "", tokens: int = 0) -> None:
    """Saves `{side}.{room}.{rank}.pt`: state by layer and part, positions first."""
    tokens = tokens or len(req.origin_input_ids)
    at = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :tokens].long()
    found = {name: tensor[at].clone() for name, tensor in tensors(scheduler)}
    name = f"{side}.{room or req.bootstrap_room}.{_rank()}"
    saved(found, Path(os.environ["KVPOOL_WATCH"]), name)


def tensors(scheduler: Any) -> Any:
    """Names and tensors `[token, ...]` of a scheduler's pool."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    for index in range(pool.layer_num):
        number = pool.start_layer + index
        if hasattr(pool, "kv_buffer"):
            yield f"{number}/row", pool.kv_buffer[index]
        else:
            yield f"{number}/k", pool.k_buffer[index]
            yield f"{number}/v", pool.v_buffer[index]


def counts(scheduler: Any, folder: str) -> None:
    """Writes what a rank holds, and the bytes that were read since the last time."""
    Path(folder, str(_rank())).write_text(json.dumps(held(scheduler) | {"read": sum(read)}))
    read.clear()


def held(scheduler: Any) -> dict[str, int]:
    """Tokens and requests of a rank that are not free, by SGLang's allocators; and requests that
    wait for the other side.
    """
    allocator, requests = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    rows = getattr(scheduler, "req_to_metadata_buffer_idx_allocator", None)
    names = "prefill_bootstrap_queue", "decode_prealloc_queue", "decode_transfer_queue"
    queues = [getattr(scheduler, f"disagg_{name}", None) for name in names]
    return {
        "tokens": allocator.size - allocator.available_size(),
        "cached": scheduler.tree_cache.evictable_size() if scheduler.tree_cache else 0,
        "requests": requests.size - requests.available_size(),
        "metadata": rows.size - rows.available_size() if rows is not None else 0,
        "queued": sum(len(queue.queue) for queue in queues if queue is not None),
    }


def _rank() -> int:
    """This process's: of each pipeline stage, its ranks of attention's tensor parallelism."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    rank: int = parallel.pp_rank * parallel.attn_tp_size + parallel.attn_tp_rank
    return rank
