"""A declared pool holds what transformers' own model of that config caches: layer by layer, kind of
state by kind of state, element by element.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from kvpool.layout.dtypes import ITEMSIZE  # noqa: E402
from kvpool.models import declare, declare_draft, known, shipped  # noqa: E402
from kvpool.models.drafts import DRAFTS  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIGS = Path(__file__).parents[3] / "kvpool" / "models" / "configs"
TOKENS, WINDOW = 9, 5
COMMON = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"qk_nope_head_dim": 8, "q_lora_rank": 16, "n_group": 1, "topk_group": 1}
INDEX = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4}
LINEAR = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 3, "full_attn_layers": [2, 4]}
TINY: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**LATENT, **ROUTED, "num_mtp_layers": 0},
    "deepseek_v32": {**LATENT, **ROUTED, **INDEX},
    "deepseek_v4": {
        **ROUTED,
        **INDEX,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "sliding_window": WINDOW,
        "q_lora_rank": 8,
        "o_lora_rank": 8,
        "o_groups": 2,
        "compress_ratios": [0, 4, 128, 4],
        "num_nextn_predict_layers": 1,
    },
    "gemma3_text": {"sliding_window": WINDOW, "num_hidden_layers": 7},
    "gpt_oss": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "kimi_linear": {
        **LATENT,
        **EXPERTS,
        "q_lora_rank": None,
        "linear_attn_config": {**LINEAR, "kda_layers": [1, 3]},
    },
    "llama": {},
    "ministral": {"sliding_window": WINDOW},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 4},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3_moe": {**EXPERTS, "use_sliding_window": True, "sliding_window": WINDOW},
    "qwen3_next": {
        **EXPERTS,
        "shared_expert_intermediate_size": 16,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
    },
}


def cached(model: str) -> tuple[dict[str, Any], list[Any]]:
    """The config as transformers writes it, and the cache layers of a model that ran 9 tokens."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model, **{**COMMON, **TINY[model]})
    net = transformers.AutoModelForCausalLM.from_config(config).eval()
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        net(torch.arange(3, 3 + TOKENS)[None], past_key_values=cache, use_cache=True)
    return config.to_dict(), cache.layers


def elements(layer: Any, kernel: int) -> dict[str, int]:
    """Numbers that a cache layer keeps, by the pool's space: of a token, an entry or a slot."""
    if hasattr(layer, "conv_states"):  # its oldest tap is never read again
        taps = layer.conv_states[0].shape[1] * (kernel - 1)
        return {"state": taps + layer.recurrent_states[0].numel()}
    held = [layer.keys, layer.values]
    compressed = getattr(layer, "compressed_kv", None)
    windowed = layer.keys.shape[2] < TOKENS
    if windowed and layer.keys.equal(layer.values):  # one vector is key and value
        held = held[:1]
    found = {"swa" if windowed else "kv": sum(x.shape[1] * x.shape[3] for x in held)}
    if hasattr(layer, "indexer_keys"):
        found["kv"] += layer.indexer_keys.shape[-1]
    if compressed is not None:
        name = "c4" if "indexer" in compressed else "c128"
        found[name] = sum(x.shape[-1] for x in compressed.values())
        open_ = [*layer.buffer_kv.values(), *layer.buffer_gate.values()]
        found[f"{name}.ring"] = sum(x.shape[-1] for x in open_)
    return found


@pytest.mark.parametrize("model", TINY)
def test_a_declared_pool_holds_what_the_model_caches(model):
    config, layers = cached(model)
    declared = declare(config)
    index = {"index_packing": "f32"} if "index_head_dim" in config else {}
    few = {"num_pages": 2, "num_window_pages": 2, "num_slots": 2, "device": "meta"}
    layout = declared.build(dtype="f32", **few, **index).layout
    kernel = config.get("linear_conv_kernel_dim", 0)
    assert declared.layers == tuple(range(len(layers)))
    for number, layer in enumerate(layers):
        found: Counter[str] = Counter()
        for region in (r for r in layout.regions if r.layer == number):
            entry = region.axis("entry")
            count = region.nbytes // ITEMSIZE[region.dtype] // (entry.size if entry else 1)
            found[layout.space_of(region).name] += count
        assert found == elements(layer, kernel), f"layer {number}"


@pytest.mark.parametrize("name", shipped())
def test_a_published_config_says_the_same_as_transformers_writes_of_it(name):
    raw = json.loads((CONFIGS / f"{name}.json").read_text())
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
