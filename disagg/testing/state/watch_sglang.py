"""Saves what SGLang's own tensors hold of a request: prefill's when it is computed, decode's when
it has arrived.

SGLang loads this file by itself, as a plugin (`sglang.srt.plugins`), so it imports nothing of the
packages under test. Positions are looked up in `req_to_token`, and state in the pools' tensors by
plain indexing, as SGLang's kernels do.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER, SIDE = os.environ.get("KVPOOL_CONFORM", ""), os.environ.get("KVPOOL_CONFORM_SIDE", "")
REQUEST = re.compile(r"conform-\d+")
POOLS = {"MHATokenToKVPool", "MLATokenToKVPool"}
"""Classes whose rows are positions of a request, by `req_to_token`."""


def register() -> None:
    """Called by SGLang in each of its processes."""
    if backend := os.environ.get("KVPOOL_CONFORM_CPU"):
        ON_CPU[backend]()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not FOLDER or SIDE not in ("prefill", "decode"):
        return
    module = "sglang.srt.disaggregation"
    HookRegistry.register(
        f"{module}.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk",
        saw_send,
        HookType.AROUND,
    )
    HookRegistry.register(
        f"{module}.decode.DecodeTransferQueue._commit_transfer_to_req", saw_commit, HookType.AROUND
    )
    Path(FOLDER, f"{SIDE}.watched").touch()


def _nixl_on_cpu() -> None:
    """SGLang's NIXL backend takes pools for a GPU's memory; NIXL is told that they are a host's."""
    from nixl._api import nixl_agent

    for name in ("register_memory", "get_xfer_descs", "prep_xfer_dlist"):
        setattr(nixl_agent, name, _of_host(getattr(nixl_agent, name)))


def _of_host(method: Any) -> Any:
    def called(agent: Any, *args: Any, **more: Any) -> Any:
        told = ["DRAM" if isinstance(arg, str) and arg == "VRAM" else arg for arg in args]
        return method(agent, *told, **more)

    return called


def _mooncake_on_cpu() -> None:
    """SGLang pins the indices of its Mooncake backend, which needs a GPU, unless the sender does
    not take indices in a host's memory.
    """
    from sglang.srt.disaggregation.mooncake import conn

    conn.MooncakeKVSender.supports_host_tensor_indices = False


ON_CPU = {"nixl": _nixl_on_cpu, "mooncake": _mooncake_on_cpu}
"""What a backend needs where there is no GPU, by its name."""


def saw_send(original: Any, scheduler: Any, req: Any, last_chunk: bool = False, *more: Any) -> Any:
    """Prefill has computed a request."""
    if last_chunk:
        save(scheduler, req, scheduler.disagg_prefill_bootstrap_queue)
    return original(scheduler, req, last_chunk, *more)


def saw_commit(original: Any, queue: Any, decode_req: Any) -> Any:
    """Decode has received a request."""
    scheduler = queue.scheduler
    save(scheduler, decode_req.req, scheduler.disagg_decode_prealloc_queue)
    return original(queue, decode_req)


def save(scheduler: Any, req: Any, queue: Any) -> None:
    """Writes `{side}.{request}.{stage}.{rank}.{tokens}.rows.npz`. `queue` knows the draft's pool,
    whose rows are the target's.
    """
    from sglang.srt.runtime_context import get_parallel

    match = REQUEST.search(str(req.rid))
    if not match:
        return
    tokens = len(req.origin_input_ids)
    slots = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :tokens].long()
    arrays: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    unread: list[str] = []
    pools = {"target": scheduler.token_to_kv_pool_allocator.get_kvcache()}
    if queue.draft_token_to_kv_pool is not None:
        pools["draft"] = queue.draft_token_to_kv_pool
    for owner, pool in pools.items():
        if type(pool).__name__ not in POOLS:
            unread.append(f"a pool {type(pool).__name__}")
            continue
        for layer, part, join, tensor in parts(pool):
            key = f"{owner} {layer} {part}"
            rows = tensor[slots].contiguous()
            facts[key] = {"owner": owner, "layer": layer, "part": part, "join": join, "start": 0}
            facts[key]["dtype"] = str(rows.dtype)[6:]
            arrays[key] = rows.reshape(*rows.shape[:2], -1).view(torch.uint8).cpu().numpy()
    told = {"tokens": tokens, "parts": facts, "unread": unread}
    parallel = get_parallel()
    ranks = f"{parallel.pp_rank}.{parallel.attn_tp_rank}"
    place = Path(FOLDER) / f"{SIDE}.{match[0]}.{ranks}.{tokens}.rows.npz"
    with place.with_suffix(".new").open("wb") as file:
        np.savez(file, told=np.frombuffer(json.dumps(told).encode(), np.uint8), **arrays)
    place.with_suffix(".new").rename(place)


def parts(pool: Any) -> Iterator[tuple[int, str, str, torch.Tensor]]:
    """Layer, part, how ranks share it, and rows `[token, head, dim]` of a pool."""
    for number in range(pool.layer_num):
        layer = number + (pool.start_layer or 0)
        if hasattr(pool, "kv_buffer"):
            yield layer, "row", "same", pool.kv_buffer[number]
        else:
            yield layer, "k", "heads", pool.k_buffer[number]
            yield layer, "v", "heads", pool.v_buffer[number]
