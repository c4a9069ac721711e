"""DeepSeek-V4 as vLLM lays it out: specs as its layers make them, groups and tensors by its own
planner, on a CPU. Rows are where its kernels write them (`fused_compress_quant_cache.py`,
`save_partial_states.py`, `sparse_swa.py`): computed here, without layouts.
"""

from __future__ import annotations

from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest
import torch
from vllm.v1.core import kv_cache_utils as planner
from vllm.v1.kv_cache_interface import (
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from disagg.connectors.blocks import block_table
from disagg.connectors.tensors import UnknownFormat
from disagg.connectors.vllm.layout import engine_layout
from disagg.connectors.vllm.registered import V4
from disagg.plan import plan
from kvpool import DSv4Pool
from tests import oracle
from tests.disagg.connectors.vllm import engines

RATIOS = (0, 4, 128, 4, 128, 4)
BLOCKS, WINDOW, FILL = 90, 128, 0xEE
PACKED = {
    "cache_dtype_str": "fp8_ds_mla",
    "state_content_bytes": 584,
    "model_version": "deepseek_v4",
}
ONE = {"num_kv_heads": 1, "alignment": 576}
BYTES = {"dtype": torch.uint8, **ONE}


def keys(block, head, window):
    """Of tokens that are not yet compressed."""
    return SlidingWindowMLASpec(
        block_size=block, head_size=head, sliding_window=window, dtype=torch.float32, **ONE
    )


def caches_of(layer):
    """By the end of its name, a layer's caches: backend, spec, bytes a row and of its scales, and
    tokens an entry (0: a row for each token that is not yet compressed).
    """
    ratio = RATIOS[layer]
    window = SlidingWindowMLASpec(
        block_size=64, head_size=512, sliding_window=WINDOW, **PACKED, **BYTES
    )
    yield "attn.swa_cache", "DEEPSEEK_SPARSE_SWA", window, (576, 7, 8), 1
    if ratio:
        latents = MLAAttentionSpec(
            block_size=256, head_size=512, tokens_per_state=ratio, **PACKED, **BYTES
        )
        yield "attn", "FLASHMLA_SPARSE_DSV4", latents, (576, 7, 8), ratio
        state = keys(4, 2048, 8) if ratio == 4 else keys(8, 1024, 128)
        yield "attn.compressor.state_cache", "CompressorBackend", state, (state.head_size * 4,), 0
    if ratio == 4:
        index = MLAAttentionSpec(block_size=256, head_size=132, tokens_per_state=4, **BYTES)
        yield "attn.indexer.k_cache", "DEEPSEEK_V4_INDEXER", index, (128, 4, 4), 4
        state = keys(4, 512, 8)
        yield "attn.indexer.compressor.state_cache", "CompressorBackend", state, (2048,), 0


class Engine:
    """A stage of layers: vLLM's tensors, and a request's blocks in each group."""

    def __init__(self, layers, seed):
        named = {f"model.layers.{n}.{c[0]}": (n, *c[1:]) for n in layers for c in caches_of(n)}
        self.caches, order = named, KVCacheLayout.BLHNC
        config = engines.config(
            {name: engines.module(backend) for name, (_, backend, *_) in named.items()},
            layers=len(RATIOS),
        )
        config.cache_config = SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: order,
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
        )
        config.attention_config = SimpleNamespace(hisparse_config=None)
        specs = {name: spec for name, (_, _, spec, _, _) in named.items()}
        groups = planner._get_packed_kv_cache_groups(config, specs)
        self.planned = planner.get_kv_cache_config_from_groups(config, groups, 1 << 40)
        tensors = self.planned.kv_cache_tensors
        self.raw, self.views = torch.full((tensors[0].size,), FILL, dtype=torch.uint8), {}
        for tensor in tensors:
            views = create_kv_cache_views(
                self.raw.view(torch.int8), specs[tensor.layers[0]], BLOCKS, order, tensor, None
            )
            self.views |= zip(tensor.layers, views)
        self.seen = engine_layout(config, self.planned, self.views)
        self.free = np.random.default_rng(seed).permutation(np.arange(1, BLOCKS)).tolist()
        self.group_of = {name: at for at, g in enumerate(groups) for name in g.layer_names}
        self.groups = groups

    def blocks(self, tokens):
        """By group; of a window those before it are the null block."""
        lists = []
        for group in self.groups:
            spec = group.kv_cache_spec.first_spec
            first = 0
            if isinstance(spec, SlidingWindowMLASpec):
                first = max(0, tokens - spec.sliding_window + 1) // spec.block_size
            count = -(-tokens // spec.block_size)
            ids = [self.free.pop() for _ in range(count - first)]
            lists.append((0,) * first + tuple(ids))
        return tuple(lists)

    def rows(self, blocks, tokens):
        """Where live rows and scales are: layer, cache, number, and bytes `[...]` of the slab."""
        for name, (layer, _, _, sizes, ratio) in self.caches.items():
            view, ids = self.views[name], blocks[self.group_of[name]]
            base = view.data_ptr() - self.raw.data_ptr()
            stride, states = view.stride(0) * view.element_size(), view.shape[2]
            start, stop = 0, tokens // ratio if ratio else tokens
            if ratio == 1:
                start = max(0, tokens - WINDOW + 1)
            elif not ratio:
                width = RATIOS[layer]
                start = max(0, tokens // width * width - (width if width == 4 else 0))
            size, *scale = sizes
            for number in range(start, stop):
                block, slot = divmod(number, states)
                first = base + ids[block] * stride
                assert ids[block]
                yield layer, name.partition("attn")[2], number, first + slot * size, size
                if scale:
                    at = first + states * size + slot * scale[1]
                    yield layer, name.partition("attn")[2] + " scale", number, at, scale[0]

    def write(self, blocks, tokens):
        """Writes what each row must be; returns which bytes were written."""
        written = torch.zeros_like(self.raw, dtype=torch.bool)
        for layer, cache, number, first, size in self.rows(blocks, tokens):
            self.raw[first : first + size] = torch.from_numpy(value(layer, cache, number, size))
            assert not written[first : first + size].any()
            written[first : first + size] = True
        return written


def value(layer, cache, number, size):
    """The bytes of a row."""
    seed = crc32(f"{layer} {cache} {number}".encode())
    return np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8)


EDGES = (1, 3, 4, 7, 8, 63, 64, 127, 128, 129, 255, 256, 257, 300, 511, 513)
WHOLE = range(len(RATIOS))


@pytest.mark.parametrize("tokens", EDGES)
@pytest.mark.parametrize(
    ("there", "here"),
    [([WHOLE], [WHOLE]), ([range(3), range(3, 6)], [WHOLE]), ([WHOLE], [range(2), range(2, 6)])],
)
def test_every_live_row_is_where_the_other_engine_has_it(there, here, tokens):
    sources = [Engine(layers, seed) for seed, layers in enumerate(there)]
    offered = []
    for source in sources:
        blocks = source.blocks(tokens)
        source.write(blocks, tokens)
        offered.append(block_table(source.seen.groups, blocks, tokens))
    for layers in here:
        dest = Engine(layers, 7)
        blocks = dest.blocks(tokens)
        wanted = block_table(dest.seen.groups, blocks, tokens)
        made = plan([source.seen.layout for source in sources], dest.seen.layout)
        for number, table in enumerate(offered):
            oracle.copy(made.bind(number, table, wanted, tokens=range(tokens)))
        got = dest.raw.clone()
        live = dest.write(blocks, tokens)
        assert torch.equal(got[live], dest.raw[live])
        others = sorted({*range(BLOCKS)} - {block for ids in blocks for block in ids if block})
        assert (got.view(BLOCKS, -1)[others] == FILL).all()


@pytest.mark.parametrize("tokens", EDGES)
@pytest.mark.parametrize("page_rings", [False, True])
def test_kvpools_own_pool_can_be_the_other_side(tokens, page_rings):
    """Out of vLLM, and back into other blocks."""
    engine, back = Engine(WHOLE, 0), Engine(WHOLE, 1)
    blocks, wanted = engine.blocks(tokens), back.blocks(tokens)
    engine.write(blocks, tokens)
    pool = DSv4Pool(
        layers=WHOLE, compress_ratios=RATIOS, window=WINDOW - 1, num_pages=4, num_window_pages=8,
        num_slots=3, page_size=256, packing="fp8", page_rings=page_rings,
    )  # fmt: skip
    address = oracle.place(pool, tokens)
    first = block_table(engine.seen.groups, blocks, tokens)
    last = block_table(back.seen.groups, wanted, tokens)
    into, out = plan([engine.seen.layout], pool.layout), plan([pool.layout], back.seen.layout)
    oracle.copy(into.bind(0, first, address, tokens=range(tokens)))
    oracle.copy(out.bind(0, address, last, tokens=range(tokens)))
    got = back.raw.clone()
    live = back.write(wanted, tokens)
    assert torch.equal(got[live], back.raw[live])


def test_vllms_classes_have_these_names():
    from vllm.models.deepseek_v4.compressor import CompressorBackend
    from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLABackend
    from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend

    swa, latents = DeepseekSparseSWABackend, DeepseekV4FlashMLABackend
    classes = CompressorBackend, DeepseekV4IndexerBackend, swa, latents
    assert {each.get_name() for each in classes} == {*V4} - {"FLASHINFER_MLA_SPARSE_DSV4"}


def test_other_latents_are_refused_by_name(monkeypatch):
    monkeypatch.setitem(PACKED, "cache_dtype_str", "auto")
    with pytest.raises(UnknownFormat, match="latents of DeepSeek-V4 in auto are not known"):
        Engine(WHOLE, 0)
