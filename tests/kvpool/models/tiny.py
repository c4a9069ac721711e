"""A tiny random model of every causal-LM type of transformers, and what transformers caches of it:
the independent count that pools are held against.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvpool.models.families import WRAPPERS

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# text models that AutoModelForCausalLM does not make: most are found in multimodal ones only
TEXTS = (
    *("chameleon", "cosmos3_edge_text", "deepseek_ocr2_text", "ernie4_5_vl_moe_text"),
    *("glm4v_moe_text", "glm4v_text", "glm5_next_text", "glm_image_text", "glm_ocr_text"),
    *("granite4_vision_text", "granite_docling_text", "hunyuan_vl_text", "kosmos_2_5_text_model"),
    *("kosmos_2_text_model", "mistral4", "mistral_large4_text", "molmo2_text"),
    *("muse_glimmer_text", "muse_spark_text", "paddleocr_vl_text", "qwen2_5_omni_text"),
    *("qwen2_5_vl_text", "qwen2_vl_text", "qwen3_omni_moe_text", "qwen3_vl_moe_text"),
    *("qwen3_vl_text", "step3p5", "voxtral_realtime_text"),
)
# models of them that AutoModel does not make by themselves
CLASSES = {
    "deepseek_ocr2_text": "deepseek_ocr2.modeling_deepseek_ocr2.DeepseekOcr2TextModel",
    "ernie4_5_vl_moe_text": "ernie4_5_vl_moe.modeling_ernie4_5_vl_moe.Ernie4_5_VLMoeTextModel",
    "granite4_vision_text": "granite4_vision.modeling_granite4_vision.Granite4VisionTextModel",
    "kosmos_2_5_text_model": "kosmos2_5.modeling_kosmos2_5.Kosmos2_5TextModel",
    "kosmos_2_text_model": "kosmos2.modeling_kosmos2.Kosmos2TextModel",
    "paddleocr_vl_text": "paddleocr_vl.modeling_paddleocr_vl.PaddleOCRTextModel",
    "qwen2_5_omni_text": "qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5OmniThinkerTextModel",
    "qwen3_omni_moe_text": "qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeThinkerTextModel",
    "step3p5": "step3p7.modeling_step3p7.Step3p7TextModel",
    "voxtral_realtime_text": "voxtral_realtime.modeling_voxtral_realtime.VoxtralRealtimeTextModel",
}
WINDOW = 9  # with the token itself
# what a config of this type has of these
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 8,
    "n_embd": 64,
    "d_model": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "dense_intermediate_size": 32,
    "dff": 96,
    "n_inner": 96,
    "num_hidden_layers": 4,
    "num_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "kv_channels": 24,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW - 1,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_layer_start_index": 1,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_dense_layers": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "qk_head_dim": 24,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "moe_layers": None,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
    "initializer_range": 0.2,
    "rotary_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LATENT = {"num_key_value_heads": 4, "head_dim": 8}
SWA, FULL = "sliding_attention", "full_attention"
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
MAMBA1 = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_dt_rank": 4}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}
CONV, LINEAR, INDEXED = "conv", "linear_attention", "indexed_attention"
INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    "sliding_window_size": WINDOW,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 16,
    "rel_extent": 64,
    "mlp_layer_types": ["dense"] * 4,
}


def mrope(*sections: int, **more: Any) -> dict[str, Any]:
    """Positions of three axes."""
    return {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [*sections], **more}}


QWEN_VL = {**mrope(2, 3, 3), "use_sliding_window": True, "max_window_layers": 2}
KOSMOS = {**TOKENS, "embed_dim": 64, "layers": 4}
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32"), LATENT),
    **dict.fromkeys(("glm_moe_dsa", "minicpm3", "youtu"), LATENT),
    "afmoe": {"layer_types": [SWA, FULL, SWA, SWA]},
    "bamba": {**MAMBA2, "attn_layer_indices": [2]},
    "bailing_hybrid": {
        **LATENT,
        "layer_types": [FULL, LINEAR, LINEAR, FULL],
        "num_experts_per_token": 2,
        "num_expert_group": 1,
        "moe_shared_expert_intermediate_size": 32,
    },
    "biogpt": {"head_dim": ...},
    "chameleon": {
        "vocabulary_map": {"<image>": 5},
        "vq_config": {"base_channels": 32, "num_embeddings": 16, "channel_multiplier": [1]},
    },
    "cohere_compass_text": {
        "head_dim": 16,
        "layer_types": [SWA, FULL, SWA, FULL],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in (SWA, FULL)
        },
    },
    "cohere2": {"head_dim": 16},
    "cosmos3_edge_text": mrope(4, 4, 4),
    "cpmant": {"dim_head": 16},
    "cwm": TOKENS,
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "layer_types": [
            SWA,
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 16,
        },
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["sparse"] * 4, "num_experts_per_tok": 2},
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "layer_types": [INDEXED, SWA, INDEXED, SWA],
        "per_layer_config": {
            str(n): {"kv_lora_rank": 40, "qk_nope_head_dim": 20, "head_dim": 28} for n in (1, 3)
        },
        **TOKENS,
    },
    "emu3": TOKENS,
    "ernie4_5_vl_moe_text": {**mrope(3, 3, 2), "moe_intermediate_size": [32, 32]},
    "exaone4": {"layer_types": [SWA, FULL, SWA, FULL]},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 128, "head_dim": 16},
    "falcon_mamba": {"state_size": 8},
    "gemma3_text": {"num_hidden_layers": 6},
    "gemma3n_text": {
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 5,
        "activation_sparsity_pattern": [0.0] * 10,
    },
    "gemma4_text": {"num_hidden_layers": 12, "num_kv_shared_layers": 6, "layer_types": None},
    "gemma4_unified_text": {"num_hidden_layers": 6, "layer_types": None},
    "glm4_moe": {"head_dim": 24},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "glm4v_moe_text": mrope(2, 1, 1, partial_rotary_factor=0.5),
    "glm4v_text": mrope(2, 3, 3),
    "glm5_next_text": {
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "layer_types": [LINEAR, INDEXED, INDEXED, LINEAR, LINEAR, INDEXED],
        "indexer_types": ["full", "full", "shared", "full", "full", "full"],
        "index_kpool": 3,
        "index_topk": 6,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 3,
        "linear_num_heads": 2,
        "linear_head_dim": 16,
    },
    "glm_image_text": {**mrope(2, 3, 3), **TOKENS},
    "glm_ocr_text": mrope(2, 3, 3),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": {
        **MAMBA2,
        "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
        "shared_intermediate_size": 32,
    },
    "helium": {"head_dim": 16},
    "hrm_text": {"num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 2},
    "hunyuan_vl_text": mrope(4, 4, 4),
    "hy_v4": {"num_key_value_heads": 4, "head_dim": 24},
    "inkling2_text": INKLING,
    "inkling_text": INKLING,
    "jamba": {**MAMBA1, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 1},
    "kimi_linear": {
        **LATENT,
        "layer_types": [FULL, LINEAR, FULL, LINEAR],
        "num_experts_per_token": 2,
        "linear_num_heads": 2,
        "linear_head_dim": 16,
    },
    "kolibri1": {"num_hidden_layers": 5},
    "kosmos_2_5_text_model": KOSMOS,
    "kosmos_2_text_model": KOSMOS,
    "laguna": {"layer_types": [SWA, FULL] * 2, "num_attention_heads_per_layer": [4, 8, 4, 8]},
    "lfm2": {"full_attn_idxs": [2]},
    "lfm2_moe": {"layer_types": [CONV, CONV, FULL, CONV]},
    "lfm3": {"layer_types": [CONV, SWA, FULL, CONV]},
    "longcat_flash": {**LATENT, "num_layers": 2, "num_hidden_layers": 4},
    "mellum": {"layer_types": [SWA, FULL] * 2},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 8},
    "minimax": {"head_dim": 16, "block_size": 8, "layer_types": [FULL, LINEAR] * 2},
    "minimax_m3_vl_text": {
        "layer_types": [FULL, "minimax_m3_sparse"] * 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "mistral_large4_text": {
        **LATENT,
        "num_hidden_layers": 6,
        "no_rope_layers": [1, 0, 1, 0, 1, 1],
        "kv_source_layers": [0, 1, 0, 1, 4, 4],
        "indexer_types": ["full", "full", "shared", "full", "full", "shared"],
    },
    "mistral4": {"num_key_value_heads": 4},
    "modernbert-decoder": {"local_attention": 16, "cls_token_id": 0, "sep_token_id": 0, **TOKENS},
    "nemotron_h": {
        "layers_block_type": ["mlp", LINEAR, FULL, LINEAR],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 8,
    },
    "olmo_hybrid": {"linear_num_value_heads": 2, "num_key_value_heads": 4},
    "paddleocr_vl_text": {**mrope(4, 4, 4), **TOKENS},
    "qwen2_5_omni_text": QWEN_VL,
    "qwen2_5_vl_text": QWEN_VL,
    "qwen2_vl_text": QWEN_VL,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 4},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3_moe": {"use_sliding_window": True},
    "qwen3_omni_moe_text": {**mrope(2, 3, 3), "sliding_window": None},
    "qwen3_vl_moe_text": {"sliding_window": None},
    "smollm3": {"use_sliding_window": True},
    "step3p5": {
        **TOKENS,
        "layer_types": [SWA, FULL, SWA, SWA],
        "num_sliding_attention_heads": 8,
    },
    "zamba": {
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "layers_block_type": [LINEAR, LINEAR, "hybrid", LINEAR, LINEAR, "hybrid"],
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "zamba2": {
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "num_mem_blocks": 1,
        "num_key_value_heads": 4,
        "chunk_size": 8,
        "layers_block_type": [LINEAR, "hybrid"] * 2,
    },
}


def changes(model: str) -> dict[str, Any]:
    """The fields of a tiny config that differ from transformers' defaults."""
    held = transformers.AutoConfig.for_model(model).to_dict()
    if model in WRAPPERS:
        text = held["text_config"].get("model_type", WRAPPERS[model])
        own = text if text in TYPES else model
        return {"text_config": _changes(held["text_config"], own)}
    return _changes(held, model)


def _changes(held: dict[str, Any], model: str) -> dict[str, Any]:
    fields = {**{n: v for n, v in SIZES.items() if n in held}, **CHANGES.get(model, {})}
    return {name: value for name, value in fields.items() if value is not ...}


@lru_cache(maxsize=8)
def tiny(model: str) -> Any:
    """A random float32 model."""
    return made(model, changes(model))


def made(model: str, fields: dict[str, Any]) -> Any:
    """A random float32 model with these fields."""
    config = transformers.AutoConfig.for_model(model, **fields)
    torch.manual_seed(7)
    if model in CLASSES:
        module, _, name = CLASSES[model].rpartition(".")
        found = getattr(import_module(f"transformers.models.{module}"), name)
        return found._from_config(config, dtype=torch.float32).eval()
    kind = transformers.AutoModel if model in TEXTS else transformers.AutoModelForCausalLM
    return kind.from_config(config, dtype=torch.float32).eval()


def own_cache(model: Any) -> Any:
    """transformers' own cache."""
    if model.config.model_type == "minimax":
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        return MiniMaxCache()
    return transformers.DynamicCache(config=model.config)


@torch.no_grad()
def run(model: Any, cache: Any, ids: torch.Tensor, chunks: tuple[int, ...]) -> list[torch.Tensor]:
    """Logits of each chunk of the ids; of a text model without a head, its hidden states."""
    names = inspect.signature(model.forward).parameters
    name = "cache_params" if "cache_params" in names else "past_key_values"
    parts = torch.split(ids, chunks, dim=1)
    more = {name: cache, "use_cache": True}
    if model.config.model_type == "voxtral_realtime_text":  # the delay of the transcription
        more["t_cond"] = torch.linspace(-1, 1, model.config.hidden_size)[None]
    said = [model(input_ids=part, **more) for part in parts]
    return [each.logits if "logits" in each else each.last_hidden_state for each in said]


def kept(cache: Any, number: int, tokens: int, unread: int = 1) -> tuple[int, int, int, int]:
    """What a layer of transformers' cache keeps after `tokens` tokens: elements of each token that
    it keeps for ever, elements of each token in its window, tokens in the window, and elements that
    it keeps once, less the `unread` first taps of a convolution, on which no output depends.
    """
    layer = cache.layers[number] if number < len(cache.layers) else None
    held = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys", "idx_keys")]
    rows = [x.reshape(1, -1, *x.shape[-2:]) for x in held if x is not None and x.numel()]
    full = sum(x.shape[1] * x.shape[3] for x in rows if x.shape[2] == tokens)
    windowed = [x for x in rows if x.shape[2] < tokens]
    length = {x.shape[2] for x in windowed} or {0}
    assert len(length) == 1
    once = [x[..., unread:] for x in getattr(layer, "conv_states", {}).values() if x is not None]
    once += [x for x in getattr(layer, "recurrent_states", {}).values() if x is not None]
    lightning = getattr(cache, "linear_cache", [])
    once += [x for x in lightning[number : number + 1] if len(x)]
    swa = sum(x.shape[1] * x.shape[3] for x in windowed)
    return full, swa, length.pop(), sum(x.numel() for x in once)
