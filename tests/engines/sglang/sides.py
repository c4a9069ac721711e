"""Ranks of SGLang, made of its real pool classes on CPU tensors, and a hand-over between them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from sglang.srt.configs import mamba_utils as shapes
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.utils import setup_state_kv_args
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool, NPUMLATokenToKVPool
from sglang.srt.mem_cache import deepseek_v4_memory_pool as v4, memory_pool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from disagg.connectors.sglang.pools import ModelPools, SglangLayout, engine_layout
from disagg.connectors.sglang.states import Ranks
from kvpool.layout import RequestAddress
from tests.engines.sglang import oracle
from tests.engines.sglang.oracle import Request, Side

CPU = {"device": "cpu", "enable_memory_saver": False}
PATIENCE = 60.0


def request(side_page: int, tokens: int, seed: int, pool_pages: int, **more: Any) -> Request:
    """A request in pages at random; of its window, all pages are held, from number 0 on, unless
    `first` says otherwise.
    """
    random = np.random.default_rng(seed)
    count, first = -(-tokens // side_page), more.pop("first", 0)
    pages, windows = (random.permutation(np.arange(1, pool_pages))[:count] for _ in range(2))
    return Request(tokens, side_page, pages, windows[first:], first, **more)


def state_indices(kinds: Sequence[str], side: Side) -> list[Any]:
    """What SGLang's scheduler passes for each component (`send_kv_chunk`, `pop_preallocated`)."""
    ask = side.request
    made = {
        "swa": ask.window_pages.astype(np.int32),
        "block_scale_swa": ask.window_pages.astype(np.int32),
        "mamba": [np.array([ask.slot], dtype=np.int32)],
        "dsa": ask.pages.astype(np.int32),
        "block_scale": ask.pages.astype(np.int32),
    }
    if "c128_state" in kinds:
        pool = side.target
        made["c128_state"] = pool.request_state_transfer_indices(ask.row, ask.tokens)
    return [made[kind] for kind in kinds]


def state_types(side: Side) -> list[str]:
    """SGLang's own answer (`setup_state_kv_args`)."""
    args = KVArgs()
    setup_state_kv_args(args, side.target, side.draft, 8)
    return [kind.value for kind in args.state_types]


def described(side: Side, total_layers: int, heads: int = 4, groups: int = 0) -> SglangLayout:
    place = {"tp_rank": side.rank, "tp_size": side.ranks}
    ranks = Ranks(**place, total_kv_heads=heads, window=side.window, groups=groups)
    drafts = [ModelPools(tokens=pool, ranks=ranks) for pool in side.drafts]
    more = {"state_types": state_types(side), "total_layers": total_layers}
    return engine_layout(side.target, ranks, drafts=drafts, **more)


def address_of(made: SglangLayout, side: Side) -> RequestAddress:
    """The block table of a side's request."""
    ask = side.request
    return made.address(ask.tokens, ask.pages, state_indices(made.state_types, side))


def hand_over(
    sources: Sequence[Side],
    dests: Sequence[Side],
    *,
    layers: int = 8,
    heads: int = 4,
    groups: int = 0,
    engine: str = "local",
    **options: Any,
) -> int:
    """Moves a request with real endpoints, and compares every byte. Returns how many the request's
    rows have. `options`: of the decode endpoints.
    """
    total = 0
    for seed, side in enumerate([*sources, *dests]):
        oracle.fill(side, seed)
    oracle.agree(sources)
    with ExitStack() as stack:
        offers, addresses = [], []
        for side in sources:
            made = described(side, layers, heads, groups)
            prefill = stack.enter_context(PrefillEndpoint(made.layout, create_engine(engine)))
            offers.append((prefill, address_of(made, side)))
            addresses.append(prefill.address)
        rooms = []
        for side in dests:
            made = described(side, layers, heads, groups)
            before = [held.clone() for held in oracle.memory(side)]
            more = {"ranks": len(dests), "verify": "checksum", **options}
            decode = DecodeEndpoint(made.layout, create_engine(engine), **more)
            stack.enter_context(decode).connect(addresses, timeout=PATIENCE)
            decode.receive("room", address_of(made, side))
            rooms.append((decode, side, before))
        for prefill, address in offers:
            prefill.send("room", address)
        for decode, side, before in rooms:
            assert decode.wait("room", PATIENCE) is KVPoll.Success, decode.failure("room")
            total += oracle.assert_handed_over(
                sources, side, before, options.get("allow_missing", ())
            )
        for prefill, _ in offers:
            assert prefill.wait("room", PATIENCE) is KVPoll.Success, prefill.failure("room")
    return total


PAGES = 24


def size(page: int) -> int:
    return (PAGES - 1) * page


def shape(page: int, layers: int, start: int) -> dict[str, Any]:
    """What most of SGLang's pools take."""
    stop = start + layers
    layer = {"layer_num": layers, "start_layer": start, "end_layer": stop}
    return {"size": size(page), "page_size": page, **layer, **CPU}


def mha(page=16, heads=4, layers=4, start=0, dim=8, dtype=torch.float32, cls="", **more):
    kind = getattr(memory_pool, cls or "MHATokenToKVPool")
    return kind(dtype=dtype, head_num=heads, head_dim=dim, **shape(page, layers, start), **more)


def mxfp8(page=16, heads=4, layers=4, start=0):
    return mha(page, heads, layers, start, 64, torch.float8_e4m3fn, "MHATokenToKVPoolMXFP8")


def mla(page=16, layers=4, start=0, dtype=torch.bfloat16):
    sizes = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, **shape(page, layers, start)}
    return memory_pool.MLATokenToKVPool(dtype=dtype, **sizes)


def alone():
    """SGLang's parallel state, which a process without a server does not have: one rank."""
    return get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0)


def dsa(layers=4, start=0, fp8=True, skip=()):
    """DeepSeek-V3.2's: pages of 64."""
    return memory_pool.DSATokenToKVPool(
        kv_lora_rank=512,
        dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16,
        qk_rope_head_dim=64,
        index_head_dim=128,
        kv_cache_dim=656 if fp8 else 576,
        skip_topk_layers=[n in skip for n in range(layers)],
        **shape(64, layers, start),
    )


def swa(page=16, heads=4, layers=4, inner="", first=0, **more):
    """Every other layer sees a window."""
    return SWAKVPool(
        size=size(page),
        size_swa=size(page),
        page_size=page,
        dtype=torch.float8_e4m3fn if inner else torch.float16,
        head_num=heads,
        head_dim=64,
        swa_attention_layer_ids=[n for n in range(first, first + layers) if n % 2 == 0],
        full_attention_layer_ids=[n for n in range(first, first + layers) if n % 2],
        token_to_kv_pool_class=getattr(memory_pool, inner or "MHATokenToKVPool"),
        **CPU,
        **more,
    )


def linear_shape(kind="gdn", ranks=1):
    more = {"tp_world_size": ranks, "num_heads": 4, "head_dim": 16}
    if kind == "kda":
        shape = shapes.KimiLinearStateShape.create(conv_kernel_size=4, **more)
        return shapes.KimiLinearCacheParams(shape=shape, layers=[0])
    more |= {"n_groups": 2, "state_size": 16, "intermediate_size": 64, "conv_kernel": 4}
    if kind == "gdn":
        more["conv_shard_groups"] = [32, 32, 64]
    shape = shapes.Mamba2StateShape.create(**more)
    return shapes.Mamba2CacheParams(shape=shape, layers=[0])


def mamba(layers, kind="gdn", ranks=1, slots=6):
    return memory_pool.MambaPool(
        size=slots,
        spec_state_size=slots,
        cache_params=linear_shape(kind, ranks),
        mamba_layer_ids=[*layers],
        **CPU,
    )


def hybrid(page=16, heads=4, first=0, layers=8, kind="gdn", ranks=1, full="mha", skip=()):
    """Every fourth layer is attention: of K and V, latents, or latents and index keys, but for
    layers `skip`.
    """
    held = range(first, first + layers)
    keys = {"use_dsa": True, "index_head_dim": 128, "kv_cache_dim": 576}
    keys["skip_topk_layers"] = [layer in skip for layer in held if layer % 4 == 3]
    more = {
        "mha": {},
        "mla": {"use_mla": True, "kv_lora_rank": 32, "qk_rope_head_dim": 8},
        "dsa": {"use_mla": True, "kv_lora_rank": 512, "qk_rope_head_dim": 64, **keys},
    }[full]
    return memory_pool.HybridLinearKVPool(
        size=size(page),
        dtype=torch.bfloat16,
        page_size=page,
        head_num=heads,
        head_dim=8,
        full_attention_layer_ids=[layer for layer in held if layer % 4 == 3],
        mamba_pool=mamba([layer for layer in held if layer % 4 != 3], kind, ranks),
        start_layer=first,
        device="cpu",
        **more,
    )


def npu_mla(page=16, layers=4, start=0, index=True):
    sizes = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, **shape(page, layers, start)}
    keys = 128 if index else None
    return NPUMLATokenToKVPool(dtype=torch.bfloat16, index_head_dim=keys, **sizes)


def npu_mha(page=16, heads=4, layers=4, start=0):
    sizes = {"head_num": heads, "head_dim": 8, **shape(page, layers, start)}
    return NPUMHATokenToKVPool(dtype=torch.bfloat16, **sizes)


def dsv4(ratios, page=256, drafts=0, start=None, end=None, pages=8):
    """`drafts`: tokens that speculation drafts, which make the rings longer."""
    rings = partial(v4.get_compress_state_ring_size, num_draft_tokens=drafts)
    tokens = (pages - 1) * page
    said = SimpleNamespace(
        kernel=SimpleNamespace(dsv4_attn_backend="auto", enable_deepseek_v4_fp4_indexer=False),
        features=SimpleNamespace(enable_encoder_swa_bounded_replay=False),
        speculative_algorithm="EAGLE" if drafts else None,
        speculative_num_draft_tokens=drafts,
    )
    with mock.patch.multiple(v4, get_exec=lambda: said, get_spec=lambda: said):
        return v4.DeepSeekV4TokenToKVPool(
            max_num_reqs=4,
            swa_size=tokens,
            c4_size=tokens // 4,
            c128_size=tokens // 128,
            c4_state_pool_size=pages * rings(4),
            c128_state_pool_size=5 * rings(128),
            page_size=page,
            swa_page_size=page,
            dtype=torch.float8_e4m3fn,
            c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32,
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            indexer_head_dim=128,
            layer_num=len(ratios[start:end]),
            compression_ratios=[*ratios],
            start_layer=start,
            end_layer=end,
            num_req_slots=5,
            **CPU,
        )
