"""Scales of a checkpoint as vLLM's own methods leave them in its modules of attention."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)

from disagg.connectors.scales import scale_conventions
from disagg.connectors.settings import Settings
from disagg.connectors.tensors import UnknownFormat
from disagg.connectors.vllm import connector as connector_module
from disagg.connectors.vllm.connector import KvpoolConnector
from disagg.connectors.vllm.layout import engine_layout
from disagg.connectors.vllm.registered import Platform, module_scales
from tests.disagg.connectors.vllm import engines

FP8 = {"dtype": torch.uint8, "mode": "FP8_PER_TENSOR", "kv_cache_dtype": "fp8"}


class Attention(torch.nn.Module):
    """The part of a module of attention that has scales."""

    def __init__(self, backend="FLASH_ATTN", heads=2):
        super().__init__()
        self.kv_cache_dtype, self.num_kv_heads, self.backend = "fp8", heads, backend
        set_default_quant_scales(self, register_buffer=True)

    def get_attn_backend(self):
        return SimpleNamespace(get_name=lambda: self.backend)


def loaded(method, **weights):
    """A module whose weights have been loaded and processed by its method."""
    module = Attention()
    method.create_weights(module)
    for name, value in weights.items():
        getattr(module, name).data.copy_(torch.tensor(value))
    method.process_weights_after_loading(module)
    return module


def heads_scheme(strategy):
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    config = mock.MagicMock(kv_cache_scheme=scheme)
    return compressed_tensors.CompressedTensorsKVCacheMethod(config)


def said(*modules):
    engine = engines.Layers("FLASH_ATTN", 32, layers=len(modules), **FP8)
    named = dict(zip(engine.names, modules))
    return scale_conventions(engine.layout, module_scales(named, engine.seen.layers))


@pytest.mark.parametrize(
    ("weights", "key", "value"),
    [
        ({"k_scale": 0.5, "v_scale": 0.25}, 0.5, 0.25),
        ({"k_scale": 0.5}, 0.5, 0.5),  # one scale for both
        ({}, 1.0, 1.0),
    ],
)
def test_scales_of_a_checkpoint_are_said_layer_by_layer(weights, key, value):
    method = BaseKVCacheMethod(None)
    assert said(loaded(method), loaded(method, **weights)) == {
        "k_scale of layer 0": 1.0, "v_scale of layer 0": 1.0,
        "k_scale of layer 1": key, "v_scale of layer 1": value,
    }  # fmt: skip


def test_scales_of_compressed_tensors_are_said_unless_each_head_has_one():
    one = loaded(heads_scheme("tensor"), k_scale=[0.5], v_scale=[0.25])
    assert said(one) == {"k_scale of layer 0": 0.5, "v_scale of layer 0": 0.25}
    each = loaded(heads_scheme("attn_head"), k_scale=[0.5, 0.75], v_scale=[0.25, 0.25])
    with pytest.raises(UnknownFormat, match="target layer 0: k scales of 2 heads"):
        said(each)


def test_latents_and_latents_of_a_window_say_the_scale_of_keys():
    sizes = {"block_size": 16, "num_kv_heads": 1, "head_size": 576, "dtype": torch.uint8}
    sizes["kv_quant_mode"] = KVQuantMode.FP8_PER_TENSOR
    specs = MLAAttentionSpec(**sizes), SlidingWindowMLASpec(**sizes, sliding_window=64)
    names, modules = [engines.name(n) for n in range(2)], {}
    for name, value in zip(names, (0.5, 0.25)):
        modules[name] = Attention("TRITON_MLA")
        modules[name]._k_scale.fill_(value)
        modules[name]._v_scale.fill_(7.0)  # nothing is scaled by it
    config = engines.config(modules, latent=512, rope=64)
    views = {name: torch.zeros(6, 1, 16, 576, dtype=torch.uint8) for name in names}
    groups = [KVCacheGroupSpec([name], spec) for name, spec in zip(names, specs)]
    seen = engine_layout(config, KVCacheConfig(6, [], groups), views, Platform())
    assert {region.role for region in seen.layout.regions} == {
        "latent", "rope", "swa.latent", "swa.rope",
    }  # fmt: skip
    assert scale_conventions(seen.layout, module_scales(modules, seen.layers)) == {
        "k_scale of layer 0": 0.5,
        "k_scale of layer 1": 0.25,
    }


def test_the_connector_gives_its_endpoints_the_scales_and_its_ranks_number():
    engine = engines.Layers("FLASH_ATTN", 32, **FP8)
    module = loaded(BaseKVCacheMethod(None), k_scale=0.5, v_scale=0.25)
    connector = object.__new__(KvpoolConnector)
    connector._vllm_config = engines.config({engine.names[0]: module})
    spec = engines.spec(
        "FullAttentionSpec", 16, num_kv_heads=2, head_size=16,
        kv_quant_mode=SimpleNamespace(name="FP8_PER_TENSOR"),
    )  # fmt: skip
    caches = engines.caches(engines.BLOCKS, [(engine.names, spec)])
    caches.needs_kv_cache_zeroing = False
    connector._kv_cache_config, connector._settings = caches, Settings()
    parallel = connector._vllm_config.parallel_config
    parallel.pipeline_parallel_size, parallel.world_size = 1, 4
    parallel.rank, parallel.data_parallel_index = 3, 2
    connector._roles = {"produces": True, "consumes": True}
    said = mock.patch.object(connector_module, "engine_conventions", return_value={"model": "m"})
    with said, mock.patch.object(connector_module, "Rank") as rank:
        connector.register_kv_caches(dict(zip(engine.names, engine.views)))
    assert rank.call_args.kwargs["conventions"] == {
        "model": "m",
        "k_scale of layer 0": 0.5,
        "v_scale of layer 0": 0.25,
    }
    assert rank.call_args.kwargs["number"] == 2 * 4 + 3
