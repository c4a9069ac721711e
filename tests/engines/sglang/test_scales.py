"""Scales of a checkpoint as SGLang's own methods leave them in its modules of attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import NVFP4KVCacheMethod
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.models.llama import LlamaModel

from disagg.connectors.scales import scale_conventions
from disagg.connectors.sglang.pools import ModelPools, engine_layout
from disagg.connectors.sglang.scales import rank_scales
from disagg.connectors.sglang.states import Ranks
from tests.engines.sglang import sides

E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def one_rank():
    with sides.alone():
        yield


def attention(layer, **weights):
    """A module of attention whose weights have been loaded; of a checkpoint with none, if so."""
    method = BaseKVCacheMethod(None)
    config = SimpleNamespace(get_quant_method=lambda layer, prefix: method)
    module = RadixAttention(4, 8, 1.0, 4, layer, quant_config=config if weights else None)
    for name, value in weights.items():
        getattr(module, name).data.fill_(value)
    if weights:
        method.process_weights_after_loading(module)
    return module


def said(pool, *attention, draft=None):
    runners = [
        SimpleNamespace(model=torch.nn.ModuleList(modules), token_to_kv_pool=holder)
        for holder, modules in ((pool, attention), *([draft] if draft else ()))
    ]
    heads = Ranks(total_kv_heads=4)
    drafts = [ModelPools(tokens=draft[0], ranks=heads)] if draft else []
    layout = engine_layout(pool, heads, state_types=[], total_layers=4, drafts=drafts).layout
    return scale_conventions(layout, rank_scales(runners))


def test_scales_of_a_checkpoint_are_said_layer_by_layer():
    modules = attention(1, k_scale=0.5, v_scale=0.25), attention(2, k_scale=0.5), attention(3)
    assert said(sides.mha(layers=3, start=1, dtype=E4M3), *modules) == {
        "k_scale of layer 1": 0.5, "v_scale of layer 1": 0.25,
        "k_scale of layer 2": 0.5, "v_scale of layer 2": 0.5,
        "k_scale of layer 3": 1.0, "v_scale of layer 3": 1.0,
    }  # fmt: skip


def test_values_that_are_not_scaled_have_none():
    assert said(sides.mha(dtype=torch.bfloat16), attention(0, k_scale=0.5)) == {}
    assert said(sides.mxfp8(), attention(0, k_scale=0.5)) == {}


def test_scales_of_a_file_are_those_of_quantization_param_path(tmp_path):
    file = tmp_path / "scales.json"
    file.write_text(
        '{"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", '
        '"scaling_factor": {"0": {"0": 0.5, "1": 0.0123}}}}'
    )
    layers = [SimpleNamespace(self_attn=SimpleNamespace(attn=attention(n))) for n in range(2)]
    config = type("Llama", (SimpleNamespace,), {"model_type": "llama"})(num_hidden_layers=2)
    model = SimpleNamespace(layers=layers, config=config, _kv_cache_parallel_layout=(0, 1))
    LlamaModel.load_kv_cache_scales(model, str(file))
    document = said(sides.mha(layers=2, dtype=E4M3), *(n.self_attn.attn for n in layers))
    by_checkpoint = said(
        sides.mha(layers=2, dtype=E4M3), attention(0, k_scale=0.5), attention(1, k_scale=0.0123)
    )
    assert document == by_checkpoint and len(document) == 4


def test_of_mlas_two_modules_that_which_has_the_scale_counts():
    absorbed, plain = attention(0, k_scale=0.5, v_scale=0.5), attention(0)
    for modules in ((absorbed, plain), (plain, absorbed)):
        assert said(sides.mla(layers=1, dtype=E4M3), *modules) == {"k_scale of layer 0": 0.5}


def test_a_draft_has_scales_of_its_own():
    pool, own = sides.mha(layers=1, dtype=E4M3), sides.mha(layers=1, start=2, dtype=E4M3)
    draft = own, [attention(2, k_scale=0.25)]
    document = said(pool, attention(0, k_scale=0.5), draft=draft)
    names = "k_scale of layer 0", "draft.k_scale of layer 0"
    assert [document[name] for name in names] == [0.5, 0.25]


def test_of_nvfp4_the_scales_are_those_that_its_method_made():
    method = NVFP4KVCacheMethod(1, "cpu", 16, False)
    layer = SimpleNamespace(self_attn=SimpleNamespace(attn=attention(0, k_scale=0.5)))
    method.load_scales_from_model(SimpleNamespace(layers=[layer]))
    pool = sides.mha(layers=1, dim=32, dtype=torch.float4_e2m1fn_x2, quant_method=method)
    document = said(pool, layer.self_attn.attn)
    assert document == {"k_scale of layer 0": 0.5, "v_scale of layer 0": 0.5}
