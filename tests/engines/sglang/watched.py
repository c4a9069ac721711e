"""An oracle in SGLang's scheduler, loaded as a plugin of SGLang's: it saves what SGLang's own
tensors hold of each room, and counts what is not free.

Tests only. It does not use layouts: positions are looked up in `req_to_token`, and state in the
pools' tensors by plain indexing, as SGLang's kernels do.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch




def register() -> None:
    """Called by SGLang's plugin group."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    Scheduler.kvpool_counts = counts
    if not os.environ.get("KVPOOL_WATCH"):
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


def save(side: str, scheduler: Any, req: Any) -> None:
    """Saves `{side}.{room}.{rank}.pt`: state by layer and part, positions first."""
    tokens = len(req.origin_input_ids)
    at = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :tokens].long()
    found = {name: tensor[at].clone() for name, tensor in tensors(scheduler)}
    torch.save(found, Path(os.environ["KVPOOL_WATCH"]) / f"{side}.{req.bootstrap_room}.{_rank()}.pt")


def tensors(scheduler: Any) -> Any:
    """Names and tensors `[token, ...]` of a scheduler's pool."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    for number in range(pool.layer_num):
        if hasattr(pool, "kv_buffer"):
            yield f"{number}/row", pool.kv_buffer[number]
        else:
            yield f"{number}/k", pool.k_buffer[number]
            yield f"{number}/v", pool.v_buffer[number]


def counts(scheduler: Any, folder: str) -> None:
    """Writes what a rank holds: tokens and requests that are not free, by SGLang's allocators; and
    the bytes that were read since the last time.
    """
    allocator, requests = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    queue = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    numbers = queue.kv_manager.rank.stats.take() if queue else None
    rows = scheduler.req_to_metadata_buffer_idx_allocator
    held = {
        "tokens": allocator.size - allocator.available_size(),
        "cached": scheduler.tree_cache.evictable_size() if scheduler.tree_cache else 0,
        "requests": requests.size - requests.available_size(),
        "read": numbers["bytes"] if numbers else 0,
        "metadata": rows.size - rows.available_size() if rows is not None else 0,
    }
    Path(folder, str(_rank())).write_text(json.dumps(held))


def _rank() -> int:
    """This process's of attention's tensor parallelism."""
    from sglang.srt.runtime_context import get_parallel

    rank: int = get_parallel().attn_tp_rank
    return rank


def compare(folder: Path) -> tuple[int, int, list[str]]:
    """Tensors compared, bytes, and what differs, between the two sides of every room."""
    count, nbytes, wrong = 0, 0, []
    for first in sorted(folder.glob("decode.*.0.pt")):
        room = first.name.split(".")[1]
        ours, theirs = (_ranks(folder, side, room) for side in ("decode", "prefill"))
        if ours.keys() != theirs.keys():
            wrong.append(f"{room}: {sorted(ours.keys() ^ theirs.keys())}")
        for key in ours.keys() & theirs.keys():
            one, other = (found[key].contiguous().view(torch.uint8) for found in (ours, theirs))
            count += 1
            nbytes += one.numel()
            if one.shape != other.shape or not torch.equal(one, other) or not one.any():
                wrong.append(f"{room} {key} {tuple(one.shape)} {tuple(other.shape)}")
    return count, nbytes, wrong


def _ranks(folder: Path, side: str, room: str) -> dict[str, torch.Tensor]:
    """Both ranks' heads side by side."""
    parts = [torch.load(path) for path in sorted(folder.glob(f"{side}.{room}.?.pt"))]
    return {
        key: torch.cat([part[key] for part in parts], 1) if key.endswith(("/k", "/v")) else value
        for key, value in parts[0].items()
    }
