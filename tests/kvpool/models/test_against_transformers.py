"""A declared pool holds what transformers' own model of that config caches: layer by layer, kind of
state by kind of state, element by element.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from kvpool.layout.dtypes import ITEMSIZE  # noqa: E402
from kvpool.models import declare, declare_draft, known, shipped  # noqa: E402
from kvpool.models.families import DRAFTS  # noqa: E402
from tests.kvpool.models.configs import FEW, config_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS, WINDOW = 9, 5
V4 = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 4,
    "qk_rope_head_dim": 8,
    "sliding_window": WINDOW,
    "q_lora_rank": 8,
    "o_lora_rank": 8,
    "o_groups": 2,
    "compress_ratios": [0, 4, 128, 4],
    "num_nextn_predict_layers": 1,
}


def elements(layer: Any) -> dict[str, int]:
    """Numbers that a cache layer keeps, by the pool's space: of a token or an entry."""
    counts = {"swa": layer.keys.shape[1] * layer.keys.shape[3]}  # one vector is key and value
    compressed = getattr(layer, "compressed_kv", None)
    if compressed is not None:
        name = "c4" if "indexer" in compressed else "c128"
        counts[name] = sum(x.shape[-1] for x in compressed.values())
        windows = [*layer.buffer_kv.values(), *layer.buffer_gate.values()]
        counts[f"{name}.ring"] = sum(x.shape[-1] for x in windows)
    return counts


def test_a_declared_pool_holds_what_deepseek_v4_caches():
    """For all other types, see test_every_type.py."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("deepseek_v4", **V4)
    net = transformers.AutoModelForCausalLM.from_config(config).eval()
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        net(torch.arange(3, 3 + TOKENS)[None], past_key_values=cache, use_cache=True)
    declared = declare(config.to_dict())
    layout = declared.build(dtype="f32", index_packing="f32", **FEW).layout
    assert declared.layers == tuple(range(len(cache.layers)))
    for number, layer in enumerate(cache.layers):
        assert layer.keys.equal(layer.values)
        counts: Counter[str] = Counter()
        for region in (r for r in layout.regions if r.layer == number):
            count = region.nbytes // ITEMSIZE[region.dtype] // region.axis("entry").size
            counts[layout.space_of(region).name] += count
        assert counts == elements(layer), f"layer {number}"


@pytest.mark.parametrize("name", shipped())
def test_a_published_config_says_the_same_as_transformers_writes_of_it(name):
    raw = config_of(name)
    written = transformers.AutoConfig.for_model(**raw).to_dict()
    assert declare(written) == declare(raw)
    assert declare_draft(written) == declare_draft(raw)


UNEVEN = "96 heads do not divide a hidden size of 4096"
OWN_DEFAULTS = {  # of fields that must be given, or that contradict each other
    "emu3_text_model": "known to transformers as a part of emu3",
    "glm4_moe": UNEVEN,
    "glm4v_moe_text": UNEVEN,
    "qwen3_omni_moe_text": "28 heads do not divide a hidden size of 2048",
    "lfm2_moe": "its layer_types must be given",
}


@pytest.mark.parametrize("model", sorted({*known()} - {*OWN_DEFAULTS}))
def test_the_defaults_of_transformers_are_declared(model):
    config = transformers.AutoConfig.for_model(model)
    layers = len(transformers.DynamicCache(config=config).layers)
    assert declare(config.to_dict()).layers == tuple(range(layers))
    if model in DRAFTS:
        draft = declare_draft(config.to_dict())
        assert draft is None or draft.layers == (layers,)
        assert (draft is not None) == (model in ("deepseek_v3", "deepseek_v4"))
