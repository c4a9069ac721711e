"""`python -m tests.engines.vllm.models FOLDER NAME...`: tiny models with random weights, saved; of
names in `drafts.METHODS` the heads of `llama_shallow`.

Weights are scaled up where that keeps greedy decoding from being a lottery of rounding: logits that
lie far apart. MLA's are not: with them one engine alone disagrees with itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    FalconH1Config,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
)

from tests.engines.vllm import deepseek_v4, drafts, pictures

VOCABULARY = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "num_hidden_layers": 4,
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, **COMMON}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2, "intermediate_size": 512}


def llama() -> PreTrainedConfig:
    """Four layers of full attention, 4 KV heads of 32."""
    sizes = {**HEADS, "num_key_value_heads": 4, "head_dim": 32}
    return LlamaConfig(**sizes, intermediate_size=512, tie_word_embeddings=False)


def llama_other_rope() -> PreTrainedConfig:
    """The same state, whose keys are rotated otherwise."""
    config = llama()
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
    return config


def llama_other_weights() -> PreTrainedConfig:
    """Another seed (`SEEDS`)."""
    return llama()


def llama_wide() -> PreTrainedConfig:
    """Sixteen layers, 8 KV heads of 64: 32 KiB of state a token in bfloat16."""
    config = llama()
    config.num_hidden_layers, config.num_key_value_heads, config.head_dim = 16, 8, 64
    return config


def llama_heavy() -> PreTrainedConfig:
    """118 million weights, and 4 KiB of state a token: as much of a weight as Qwen2.5-0.5B has."""
    config = llama()
    config.num_hidden_layers, config.num_key_value_heads, config.head_dim = 8, 2, 64
    config.hidden_size, config.intermediate_size, config.num_attention_heads = 1024, 4096, 16
    return config


def idefics3() -> PreTrainedConfig:
    """`llama`, with eyes."""
    return pictures.sees(llama())


def llama_shallow() -> PreTrainedConfig:
    """One layer does the work (`drafts`)."""
    return llama()


def deepseek_v3() -> PreTrainedConfig:
    """Three layers of latent attention, two of them with experts."""
    latents = {"q_lora_rank": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    return DeepseekV3Config(
        **{**COMMON, "num_hidden_layers": 3},
        **EXPERTS,
        **latents,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        qk_nope_head_dim=128,
        v_head_dim=128,
        topk_method="noaux_tc",  # vLLM reads it, transformers does not save it by itself
        scoring_func="sigmoid",
    )


def deepseek_mtp() -> PreTrainedConfig:
    """All layers with experts, and a module that predicts a token more."""
    config = deepseek_v3()
    config.first_k_dense_replace, config.num_nextn_predict_layers = 0, 1
    return config


def gpt_oss() -> PreTrainedConfig:
    """Windows of 128 and full attention in turns, with sinks."""
    layers = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256}
    return GptOssConfig(**HEADS, **layers, **experts)


def gemma3() -> PreTrainedConfig:
    """Three layers of windows of 128, one of full attention."""
    types = ["sliding_attention"] * 3 + ["full_attention"]
    return Gemma3TextConfig(**HEADS, intermediate_size=512, sliding_window=128, layer_types=types)


def qwen3_next() -> PreTrainedConfig:
    """Three layers of gated delta nets, one of full attention."""
    return Qwen3NextConfig(
        **{**HEADS, "num_attention_heads": 4},
        **EXPERTS,
        shared_expert_intermediate_size=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=8,
        decoder_sparse_step=1,
    )


def falcon_h1() -> PreTrainedConfig:
    """Attention and Mamba-2 in each layer."""
    states = {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 2}
    sizes = {**HEADS, "mamba_d_state": 32, "intermediate_size": 512}
    return FalconH1Config(**sizes, **states, mamba_d_conv=4, mamba_chunk_size=64)


def lfm2() -> PreTrainedConfig:
    """Two short convolutions and two layers of full attention, in turns."""
    types = ["conv", "full_attention"] * 2
    sizes = {name: value for name, value in HEADS.items() if name != "head_dim"}
    config = Lfm2Config(
        **sizes, intermediate_size=512, layer_types=types, block_auto_adjust_ff_dim=False
    )
    # its checkpoints say so
    config.conv_dim = config.conv_dim_out = config.block_dim = config.hidden_size
    config.block_ff_dim = config.intermediate_size
    return config


def qwen3_next_mtp() -> PreTrainedConfig:
    """With a module that predicts a token more."""
    config = qwen3_next()
    config.num_nextn_predict_layers = 1
    return config


SCALES = {
    "lfm2": 1.0,
    "deepseek_v3": 1.0,
    "deepseek_mtp": 1.0,
    "qwen3_next": 1.5,
    "qwen3_next_mtp": 1.5,
}
"""Of weights, where 3 is too much."""
SEEDS = {"llama_other_weights": 1}
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    made.__name__: made
    for made in (
        *(llama, llama_other_rope, llama_other_weights, llama_wide, llama_heavy, llama_shallow),
        idefics3,
        *(deepseek_v3, deepseek_mtp),
        *(gpt_oss, gemma3, qwen3_next, qwen3_next_mtp, falcon_h1, lfm2, deepseek_v4.deepseek_v4),
    )
}


def save(name: str, folder: Path) -> Path:
    """Makes a model once; returns its folder."""
    place = folder / name
    if name in drafts.METHODS:
        return drafts.save_head(name, save("llama_shallow", folder), place)
    if (place / "config.json").exists():
        return place
    torch.manual_seed(SEEDS.get(name, 0))
    config = MODELS[name]()
    auto = AutoModelForImageTextToText if name == "idefics3" else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16).eval()
    scale = SCALES.get(name, 3.0)
    with torch.no_grad():
        for weight, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not {"embed_tokens", "lm_head"} & {*weight.split(".")}:
                parameter.mul_(scale)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    if name == "idefics3":
        words = {w: n for w, n in words.items() if n not in pictures.WORDS.values()}
        words |= pictures.WORDS
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w1", eos_token="w2", pad_token="w3", unk_token="w0"
    )
    fast.save_pretrained(place)
    if name == "idefics3":
        pictures.save_processor(fast, place)
    model.save_pretrained(place)
    drafts.finish(name, place)
    if name == "deepseek_v4":
        deepseek_v4.finish(place)
    return place


if __name__ == "__main__":
    for wanted in sys.argv[2:] or MODELS:
        print(save(wanted, Path(sys.argv[1])))
