"""NVFP4 pages of vLLM's FlashInfer backend: its own spec, views and split of a page, on a CPU.
Where V's scales are in tiles, they are written by the formula of its kernel
(csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu), here in numpy.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import vllm._custom_ops  # noqa: F401  (asks whether FlashInfer is installed)
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from disagg import IncompatibleLayouts
from disagg.connectors.blocks import block_table
from disagg.connectors.tensors import UnknownFormat
from disagg.connectors.vllm.layout import engine_layout
from disagg.connectors.vllm.registered import Platform
from disagg.plan import plan
from tests import oracle
from tests.disagg.connectors.vllm import engines


def flashinfer():
    """vLLM's module, which needs the package only where it runs kernels."""
    names = "", ".decode", ".prefill", ".utils", ".comm", ".autotuner"
    stubs = {f"flashinfer{name}": mock.MagicMock() for name in names}
    for name, stub in stubs.items():
        stub.__spec__ = ModuleSpec(name, None)
    with mock.patch.dict(sys.modules, stubs):
        from vllm.v1.attention.backends import flashinfer
    return flashinfer


FLASHINFER = flashinfer()
HEADS, DIM, LAYERS, BLOCKS, U8 = 4, 64, 2, 24, torch.uint8
NVFP4 = {"dtype": U8, "kv_quant_mode": KVQuantMode.NVFP4}


class Rank:
    """Layers of vLLM's in one allocation, and a request's blocks. `device`: what decides where V's
    scales are.
    """

    def __init__(
        self, block=16, order="LBHNC", tiles=True, rank=0, ranks=1, seed=0, window=0, share=None,
        total=HEADS,
    ):  # fmt: skip
        heads = total // ranks
        sizes = {"block_size": block, "num_kv_heads": heads, "head_size": DIM, **NVFP4}
        spec = SlidingWindowSpec(**sizes, sliding_window=window) if window else None
        backend = FLASHINFER.FlashInferBackend
        spec = backend.customize_spec(spec or FullAttentionSpec(**sizes))
        names, layout = [engines.name(n) for n in range(LAYERS)], KVCacheLayout[order]
        layer, page, *_ = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
        tensor = KVCacheTensor(0, names, layer, page)
        self.raw = torch.zeros(spec.page_size_bytes * BLOCKS * LAYERS, dtype=torch.int8)
        views = create_kv_cache_views(self.raw, spec, BLOCKS, layout, tensor, None)
        self.views = dict(zip(names, views))
        modules = dict.fromkeys(names, engines.Module(backend=backend, kv_cache_dtype="nvfp4"))
        self.size, self.part, self.parts = share or (1, 0, 1)  # decode context parallelism
        place = {"tp": ranks, "rank": rank}
        if share:
            shared = {"decode_context_parallel_size": self.parts}
            place = {"tp": self.parts, "rank": self.part, **shared}
            place["cp_kv_cache_interleave_size"] = self.size
        config = engines.config(modules, layers=LAYERS, kv_heads=total, **place)
        caches = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(names, spec)])
        self.seen = engine_layout(config, caches, self.views, Platform(scale_tiles=tiles))
        self.layout, self.block, self.tiles, self.heads = self.seen.layout, block, tiles, heads
        self.first, self.window = rank * heads, window
        self.ids = np.random.default_rng(seed).permutation(np.arange(1, BLOCKS)).tolist()

    def table(self, tokens):
        ids = self.ids[: -(-tokens // (self.block * self.parts))]
        first = self.live(tokens).start // self.block
        return block_table(self.seen.groups, ([0] * first + ids[first:],), tokens)

    def live(self, tokens):
        first = max(0, tokens - self.window + 1) if self.window else 0
        return range(first, tokens)

    def held(self, tokens):
        """Of positions those that this rank has."""
        return [t for t in tokens if t // self.size % self.parts == self.part]

    def cells(self, tokens):
        """By layer, what a cell is of and head: bytes `[token, content]` as indices of `raw`."""
        at = np.array(self.held(tokens), dtype=np.int64)
        block, entry = np.divmod(at, self.block * self.parts)
        block = np.array(self.ids)[block]
        entry = entry // (self.size * self.parts) * self.size + entry % self.size
        for layer, view in enumerate(self.views.values()):
            parts = FLASHINFER._nvfp4_kv_views(view, self.heads)
            for what, tensors in zip(("", " scale"), parts[:2]):
                for side, tensor in zip("kv", tensors):
                    base = tensor.data_ptr() - self.raw.data_ptr()
                    rows = tensor if parts[2] == "HND" else tensor.transpose(1, 2)
                    byte = np.arange(rows.shape[3])
                    t, s = np.broadcast_arrays(entry[:, None], byte)
                    if self.tiles and (side, what) == ("v", " scale"):
                        group = rows.shape[3] // 4
                        t, s = t // 4 * 4 + s // group, s % group * 4 + t % 4
                    for head in range(self.heads):
                        b, h, n, c = rows.stride()
                        index = base + block[:, None] * b + head * h + t * n + s * c
                        yield (layer, side + what, self.first + head), index

    def write(self, tokens):
        """A value that says layer, role, head, token and byte."""
        memory = self.raw.view(U8).numpy()
        for (layer, what, head), index in self.cells(tokens):
            memory[index] = value(layer, what, head, self.held(tokens), index.shape[1])


def value(layer, what, head, tokens, size):
    token, byte = np.ix_(np.array(tokens, dtype=np.int64), np.arange(size))
    mixed = token * 7919 + byte * 104729 + head * 31 + layer * 1009 + len(what) * 17 + ord(what[0])
    return (mixed * 2654435761 >> 11 & 0xFF).astype(np.uint8)


def assert_holds(rank, tokens, before):
    """All live bytes are the source's, and no byte of another request's has changed."""
    expected, found = before.copy(), rank.raw.view(U8).numpy()
    live = rank.live(tokens)
    for key, index in rank.cells(live):
        assert np.array_equal(found[index], value(*key, rank.held(live), index.shape[1])), key
        expected[index] = found[index]
    # dead tokens of the first tile and of the last block: a transfer may copy or leave them
    span = rank.block * rank.parts
    last = range(tokens, -(-tokens // span) * span)
    for dead in range(live.start // 4 * 4, live.start), last:
        for _, index in rank.cells(dead) if rank.held(dead) else ():
            expected[index] = found[index]
    assert np.array_equal(found, expected)


def hand_over(sources, dest, tokens, chunks=None):
    for source in sources:
        source.write(source.live(tokens))
    memory = dest.raw.view(U8).numpy()
    memory[:] = np.random.default_rng(5).integers(0, 256, memory.size, dtype=np.uint8)
    before = memory.copy()
    made = plan([source.layout for source in sources], dest.layout)
    edges = chunks or [tokens]
    for start, stop in zip([0, *edges], edges):
        for number, source in enumerate(sources):
            batch = made.bind(
                number, source.table(tokens), dest.table(tokens), tokens=range(start, stop)
            )
            oracle.copy(batch)
    assert_holds(dest, tokens, before)


@pytest.mark.parametrize("tokens", [1, 4, 43, 64, 97])
@pytest.mark.parametrize("blocks", [(16, 32), (32, 16), (16, 16)], ids=str)
@pytest.mark.parametrize("tiles", [False, True])
def test_codes_and_scales_move_to_blocks_of_another_size(tiles, blocks, tokens):
    there, here = blocks
    hand_over([Rank(there, tiles=tiles)], Rank(here, tiles=tiles, seed=1), tokens)


@pytest.mark.parametrize("orders", [("LBHNC", "BLHNC"), ("LBNHC", "LBHNC"), ("BLHNC", "BLNHC")])
@pytest.mark.parametrize("tiles", [False, True])
def test_heads_and_tokens_may_be_in_either_order(tiles, orders):
    there, here = orders
    source = Rank(16, there, tiles)
    hand_over([source], Rank(32, here, tiles, seed=1), 43)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("tiles", [False, True])
def test_heads_move_to_other_ranks(tiles, ranks):
    there, here = ranks
    sources = [Rank(16, tiles=tiles, rank=n, ranks=there, seed=n) for n in range(there)]
    for n in range(here):
        hand_over(sources, Rank(32, tiles=tiles, rank=n, ranks=here, seed=9), 43)


@pytest.mark.parametrize("chunks", [[16, 43], [18, 31, 43], [3, 5, 6, 43]], ids=str)
@pytest.mark.parametrize("tiles", [False, True])
def test_a_prompt_in_chunks_that_cut_tiles_moves_whole(tiles, chunks):
    hand_over([Rank(16, tiles=tiles)], Rank(32, tiles=tiles, seed=1), 43, chunks)


@pytest.mark.parametrize("tokens", [7, 40, 43, 97])
@pytest.mark.parametrize("tiles", [False, True])
def test_of_a_window_no_freed_block_is_needed(tiles, tokens):
    pair = [Rank(block, tiles=tiles, seed=block, window=21) for block in (16, 32)]
    hand_over(pair[:1], pair[1], tokens)


@pytest.mark.parametrize("tokens", [3, 43, 70])
@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("tiles", [False, True])
def test_ranks_that_share_positions_hand_over_to_one_and_back(tiles, size, tokens):
    shares = [Rank(16, tiles=tiles, seed=n, share=(size, n, 2), total=1) for n in range(2)]
    whole = Rank(32, tiles=tiles, seed=9, total=1)
    hand_over(shares, whole, tokens)
    for share in shares:
        hand_over([whole], share, tokens)


def test_stretches_that_cut_tiles_are_refused():
    with pytest.raises(UnknownFormat, match="stretches of 2 positions would cut entries of 4"):
        Rank(16, share=(2, 0, 2), total=1)


def test_tiles_and_linear_scales_are_refused_by_name():
    for one, other, role in ((False, True, r"v\.scale\.tiles"), (True, False, r"v\.scale")):
        with pytest.raises(IncompatibleLayouts, match=f"{role}: prefill offers no such region"):
            plan([Rank(tiles=one).layout], Rank(tiles=other).layout)


def test_blocks_that_are_no_multiple_of_a_tile_are_refused():
    with pytest.raises(UnknownFormat, match="pages of 6 tokens: not known, only multiples of 4"):
        Rank(6)


def test_rows_of_352_bytes_have_codes_rope_and_transposed_scales():
    """Byte for byte of the module's own words: 256 of codes, 64 of the rope key, 32 scales."""
    sizes = {"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": U8}
    # as MLAAttention.get_kv_cache_spec makes it
    sizes |= {"cache_dtype_str": "nvfp4_ds_mla", "state_content_bytes": 352}
    spec = MLAAttentionSpec(**sizes, kv_quant_mode=KVQuantMode.NVFP4_DS_MLA)
    spec = FlashMLASparseBackend.customize_spec(spec)
    name = engines.name(0)
    backend = SimpleNamespace(get_name=lambda: "FLASHMLA_SPARSE")
    module = engines.Module(backend=backend, kv_cache_dtype="nvfp4_ds_mla")
    config = engines.config({name: module}, latent=512, rope=64)
    views = {name: torch.zeros(BLOCKS, 1, 64, 352, dtype=U8)}
    caches = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec([name], spec)])
    layout = engine_layout(config, caches, views, Platform()).layout
    assert [(r.role, r.offset, r.width, r.dtype) for r in layout.regions] == [
        ("latent", 0, 256, "float4_e2m1fn_x2"),
        ("rope", 256, 64, "float8_e4m3fn"),
        ("latent.scale.transposed", 320, 32, "float8_e4m3fn"),
    ]
