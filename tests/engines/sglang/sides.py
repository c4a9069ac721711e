"""Ranks of SGLang, made of its real pool classes on CPU tensors, and a hand-over between them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from disagg.connectors.sglang.pools import EngineLayout, Pools, Ranks, engine_layout
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
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.utils import setup_state_kv_args

    args = KVArgs()
    setup_state_kv_args(args, side.target, side.draft, 8, req_to_token_pool=side.requests)
    return [kind.value for kind in args.state_types]


def described(side: Side, total_layers: int, heads: int = 4, groups: int = 0) -> EngineLayout:
    ranks = Ranks(side.rank, side.ranks, heads, side.window, groups)
    pools = Pools(side.target, side.draft, side.requests)
    return engine_layout(pools, state_types(side), ranks, total_layers)


def hand_over(
    sources: Sequence[Side],
    dests: Sequence[Side],
    *,
    layers: int = 8,
    heads: int = 4,
    groups: int = 0,
    engine: str = "local",
) -> int:
    """Moves a request with real endpoints, compares every byte; returns how many were moved."""
    total = 0
    for seed, side in enumerate([*sources, *dests]):
        oracle.fill(side, seed)
    with ExitStack() as stack:
        offers, addresses = [], []
        for side in sources:
            made = described(side, layers, heads, groups)
            prefill = stack.enter_context(PrefillEndpoint(made.layout, create_engine(engine)))
            ask = side.request
            indices = state_indices(made.state_types, side)
            offers.append((prefill, made.address(ask.tokens, ask.pages, indices)))
            addresses.append(prefill.address)
        rooms = []
        for side in dests:
            made = described(side, layers, heads, groups)
            before = [held.clone() for held in oracle.memory(side)]
            decode = DecodeEndpoint(
                made.layout, create_engine(engine), ranks=len(dests), verify="checksum"
            )
            stack.enter_context(decode).connect(addresses, timeout=PATIENCE)
            ask = side.request
            indices = state_indices(made.state_types, side)
            decode.receive("room", made.address(ask.tokens, ask.pages, indices))
            rooms.append((decode, side, before))
        for prefill, address in offers:
            prefill.send("room", address)
        for decode, side, before in rooms:
            assert decode.wait("room", PATIENCE) is KVPoll.Success, decode.failure("room")
            total += oracle.assert_handed_over(sources, side, before)
        for prefill, _ in offers:
            assert prefill.wait("room", PATIENCE) is KVPoll.Success, prefill.failure("room")
    return total


PAGES = 24


def size(page: int) -> int:
    return (PAGES - 1) * page


def mha(page=16, heads=4, layers=4, start=0, dim=8, dtype=torch.float32, cls="", **more):
    from sglang.srt.mem_cache import memory_pool

    return getattr(memory_pool, cls or "MHATokenToKVPool")(
        size=size(page),
        page_size=page,
        dtype=dtype,
        head_num=heads,
        head_dim=dim,
        layer_num=layers,
        start_layer=start,
        end_layer=start + layers,
        **CPU,
        **more,
    )
