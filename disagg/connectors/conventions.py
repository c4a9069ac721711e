"""What two serving engines must agree on beside bytes, from a model's configuration.

Each connector makes this document for its endpoints (`conventions=`), which compare it at hello:
a name that both sides fill in with different values is a refusal. So fill in what is known, also
where it is "none".
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg.protocol.messages import MAX_CONVENTION, Convention
from kvpool.layout.text import is_printable

FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim",
    "hidden_act", "rms_norm_eps", "layer_norm_epsilon", "attention_bias", "qk_norm",
    "use_qk_norm", "sliding_window", "layer_types", "attention_chunk_size",
    "attn_logit_softcapping", "query_pre_attn_scalar", "kv_lora_rank", "q_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim", "index_n_heads", "index_topk",
    "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset", "indexer_types",
    "num_experts", "n_routed_experts", "num_local_experts", "num_experts_per_tok",
    "linear_conv_kernel_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "mamba_d_conv",
    "mamba_n_heads", "mamba_d_head", "ssm_state_size", "state_size", "conv_kernel",
    "rope_interleave",
)  # fmt: skip
"""Fields that decide what state means, which are no paths, dtypes, lengths, token ids, versions."""
SAMPLE_BYTES = 1 << 16
_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")


def conventions(
    config: Any,
    *,
    revision: str | None = None,
    folder: str | Path | None = None,
    quantization: str | None = None,
    rope_style: str | None = None,
    index_keys: str | None = None,
    compressor_scores: str | None = None,
) -> dict[str, Convention]:
    """The document of a model, from a Hugging Face configuration: a mapping, or an object with
    `to_dict()`; of one with a `text_config` that part.

    `revision` is the model's commit; `folder` where its weights lie, if that is local. They are
    left out where they are not known, as is `rope_style` ("neox": halves are rotated together,
    "interleaved": neighbours). `quantization` of the weights: None is what the configuration says.
    `index_keys`, of a model that has any: "plain" or "hadamard". `compressor_scores`, which
    DeepSeek-V4 keeps of tokens that are not yet compressed: "biased" by their places, or "plain".
    """
    fields = _fields(config)
    whole, fields = fields, _fields(fields.get("text_config") or fields)
    values = {"model": fields.get("model_type")} | {name: fields.get(name) for name in FIELDS}
    values |= _rope(fields)
    quantized = _fields(whole.get("quantization_config") or fields.get("quantization_config") or {})
    values["quantization"] = quantization or quantized.get("quant_method") or "none"
    values["index_keys"] = index_keys if fields.get("index_head_dim") else "none"
    compresses = fields.get("compress_ratios") or fields.get("compress_rates")
    values["compressor_scores"] = compressor_scores if compresses else None
    values |= {"rope_style": rope_style, "revision": revision}
    if folder is not None:
        commit = _COMMIT.search(Path(folder).as_posix())
        values["revision"] = revision or (commit[1] if commit else None)
        values["weights"] = weights_digest(folder)
    return {name: _short(value) for name, value in values.items() if value is not None}


def weights_digest(folder: str | Path) -> str | None:
    """Of the names, sizes, and first and last 64 KiB of a folder's safetensors files, or None."""
    files = sorted(Path(folder).glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(SAMPLE_BYTES))
            stream.seek(max(0, size - SAMPLE_BYTES))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32] if files else None


def _fields(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    return dict(config.to_dict() if hasattr(config, "to_dict") else vars(config))


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding in one form, from `rope_parameters` or fields of its own."""
    rope = dict(fields.get("rope_scaling") or {}) | dict(fields.get("rope_parameters") or {})
    older = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or older or "default"
    names = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
    values = {name: rope.pop(name, fields.get(name)) for name in names}
    return values | {"rope": kind, "rope_parameters": rope}


def _short(value: Any) -> Convention:
    """A value as it is sent: what is no number or short text as JSON, or its digest."""
    text: Convention = value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    if isinstance(text, str) and (len(text) > MAX_CONVENTION or not is_printable(text)):
        return "sha256 " + hashlib.sha256(text.encode()).hexdigest()[:32]
    return text
