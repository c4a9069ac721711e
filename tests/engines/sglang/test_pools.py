"""A request moves between SGLang's real pools of differing geometry; every byte of memory is
compared with SGLang's own indexing of its tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from disagg import IncompatibleLayouts
from disagg.connectors.sglang.pools import Pools, Ranks, engine_layout
from disagg.connectors.tensors import UnknownFormat
from disagg.plan import plan
from kvpool import Allocator, DSv4Pool
from tests.engines.sglang import oracle, sides
from tests.engines.sglang.oracle import Side
from tests.engines.sglang.sides import described, hand_over, request, state_indices

TOKENS, WINDOW = 83, 20


@pytest.fixture(autouse=True)
def one_rank():
    with sides.alone():
        yield


def side(pool, seed: int, tokens: int = TOKENS, **more) -> Side:
    """One rank, with a request in pages at random."""
    place = {name: more.pop(name) for name in ("first", "row", "slot") if name in more}
    return Side(pool, request(pool.page_size, tokens, seed, sides.PAGES, **place), **more)


def ranks(make: Callable[..., object], count: int, seed: int, **more) -> list[Side]:
    """`count` ranks of tensor parallelism, each made for its number of ranks."""
    return [side(make(count), seed + n, rank=n, ranks=count, **more) for n in range(count)]


@pytest.mark.parametrize("engine", ["local", "nixl", "mooncake"])
def test_a_request_moves_over_every_engine(engine):
    assert hand_over(
        [side(sides.mha(16), 1)], [side(sides.mha(64), 2)], engine=engine
    ) == TOKENS * (2 * 4 * 4 * 8 * 4)


@pytest.mark.parametrize("here", [1, 16, 64])
@pytest.mark.parametrize("there", [1, 16, 64])
def test_pages_of_any_size_pair(there, here, monkeypatch):
    monkeypatch.setattr(sides, "PAGES", 100)
    pair = [side(sides.mha(page), page) for page in (there, here)]
    assert hand_over(pair[:1], pair[1:])


POOLS = {
    "mha, v of another size": lambda page: sides.mha(page, v_head_dim=16),
    "mha in fp8": lambda page: sides.mha(page, dtype=torch.float8_e4m3fn),
    "mxfp8": sides.mxfp8,
    "mla": sides.mla,
    "mla in fp8": lambda page: sides.mla(page, dtype=torch.float8_e4m3fn),
    "window": sides.swa,
    "window, mxfp8": lambda page: sides.swa(page, inner="MHATokenToKVPoolMXFP8"),
    "gated delta net": sides.hybrid,
    "kimi delta net": lambda page: sides.hybrid(page, kind="kda", full="mla"),
    "mamba-2": lambda page: sides.hybrid(page, kind="mamba2"),
    "mha, NPU": sides.npu_mha,
    "mla, NPU": sides.npu_mla,
}


@pytest.mark.parametrize("make", POOLS.values(), ids=POOLS)
def test_every_pool_moves_to_pages_of_another_size(make):
    pair = [side(make(page), page, window=WINDOW, slot=page % 5 + 1) for page in (16, 32)]
    assert hand_over(pair[:1], pair[1:], groups=2)


@pytest.mark.parametrize("fp8", [True, False])
def test_index_keys_move_with_their_scales(fp8):
    pair = [side(sides.dsa(fp8=fp8, skip=(1,)), n) for n in range(2)]
    assert hand_over(pair[:1], pair[1:])


@pytest.mark.parametrize("tokens", [64, 83, 128])
def test_scales_in_the_order_of_a_kernel_move_by_whole_pages(tokens):
    pair = [side(sides.mxfp8(128), n, tokens) for n in range(2)]
    assert hand_over(pair[:1], pair[1:])


def test_scales_in_the_order_of_a_kernel_pair_with_no_others():
    there, here = (described(side(sides.mxfp8(page), 0), 8).layout for page in (128, 16))
    with pytest.raises(IncompatibleLayouts, match="packing 'sglang mxfp8 scales, 32 x 4 x 2'"):
        plan([there], here)


SHARDED = {
    "mha": (lambda n: sides.mha(heads=4 // n), 4),
    "window": (lambda n: sides.swa(heads=4 // n), 4),
    "mxfp8": (lambda n: sides.mxfp8(heads=4 // n), 4),
    "mha, NPU": (lambda n: sides.npu_mha(heads=4 // n), 4),
    "gated delta net": (lambda n: sides.hybrid(heads=4 // n, ranks=n), 4),
    "kimi delta net": (lambda n: sides.hybrid(ranks=n, kind="kda", full="mla"), 1),
}


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize(("make", "heads"), SHARDED.values(), ids=SHARDED)
def test_ranks_share_heads(make, heads, shape):
    there, here = shape
    more = {"window": WINDOW, "slot": 3}
    assert hand_over(ranks(make, there, 10, **more), ranks(make, here, 20, **more), heads=heads)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (4, 2), (2, 4)], ids=str)
def test_ranks_with_the_same_head_are_replicas(shape):
    def make(count):
        pool = sides.mha(heads=max(1, 2 // count))
        pool.total_heads = 2  # of the oracle, which knows heads held otherwise
        return pool

    there, here = shape
    assert hand_over(ranks(make, there, 10), ranks(make, here, 20), heads=2)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=str)
def test_rows_of_latents_are_on_every_rank(shape):
    there, here = (ranks(lambda n: sides.mla(), count, 10 * count) for count in shape)
    assert hand_over(there, here)


STAGED = {
    "mha": sides.mha,
    "mla": sides.mla,
    "mla, NPU": sides.npu_mla,
}


@pytest.mark.parametrize("make", STAGED.values(), ids=STAGED)
@pytest.mark.parametrize("first", [1, 2])
def test_stages_of_a_pipeline_are_joined_and_parted(make, first):
    whole = [side(make(), 1)]
    stages = [
        side(make(layers=first), 2),
        side(make(layers=4 - first, start=first), 3),
    ]
    assert hand_over(stages, whole)
    assert hand_over(whole, stages)


def test_both_orders_of_heads_pair(monkeypatch):
    nhd = side(sides.mha(16), 1)
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    hnd = side(sides.mha(32), 2)
    assert (nhd.target.kv_cache_layout, hnd.target.kv_cache_layout) == ("nhd", "hnd")
    assert hand_over([nhd], [hnd])
    assert hand_over([hnd], [nhd])


def tiled(page):
    """The tensors that `_create_buffers_normal` makes on ROCm, and nowhere else."""
    pool = sides.mha(page, dim=16)
    pool.kv_cache_layout = "vectorized_5d"
    pool.k_buffer = [torch.zeros(sides.PAGES, 4, 4, page, 4) for _ in range(4)]
    pool.v_buffer = [torch.zeros(sides.PAGES, 4, page // 4, 16, 4) for _ in range(4)]
    return pool


def test_tiles_move_by_whole_pages_between_equals_and_shards():
    assert hand_over([side(tiled(16), 1)], [side(tiled(16), 2)])
    with pytest.raises(IncompatibleLayouts, match="vectorized_5d k, 16 x 16 by 4"):
        plan([described(side(tiled(16), 1), 8).layout], described(side(tiled(32), 2), 8).layout)


def dsv4_side(pool, seed, tokens, row):
    ask = request(pool.page_size, tokens, seed, 8, row=row)
    return Side(pool, ask, window=127)


RATIOS = [0, 4, 128, 4, 128, 0]


@pytest.mark.parametrize("tokens", [3, 128, 256, 257, 259, 700])
def test_deepseek_v4_moves_with_its_rings(tokens):
    pair = [dsv4_side(sides.dsv4(RATIOS), n, tokens, n + 1) for n in range(2)]
    assert hand_over(pair[:1], pair[1:])


def test_stages_of_deepseek_v4_are_joined():
    stages = [
        dsv4_side(sides.dsv4(RATIOS, start=first, end=stop), first, 300, 2)
        for first, stop in ((0, 2), (2, 6))
    ]
    assert hand_over(stages, [dsv4_side(sides.dsv4(RATIOS), 9, 300, 3)])


@pytest.mark.parametrize("tokens", [3, 128, 259])
@pytest.mark.parametrize("speculation", [False, True])
@pytest.mark.parametrize("page_rings", [False, True])
def test_rings_of_window_pages_pair_with_kvpools_rings(tokens, speculation, page_rings):
    """Through a pool of kvpool's, with rings of requests or of pages of another size, and back."""
    source, dest = (dsv4_side(sides.dsv4(RATIOS), n, tokens, n + 1) for n in range(2))
    for seed, side in enumerate((source, dest)):
        oracle.fill(side, seed)
    pool = DSv4Pool(
        layers=range(6), compress_ratios=RATIOS, num_pages=9, requests=2, chunk_tokens=tokens,
        page_size=256, window=127, window_page_size=64, speculation=speculation, dtype="bf16",
        packing="fp8", page_rings=page_rings,
    )  # fmt: skip
    allocator = Allocator(pool)
    allocator.extend(allocator.new_request(), 5)
    request = allocator.new_request()
    allocator.extend(request, tokens)
    made = [described(side, 6) for side in (source, dest)]
    tables = [
        each.address(tokens, side.request.pages, state_indices(each.state_types, side))
        for each, side in zip(made, (source, dest))
    ]
    before = [held.clone() for held in oracle.memory(dest)]
    hops = [(made[0].layout, tables[0]), (pool.layout, request.address())]
    for (there, had), (here, gets) in pairwise([*hops, (made[1].layout, tables[1])]):
        for runs in zip(*(column.tolist() for column in plan([there], here).bind(0, had, gets))):
            src, dst, nbytes = runs
            ctypes.memmove(dst, src, nbytes)
    assert oracle.assert_handed_over([source], dest, before)


def test_a_pool_that_is_not_known_is_refused_by_name():
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = sides.mha()
    pool.__class__ = type("MyPool", (MHATokenToKVPool,), {"_create_buffers": None})
    for unknown in (pool, SimpleNamespace(start_layer=0, layer_num=1, page_size=16)):
        said = f"target: {type(unknown).__name__}: not known"
        with pytest.raises(UnknownFormat, match=rf"{said} \(known: MHATokenToKVPool, "):
            engine_layout(Pools(unknown), [], Ranks(), 4)


def test_a_class_that_keeps_the_same_is_known_by_the_one_it_inherits_from():
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = sides.mha()
    pool.__class__ = type("WatchedPool", (MHATokenToKVPool,), {"watch": lambda self: None})
    assert engine_layout(Pools(pool), [], Ranks(total_kv_heads=4), 4).layout.regions


KNOWN = {
    "MHATokenToKVPool",
    "NPUMHATokenToKVPool",
    "MHATokenToKVPoolMXFP8",
    "MLATokenToKVPool",
    "DSATokenToKVPool",
    "NPUMLATokenToKVPool",
    "SWAKVPool",
    "HybridLinearKVPool",
    "MambaPool",
    "DeepSeekV4TokenToKVPool",
}


def test_of_sglangs_classes_those_that_are_known_and_no_others_are_taken():
    from sglang.srt.hardware_backend.npu import memory_pool_npu
    from sglang.srt.mem_cache import (
        deepseek_v4_memory_pool,
        dsa_cache_layer_split,
        hisparse_memory_pool,
        memory_pool,
        minimax_m3_nvfp4_pool,
        page_interleave_pool,
        qsa_kv_pool,
        swa_memory_pool,
        unified_draft_pool,
        unified_memory_pool,
    )

    from disagg.connectors.sglang.states import reader

    seen, taken = set(), set()
    for module in (
        deepseek_v4_memory_pool,
        dsa_cache_layer_split,
        hisparse_memory_pool,
        memory_pool,
        memory_pool_npu,
        minimax_m3_nvfp4_pool,
        page_interleave_pool,
        qsa_kv_pool,
        swa_memory_pool,
        unified_draft_pool,
        unified_memory_pool,
    ):
        for name, held in vars(module).items():
            if isinstance(held, type) and name.endswith(("Pool", "PoolMXFP8", "PoolFP4")):
                seen.add(name)
                try:
                    reader(held)
                except UnknownFormat:
                    continue
                taken.add(name)
    assert len(seen) > 30
    # the last is a pool of unified pools, each of which is refused
    assert taken == KNOWN | {"UnifiedHybridLinearKVPool"}
