"""A request moves between SGLang's real pools of differing geometry; every byte of memory is
compared with SGLang's own indexing of its tensors.
"""

from __future__ import annotations

import ctypes
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from disagg import IncompatibleLayouts
from disagg.connectors.sglang.pools import engine_layout
from disagg.connectors.sglang.states import POOLS as POOL_READERS, Ranks, reader
from disagg.connectors.tensors import UnknownFormat
from disagg.plan import plan
from kvpool import Allocator, DSv4Pool
from kvpool.layout import PoolLayout, Space
from tests.engines.sglang import oracle, sides
from tests.engines.sglang.pairings import MXFP8, PAIRS, RATIOS, WINDOW, heads_of, replicas, side, tp
from tests.engines.sglang.sides import described, hand_over, state_types
from tests.kvpool.layout.test_engine_tensors import CALLS, forms

TOKENS = 83


@pytest.fixture(autouse=True)
def one_rank():
    with sides.alone():
        yield


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.pool}, {pair.differs}")
def test_every_pair_of_the_page_moves(pair):
    """docs/sglang-pools.md"""
    more = {"layers": pair.layers, "heads": pair.heads, "allow_missing": pair.missing}
    assert hand_over(*pair.make(), **more)


@pytest.mark.parametrize("engine", ["local", "nixl", "mooncake"])
def test_a_request_moves_over_every_engine(engine):
    pair = [side(sides.mha(page), page, TOKENS) for page in (16, 64)]
    moved = hand_over(pair[:1], pair[1:], engine=engine)
    assert moved == TOKENS * (2 * 4 * 4 * 8 * 4)


@pytest.mark.parametrize(("there", "here"), [(1, 16), (64, 1), (16, 64)])
def test_pages_of_any_size_pair(there, here, monkeypatch):
    monkeypatch.setattr(sides, "PAGES", 100)
    pair = [side(sides.mha(page), page, TOKENS, 100) for page in (there, here)]
    assert hand_over(pair[:1], pair[1:])


POOLS = {
    "mha in fp8": lambda page: sides.mha(page, dtype=torch.float8_e4m3fn),
    "mxfp8": sides.mxfp8,
    "mla in fp8": lambda page: sides.mla(page, dtype=torch.float8_e4m3fn),
    "window": sides.swa,
    "window, mxfp8": lambda page: sides.swa(page, inner=MXFP8),
    "gated delta net": sides.hybrid,
    "kimi delta net": lambda page: sides.hybrid(page, kind="kda", full="mla"),
    "mamba-2": lambda page: sides.hybrid(page, kind="mamba2"),
    "mha, NPU": sides.npu_mha,
    "mla, NPU": sides.npu_mla,
}


@pytest.mark.parametrize("make", POOLS.values(), ids=POOLS)
def test_every_pool_moves_to_pages_of_another_size(make):
    pair = [side(make(page), page, window=WINDOW) for page in (16, 32)]
    assert hand_over(pair[:1], pair[1:], groups=2)


def test_index_keys_of_some_layers_move_with_their_scales():
    pair = [side(sides.dsa(fp8=False, skip=(1,)), n) for n in range(2)]
    assert hand_over(pair[:1], pair[1:])


@pytest.mark.parametrize("tokens", [64, 83, 128])
def test_scales_in_the_order_of_a_kernel_move_by_whole_pages(tokens):
    pair = [side(sides.mxfp8(128), n, tokens) for n in range(2)]
    assert hand_over(pair[:1], pair[1:])


def test_scales_in_the_order_of_a_kernel_pair_with_no_others():
    there, here = (described(side(sides.mxfp8(page), 0), 8).layout for page in (128, 16))
    with pytest.raises(IncompatibleLayouts, match="packing 'sglang mxfp8 scales, 32 x 4 x 2'"):
        plan([there], here)


@pytest.mark.parametrize("shape", [(4, 2), (2, 4)], ids=str)
def test_ranks_with_the_same_head_are_replicas(shape):
    assert hand_over(*replicas(*shape)(), heads=2)


def test_ranks_of_an_npu_share_heads():
    assert hand_over(*tp(heads_of(sides.npu_mha), 2, 1)())


def test_a_pipelines_draft_that_only_decode_has_is_refused_unless_it_may_be_missing():
    """Seed 4: latents, ropes and index keys in tensors of their own."""
    stages = [side(sides.npu_mla(layers=3), 1), side(sides.npu_mla(layers=1, start=3), 2)]
    whole = side(sides.npu_mla(32), 5, draft=sides.npu_mla(32, layers=1))
    assert hand_over(stages, [whole], layers=4, allow_missing={"draft"})
    with pytest.raises(IncompatibleLayouts, match="draft layer 0 latent"):
        hand_over(stages, [whole], layers=4)


@pytest.mark.parametrize("pages", [(16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize("longer", [0, 1])
def test_lists_of_a_windows_pages_that_differ_in_length(longer, pages):
    """Seed 5: one side lists a page more, before the window."""
    pair = []
    for seed, page in enumerate(pages):
        first = (150 - WINDOW) // page - (seed == longer)
        pair.append(side(sides.swa(page), seed, first=first, window=WINDOW))
    assert hand_over(pair[:1], pair[1:])


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


def v4(seed, tokens, drafts=0, **more):
    return side(sides.dsv4(RATIOS, drafts=drafts), seed, tokens, 8, row=seed + 1, **more)


@pytest.mark.parametrize("tokens", [3, 128, 257, 700])
@pytest.mark.parametrize("drafts", [0, 3])
def test_deepseek_v4_moves_with_its_rings(tokens, drafts):
    """Seed 2: only decode speculates, so that a token is elsewhere in its rings; its draft has a
    window that prefill does not.
    """
    pair = v4(1, tokens), v4(2, tokens, drafts)
    rings = [
        [space.steps for space in described(one, 6).layout.spaces if "ring" in space.name]
        for one in pair
    ]
    assert rings == [[8, 128], [16, 256] if drafts else [8, 128]]
    assert hand_over(pair[:1], pair[1:], layers=6)


def test_deepseek_v4_with_a_draft_on_both_sides():
    pair = [v4(n, 300, 3, draft=sides.dsv4([0])) for n in range(2)]
    assert state_types(pair[0]) == ["swa", "c128_state", "swa"]
    assert hand_over(pair[:1], pair[1:], layers=6)


@pytest.mark.parametrize("tokens", [3, 259])
@pytest.mark.parametrize(("speculation", "page_rings"), [(False, False), (True, True)])
def test_rings_of_window_pages_pair_with_kvpools_rings(tokens, speculation, page_rings):
    """Through a pool of kvpool's, with rings of requests or of pages of another size, and back."""
    pair = source, dest = [v4(n, tokens) for n in range(2)]
    for seed, one in enumerate(pair):
        oracle.fill(one, seed)
    pool = DSv4Pool(
        layers=range(6), compress_ratios=RATIOS, num_pages=9, requests=2, chunk_tokens=tokens,
        page_size=256, window=127, window_page_size=64, speculation=speculation, dtype="bf16",
        packing="fp8", page_rings=page_rings,
    )  # fmt: skip
    allocator = Allocator(pool)
    allocator.extend(allocator.new_request(), 5)
    request = allocator.new_request()
    allocator.extend(request, tokens)
    made = [described(one, 6) for one in pair]
    tables = [sides.address_of(*one) for one in zip(made, pair)]
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
            engine_layout(unknown, Ranks(), state_types=[], total_layers=4)


def test_a_class_that_keeps_the_same_is_known_by_the_one_it_inherits_from():
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = sides.mha()
    pool.__class__ = type("WatchedPool", (MHATokenToKVPool,), {"watch": lambda self: None})
    ranks = Ranks(total_kv_heads=4)
    assert engine_layout(pool, ranks, state_types=[], total_layers=4).layout.regions


def test_of_sglangs_classes_those_that_are_known_and_no_others_are_taken():
    modules = [import_module("sglang.srt.hardware_backend.npu.memory_pool_npu")]
    for name in ("deepseek_v4_", "hisparse_", "swa_", "unified_", ""):
        modules.append(import_module(f"sglang.srt.mem_cache.{name}memory_pool"))
    for name in ("dsa_cache_layer_split", "minimax_m3_nvfp4_pool", "page_interleave_pool",
                 "qsa_kv_pool", "unified_draft_pool"):  # fmt: skip
        modules.append(import_module(f"sglang.srt.mem_cache.{name}"))
    seen, taken = set(), set()
    for module in modules:
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
    assert taken == {*POOL_READERS} | {"UnifiedHybridLinearKVPool"}


# docs/tensors.md: its calls, on these pools' tensors, give the regions that the connector reads

ROWS = [  # state, pool, and its tensors in the order of the page's rows, by role where it says so
    ("K and V", lambda: sides.mha(16), lambda pool: [pool.k_buffer, pool.v_buffer]),
    ("K and V, hnd", lambda: sides.mha(16), lambda pool: [pool.k_buffer, pool.v_buffer]),
    ("K and V, NPU", lambda: sides.npu_mha(), lambda pool: [[pool.k_buffer], [pool.v_buffer]]),
    ("latent and rope", lambda: sides.dsa(fp8=False), lambda pool: [pool.kv_buffer]),
    ("latent and rope, fp8", lambda: sides.dsa(), lambda pool: [pool.kv_buffer]),
    ("index keys", lambda: sides.dsa(), lambda pool: [pool.index_k_with_scale_buffer]),
]


@pytest.mark.parametrize(("state", "make", "held"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_of_the_page_describes_sglangs_own_tensors(state, make, held, monkeypatch):
    if state.endswith("hnd"):
        monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    pool = make()
    known = described(side(pool, 1, 40), 8).layout
    ((shape, _, call),) = forms()["SGLang", state]
    pages = pool.size // pool.page_size + 1
    sizes = {"N": pool.page_size, "B": pages, "T": pages * pool.page_size, "L": 4}
    sizes |= {"H": getattr(pool, "head_num", 1), "D": getattr(pool, "head_dim", 1)}
    parts = []
    for role, buffers in zip("kv", held(pool)):
        for layer, tensor in enumerate(buffers):
            assert list(tensor.shape) == eval(shape, dict(sizes))
            parts.append(eval(call, CALLS | sizes | {"t": tensor, "l": layer, "role": role}))
    page = PoolLayout.of(*parts, spaces=[Space("kv", entries_per_item=pool.page_size)])
    assert page.regions
    for region in page.regions:
        same = known.region_by_key[region.key]
        ours, theirs = page.buffer_of(region), known.buffer_of(same)
        assert ours.base + region.offset == theirs.base + same.offset
        assert (ours.item_stride, ours.items) == (theirs.item_stride, theirs.items)
        assert (region.axes, region.width) == (same.axes, same.width)
