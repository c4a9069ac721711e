"""Model types with keys and values, and rules for what a config does not say; the table of all.

Fields are those of published config.json files, and those that transformers (5.23) writes for the
same models; both are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvpool.layout.formats import MHA, IndexKey
from kvpool.models import layer_types
from kvpool.models.config import Fields
from kvpool.models.latents import FAMILIES as LATENT_FAMILIES, deepseek_v4, deepseek_v4_draft
from kvpool.models.layer_types import CHUNKED, FULL, SLIDING, all_windowed, every, last_full
from kvpool.models.linear import FAMILIES as LINEAR_FAMILIES
from kvpool.models.rules import (
    BOTH,
    HEAD_DIM,
    HEADS,
    ONLY_DIM,
    ONLY_HEADS,
    Declaration,
    Family,
    LayerStates,
    grouped,
    head_dim,
    heads,
    window_state,
)
from kvpool.pools.states import State

PATTERN, SHARED = "sliding_window_pattern", "num_kv_shared_layers"


def _mimo_v2_flash(fields: Fields, name: str) -> LayerStates:
    """Window layers have twice the KV heads, unless swa_num_key_value_heads says otherwise."""
    # the chunk size is published, and read by no engine
    fields.ignore("attention_chunk_size", "hybrid_layer_pattern")
    full = heads(fields, fields.whole("v_head_dim"))
    count = fields.whole_or(f"swa_{HEADS}", 2 * full.num_kv_heads)
    dim = fields.whole_or("swa_head_dim", full.head_dim)
    v_dim = fields.whole_or("swa_v_head_dim", full.v_head_dim or full.head_dim)
    if name == FULL:
        return window_state(fields, name, full)
    swa = MHA(count, dim, None if v_dim == dim else v_dim)
    if fields.has("sliding_window_size"):  # without the current token
        return (State(swa, fields.whole("sliding_window_size")),)
    return window_state(fields, name, swa)


def _step3p5(fields: Fields, name: str) -> LayerStates:
    """Published configs name KV heads num_attention_groups. Window layers may have other query
    heads; transformers gives them the KV heads of the other layers.
    """
    groups, setting = "num_attention_groups", "attention_other_setting"
    fields.ignore("num_sliding_attention_heads")
    if fields.has(groups):
        count = fields.whole(groups)
        if fields.has(HEADS) and fields.get(HEADS) != count:
            raise fields.wrong(groups, f"{HEADS}, {fields.get(HEADS)}")
        fields = replace(fields, values={**fields.values, HEADS: count})
    full = heads(fields)
    own = fields.inner(setting) if fields.has(setting) else replace(fields, values={})
    for field, size in ((groups, full.num_kv_heads), (HEAD_DIM, full.head_dim)):
        if own.has(field) and own.get(field) != size:
            raise own.wrong(field, f"{size}, as on layers without a window")
    return window_state(fields, name, full)


def _gemma3(fields: Fields, name: str) -> LayerStates:
    """The published 4B, 12B and 27B configs leave out the defaults of transformers'
    Gemma3TextConfig: 4 KV heads of 256.
    """
    kind = MHA(fields.whole_or(HEADS, 4), fields.whole_or(HEAD_DIM, 256))
    return window_state(fields, name, kind)


def _gemma4(fields: Fields, name: str) -> LayerStates:
    """Full layers have heads of their own: per_layer_config, or the published global_ fields."""
    kind, count = heads(fields), "num_global_key_value_heads"
    fields.ignore("global_head_dim", count)
    alike = fields.flag("attention_k_eq_v")  # without it the global heads are not read
    if name == FULL and not fields.has("per_layer_config"):
        kind = replace(kind, head_dim=fields.whole_or("global_head_dim", 512))
        if alike and fields.has(count):
            kind = replace(kind, num_kv_heads=fields.whole(count))
    return window_state(fields, name, kind)


def _unshared(fields: Fields, layers: list[LayerStates]) -> list[LayerStates]:
    """The last num_kv_shared_layers read the keys of earlier layers and keep none."""
    shared = fields.whole(SHARED, 0, len(layers) - 1) if fields.needed(SHARED) else 0
    return [() if n >= len(layers) - shared else layer for n, layer in enumerate(layers)]


def _falcon(fields: Fields, name: str) -> LayerStates:
    """One KV head, or all: transformers repeats those of the new architecture for every head."""
    count = fields.whole(fields.named("num_attention_heads"))
    single = fields.get("multi_query") is not False
    fields.ignore("num_kv_heads")
    if not fields.flag("new_decoder_architecture"):
        count = 1 if single else fields.whole_or("num_kv_heads", count)
    return (State(MHA(count, head_dim(fields))),)


def _gpt_bigcode(fields: Fields, name: str) -> LayerStates:
    """One KV head unless multi_query is false."""
    count = fields.whole(fields.named("num_attention_heads"))
    fields.ignore(HEADS)
    single = fields.get("multi_query") is not False
    return (State(MHA(1 if single else count, head_dim(fields))),)


def _dbrx(fields: Fields, name: str) -> LayerStates:
    """KV heads are in attn_config."""
    fields.ignore(HEADS)
    count = fields.inner("attn_config").whole("kv_n_heads")
    return (State(MHA(count, head_dim(fields))),)


def _jetmoe(fields: Fields, name: str) -> LayerStates:
    """The dim of a head is kv_channels."""
    return (State(MHA(fields.whole(HEADS), fields.whole("kv_channels"))),)


def _mpt(fields: Fields, name: str) -> LayerStates:
    """Queries are not grouped."""
    if fields.has("attn_config"):
        inner = fields.inner("attn_config")
        if inner.get("attn_type") not in (None, "multihead_attention"):
            raise inner.wrong("attn_type", "'multihead_attention'")
    return grouped(fields, name)


def _gpt_neo(fields: Fields, name: str) -> LayerStates:
    """Local layers keep all tokens: transformers masks those that are too far."""
    fields.ignore("attention_types", "attention_layers", "window_size")
    return grouped(fields, name)


def _modernbert(fields: Fields, name: str) -> LayerStates:
    """A window of half of local_attention: an encoder sees the other half after a token."""
    fields.ignore("local_attention")
    if name == FULL or fields.has("sliding_window"):
        return grouped(fields, name)
    return (State(heads(fields), fields.whole("local_attention", 4) // 2 - 1),)


def _minimax_m3(fields: Fields, name: str) -> LayerStates:
    """Sparse layers have an indexer's key beside K and V."""
    fields.ignore("index_head_dim")
    attention = State(heads(fields))
    if name == FULL:
        return (attention,)
    return attention, State(IndexKey(fields.whole("index_head_dim")))


def _cycles(fields: Fields) -> int:
    """Layers run several times, each time with keys of their own."""
    stack = "num_layers_per_stack"
    layers = fields.whole(stack) if fields.has(stack) else fields.num_layers
    fields.ignore("L_bp_cycles")
    return layers * fields.whole("H_cycles") * (fields.whole("L_cycles") + 1)


_FAMILIES = {  # by types that are read alike
    # KV heads default to heads and head_dim to hidden_size / heads
    "apertus arcee aria_text cohere diffllama flex_olmo granite granite4_vision_text "
    "granitemoe granitemoeshared hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text hyperclovax "
    "jais2 llama nanochat nemotron olmo olmo2 olmoe phi": Family(grouped),
    "chameleon cohere_compass_text deepseek_ocr2_text": Family(grouped, ignores=ONLY_DIM),
    "biogpt bloom codegen ctrl gpt-sw3 gpt2 gpt_neox gpt_neox_japanese gptj "
    "kosmos_2_5_text_model kosmos_2_text_model opt persimmon xglm": Family(grouped, ignores=BOTH),
    "bitnet emu3_text_model ernie4_5_moe ernie4_5_vl_moe_text glm4_moe glm4v_moe_text "
    "glm4v_text glm_image_text glm_ocr_text granite_docling_text qwen3_omni_moe_text "
    "qwen3_vl_moe_text": Family(grouped, needs=ONLY_HEADS),
    "stablelm": Family(grouped, needs=ONLY_HEADS, ignores=ONLY_DIM),
    "cosmos3_edge_text ernie4_5 gemma glm glm4 helium hy_v3 internlm3 iquestcoder laguna "
    "mellum minimax_m2 molmo2_text paddleocr_vl_text qwen3_vl_text seed_oss solar_open": Family(
        grouped, needs=BOTH
    ),
    "cohere2": Family(grouped, every(4, PATTERN)),
    "doge phi3": Family(grouped, all_windowed),
    "mixtral phi4_multimodal phimoe starcoder2": Family(grouped, all_windowed, needs=ONLY_HEADS),
    "ministral mistral": Family(grouped, layer_types.given_window, needs=ONLY_HEADS),
    "qwen2 qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text": Family(
        grouped, layer_types.from_max_window_layers, needs=ONLY_HEADS
    ),
    "gemma2 vaultgemma": Family(grouped, every(2), needs=BOTH),
    "exaone4 exaone_moe": Family(grouped, layer_types.exaone, needs=ONLY_HEADS),
    "gpt_oss muse_glimmer_text muse_spark_text": Family(grouped, layer_types.listed, needs=BOTH),
    "gemma4_text gemma4_unified_text": Family(
        _gemma4, last_full(every(6)), also=_unshared, needs=BOTH
    ),
    "afmoe": Family(grouped, every(4, "global_attn_every_n_layers"), needs=ONLY_DIM),
    "beam": Family(grouped, last_full(every(6)), needs=BOTH),
    "cohere2_moe": Family(grouped, layer_types.listed, needs=ONLY_DIM),
    "cwm": Family(grouped, every(4, offset=0), needs=BOTH),
    "dbrx": Family(_dbrx, ignores=ONLY_DIM),
    "dots1": Family(grouped, layer_types.by_window, needs=ONLY_HEADS),
    "falcon": Family(_falcon, ignores=ONLY_DIM),
    "flint": Family(grouped, layer_types.flint, needs=BOTH),
    "gemma3_text": Family(_gemma3, every(6, PATTERN)),
    "gemma3n_text": Family(grouped, every(5), also=_unshared, needs=BOTH | {SHARED}),
    "gpt_bigcode": Family(_gpt_bigcode, ignores=ONLY_DIM),
    "gpt_neo": Family(_gpt_neo, ignores=BOTH),
    "granite_swa": Family(grouped, every(4, offset=0), needs=ONLY_HEADS),
    "granitemoe_swa": Family(grouped, every(4, offset=0)),
    "hrm_text": Family(grouped, layers=_cycles, needs=ONLY_DIM, ignores=ONLY_HEADS),
    "jetmoe": Family(_jetmoe),
    "kolibri1": Family(grouped, every(5), needs=BOTH),
    "llama4_text": Family(grouped, layer_types.llama4, names=(FULL, SLIDING, CHUNKED), needs=BOTH),
    "mimo_v2_flash": Family(_mimo_v2_flash, layer_types.mimo_v2_flash, needs=BOTH),
    "minimax_m3_vl_text": Family(_minimax_m3, names=(FULL, "minimax_m3_sparse"), needs=BOTH),
    "ministral3": Family(grouped, all_windowed, needs=BOTH),
    "modernbert-decoder": Family(
        _modernbert, every(3, "global_attn_every_n_layers", offset=0), ignores=ONLY_HEADS
    ),
    "mpt": Family(_mpt, ignores=BOTH),
    "olmo3": Family(grouped, every(4)),
    "qwen2_moe": Family(grouped, layer_types.qwen2_moe, needs=ONLY_HEADS),
    "qwen3": Family(grouped, layer_types.from_max_window_layers, needs=BOTH),
    "qwen3_moe": Family(grouped, layer_types.qwen3_moe, needs=ONLY_HEADS),
    "smollm3": Family(grouped, layer_types.smollm3, needs=ONLY_HEADS),
    "step3p5": Family(_step3p5, needs=BOTH),
    "voxtral_realtime_text": Family(grouped, layer_types.given_window, needs=BOTH),
    **LATENT_FAMILIES,
    **LINEAR_FAMILIES,
}
FAMILIES = {name: family for names, family in _FAMILIES.items() for name in names.split()}
TARGETS: dict[str, Callable[[Fields], Declaration]] = {**FAMILIES, "deepseek_v4": deepseek_v4}
DRAFTS: dict[str, Callable[[Fields, range], Declaration]] = {
    **{name: family.drafted for name, family in FAMILIES.items() if family.draft},
    "deepseek_v4": deepseek_v4_draft,
}
# types whose fields are in text_config, and the type of these where it is not given
WRAPPERS = {
    "dots3_note": "dots3_note_text",
    "emu3": "emu3_text_model",
    "fuyu": "persimmon",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "got_ocr2": "qwen2",
    "llama4": "llama4_text",
    "moss_transcribe_diarize": "qwen3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "step3p7": "step3p5",
}
