"""DeepSeek-V4 and V4.1 in vLLM's own layout on a CPU, from engine to engine: every live byte is
where the other engine has it, computed without layouts (`tests.engines.deepseek_v4`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from vllm.models.deepseek_v4 import sparse_mla
from vllm.models.deepseek_v4.cpu import cpu_mla
from vllm.models.deepseek_v4.nvidia import flashinfer_sparse
from vllm.models.deepseek_v41 import sparse_mla as sparse_mla_v41
from vllm.models.deepseek_v41.nvidia import flashinfer_sparse as flashinfer_sparse_v41
from vllm.v1.attention.backends.mla import indexer, sparse_indexer, sparse_swa

from disagg.connectors.tensors import UnknownFormat
from disagg.connectors.vllm.layout import engine_layout
from disagg.connectors.vllm.registered import OPEN_WINDOWS, V4
from disagg.plan import IncompatibleLayouts, IncompleteTransfer
from tests.engines.deepseek_v4 import Model, Rank, hand_over, ranks

V4_0 = Model()
V4_1 = Model(version="v41", ratios=(0, 1, 0, 2, 2, 0), block=128)
EDGES = (1, 3, 4, 7, 8, 63, 64, 127, 128, 129, 255, 256, 257, 300, 511, 513)
MODELS = {
    "v4": V4_0,
    "v4, index keys in fp4": replace(V4_0, fp4_keys=True),
    "v4, rows in bfloat16": replace(V4_0, dtype="bfloat16"),
    "v4, rows in fp8": replace(V4_0, dtype="fp8"),
    "v4, a draft of two layers": replace(V4_0, ratios=(0, 4, 128, 0, 0), drafts=2),
    "v4, one layer": replace(V4_0, ratios=(4,)),
    "v4, windows only": replace(V4_0, ratios=(0, 0, 0), window=64),
    "v4, other windows": replace(V4_0, ratios=(128, 128, 4, 0, 4, 4, 4), window=96),
    "v4, many layers": replace(V4_0, ratios=(0, 0, *(4, 128) * 6, 4)),
    "v41": V4_1,
    "v41, records of mxfp8": replace(V4_1, record=528),
    "v41, nvfp4": replace(V4_1, record=528, dtype="nvfp4_ds_mla"),
    "v41, nvfp4 and index keys in fp4": replace(
        V4_1, record=528, dtype="nvfp4_ds_mla", fp4_keys=True
    ),
    "v41, rows in bfloat16": replace(V4_1, dtype="bfloat16"),
    "v41, replay": replace(V4_1, replay=True),
    "v41, without ratio 2": replace(V4_1, ratios=(0, 1, 1, 0), window=200),
    "v41, ratio 2 only": replace(V4_1, ratios=(2, 2, 2, 2, 2), ring=16, replay=True),
}


@pytest.mark.parametrize("tokens", EDGES)
@pytest.mark.parametrize("model", ["v4", "v41, replay"])
def test_every_live_row_is_where_the_other_engine_has_it(model, tokens):
    hand_over(ranks(MODELS[model]), ranks(MODELS[model]), tokens)


@pytest.mark.parametrize("tokens", [1, 129, 511])
@pytest.mark.parametrize("model", MODELS)
def test_every_spec_of_its_models_is_described(model, tokens):
    hand_over(ranks(MODELS[model]), ranks(MODELS[model]), tokens)


SIDES = [*product((1, 2), repeat=2)]
STAGES = {"v4": (range(3), range(3, 6)), "v41": (range(4), range(4, 6))}
"""vLLM's planner wants a layer of each group on each stage."""


@pytest.mark.parametrize("model", [V4_0, replace(V4_1, replay=True)], ids=["v4", "v41"])
@pytest.mark.parametrize("here", SIDES)
@pytest.mark.parametrize("there", SIDES)
def test_tensor_and_pipeline_parallel_sizes_may_differ(there, here, model):
    stages = {1: (), 2: STAGES[model.version]}
    sides = [ranks(model, tp, stages[pp]) for tp, pp in (there, here)]
    hand_over(*sides, 389)


@pytest.mark.parametrize("tokens", [129, 1025])
@pytest.mark.parametrize(
    ("model", "there", "here"),
    [
        (V4_0, 256, 128),
        (V4_0, 128, 512),
        (V4_0, 512, 256),
        (V4_0, 512, 384),
        (V4_1, 128, 64),
        (V4_1, 32, 96),
        (V4_1, 256, 128),
    ],
)
def test_block_sizes_may_differ(model, there, here, tokens):
    hand_over(ranks(replace(model, block=there)), ranks(replace(model, block=here)), tokens)


@pytest.mark.parametrize(
    ("model", "block", "words"),
    [
        (V4_0, 192, "blocks of 192 tokens cut states of 128"),
        (V4_0, 514, "blocks of 514 tokens cut states of 4"),
        (V4_1, 33, "blocks of 33 tokens cut states of 2"),
    ],
)
def test_blocks_that_cut_states_are_refused(model, block, words):
    """vLLM's planner takes them, and its kernels would lose states."""
    with pytest.raises(UnknownFormat, match=f"{words}. Use a --block-size that is a multiple of"):
        Rank(replace(model, block=block), range(6))


def test_pages_of_fewer_tokens_than_a_block_are_refused():
    """Blocks of 512 in kernel pages of 256: rows and scales of half a block lie together."""
    rank = Rank(replace(V4_0, ratios=(4,), block=512), range(1))
    for name, cache in rank.caches.items():
        blocks, _, states, content = rank.views[name].shape
        if cache.spec.block_size == 512:
            rank.views[name] = rank.views[name].new_zeros(2 * blocks, 1, states // 2, content)
    with pytest.raises(UnknownFormat, match="compressed states are known in whole blocks"):
        engine_layout(rank.config, rank.planned, rank.views)


@pytest.mark.parametrize("rings", [(8, 16), (16, 8)])
@pytest.mark.parametrize("tokens", [15, 16, 17, 261])
def test_rings_of_v41_may_have_other_sizes(rings, tokens):
    there, here = (ranks(replace(V4_1, ring=size)) for size in rings)
    hand_over(there, here, tokens)


@pytest.mark.parametrize("start", [0, 256, 320, 384])
@pytest.mark.parametrize("model", [V4_1, replace(V4_1, replay=True)], ids=["kept", "replayed"])
def test_a_replayed_window_comes_whole_behind_a_prefix_of_decodes_own(model, start):
    """vLLM keeps no window of a prefix that it replays, and loads it from a connector."""
    hand_over(ranks(model), ranks(model), 389, start)


def test_vllms_classes_have_these_names():
    classes = (
        *(sparse_mla.DeepseekV4FlashMLABackend, cpu_mla.DeepseekV4CPUSparseBackend),
        *(sparse_mla_v41.DeepseekV4FlashMLABackend, sparse_mla_v41.FlashMLAMegaAttnBackend),
        flashinfer_sparse.DeepseekV4FlashInferMLASparseBackend,
        flashinfer_sparse_v41.DeepseekV4FlashInferMLASparseBackend,
        *(sparse_swa.DeepseekSparseSWABackend, cpu_mla.DeepseekV4CPUIndexerBackend),
        *(indexer.DeepseekV4IndexerBackend, indexer.DeepseekV41IndexerBackend),
        sparse_indexer.DeepseekV41SparseIndexerBackend,
    )
    assert {each.get_name() for each in classes} == {*V4} - {OPEN_WINDOWS}


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        (V4_0, replace(V4_0, dtype="fp8"), "swa.rope: bfloat16 on prefill, float8_e4m3fn"),
        (V4_0, replace(V4_0, fp4_keys=True), "c4.index_key: float8_e4m3fn on prefill, float4_e2m1"),
        (V4_0, replace(V4_0, ratios=(0, 4, 128, 4, 4, 4)), "layer 4 c4.latent: prefill offers no"),
        (V4_0, replace(V4_0, window=256), "window"),
        (V4_1, replace(V4_1, record=528), "latent: 448 "),
        (replace(V4_1, record=528), replace(V4_1, record=528, dtype="nvfp4_ds_mla"), "float4_e2m1"),
        (V4_1, replace(V4_1, ratios=(0, 2, 0, 2, 2, 0)), "layer 1 c2.latent: prefill offers no"),
    ],
)
def test_what_differs_between_two_engines_is_refused_by_name(there, here, words):
    with pytest.raises((IncompatibleLayouts, IncompleteTransfer), match=words):
        hand_over(ranks(there), ranks(here), 389)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (replace(V4_0, dtype="fp4_ds_mla"), "latents of DeepSeek-V4 in fp4_ds_mla, 512 elements"),
        (replace(V4_0, ratios=(64,)), "compressor.state_cache: window 64 is not known"),
    ],
)
def test_other_formats_are_refused_by_name(model, words):
    with pytest.raises(UnknownFormat, match=words):
        ranks(model)
