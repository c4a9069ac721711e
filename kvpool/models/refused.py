"""Model types that transformers can make and that no pool holds, each with the reason.

Refusals of `declare` and docs/models.md both read it here.
"""

from __future__ import annotations

CROSS = "also caches an encoder's keys and values"
ENCODER = f"an encoder; used as a decoder it {CROSS}"
AUDIO = "an audio model and a text model, each with its own cache"
OWN_CACHE = "in a cache class of its own"
GROUPS = {
    CROSS: "bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody "
    "mvp pegasus plbart prophetnet trocr whisper",
    ENCODER: "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert "
    "rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod",
    "a draft model that reads its target's cache and has none of its own": "gemma4_assistant "
    "gemma4_unified_assistant",
    "also caches the 3D positions of all tokens, for its indexer, and ids of tokens, for n-grams": (
        "qwen4_exp qwen4_exp_text"
    ),
    AUDIO: "moshi voxtral_realtime",
    "cross-attention layers cache the keys and values of an image": "mllama mllama_text_model",
    "keeps the tokens of the prompt and a window of later ones, " + OWN_CACHE: "unlimited_ocr "
    "unlimited_ocr_text",
    "its decoder reads the tensors of its encoder's cache, without the cache's methods": (
        "diffusion_gemma diffusion_gemma_text"
    ),
    "a draft model that caches keys and values of its target's hidden states, " + OWN_CACHE: (
        "muse_glimmer_assistant"
    ),
    "a thinker and a talker, each with its own cache; thinker_config is the thinker's": (
        "qwen2_5_omni qwen3_omni_moe"
    ),
    "a model of bytes around a model of patches, each with its own cache": "blt",
    "every forward pass inserts a prompt of 32 entries before the tokens": "cpmant",
    "the entries of an image precede those of the tokens": "git",
    "has no cache": "openai-gpt",
    "keeps its recurrent state in the module, not in a cache object": "recurrent_gemma",
    "caches hidden states, " + OWN_CACHE: "reformer",
    "keeps its state in a list, not in a cache object": "rwkv",
    "takes its cache as `cache`, not as `past_key_values`": "xlm",
    "keeps hidden states (`mems`), no keys and values": "xlnet",
    "keeps its state " + OWN_CACHE: "xlstm",
}
REFUSED = {name: reason for reason, names in GROUPS.items() for name in names.split()}
