"""Model types: the pool that each needs, read from its config.

Fields are those of published config.json files, and those that transformers (5.17) writes for the
same models; both are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvpool.models.config import Fields
from kvpool.pools.base import KVPool
from kvpool.pools.dsv4 import DSv4Pool
from kvpool.pools.hybrid_linear import HybridLinearPool
from kvpool.pools.kinds import MHA, MLA, gated_delta_net, kda
from kvpool.pools.mha import MHAPool
from kvpool.pools.mla import MLAPool
from kvpool.pools.nsa import NSAPool
from kvpool.pools.swa import SWAPool

Need = tuple[type[KVPool], dict[str, Any]]  # a pool class and its own arguments
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
INDEXED = "indexed_attention", "deepseek_sparse_attention"
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def _llama(fields: Fields) -> Need:
    """Without num_key_value_heads, as in the first llama configs: multi-head attention."""
    heads = fields.whole_or("num_key_value_heads", 0) or fields.whole("num_attention_heads")
    return MHAPool, {"num_kv_heads": heads, "head_dim": _head_dim(fields)}


def _mistral(fields: Fields) -> Need:
    """A window on all layers, unless layer_types names some."""
    windowed = _typed(fields, SLIDING)
    if windowed is None:
        windowed = range(fields.num_layers) if fields.has("sliding_window") else ()
    return _windowed(fields, _heads(fields), windowed)


def _qwen3(fields: Fields) -> Need:
    """Without layer_types, use_sliding_window is a window on the layers from max_window_layers."""
    heads, windowed = _heads(fields, fields.whole("head_dim")), _typed(fields, SLIDING)
    if windowed is None:
        used = fields.flag("use_sliding_window")
        windowed = range(fields.whole("max_window_layers", 0), fields.num_layers) if used else ()
    return _windowed(fields, heads, windowed)


def _qwen3_moe(fields: Fields) -> Need:
    """As qwen3, but head_dim may be absent, and transformers windows all layers."""
    heads, windowed = _heads(fields), _typed(fields, SLIDING)
    if windowed is None:
        windowed = range(fields.num_layers) if fields.flag("use_sliding_window") else ()
        if windowed and fields.has("max_window_layers") and fields.whole("max_window_layers", 0):
            raise ValueError(
                f"{fields.model} config: engines disagree on max_window_layers with "
                "use_sliding_window. Give layer_types instead."
            )
    return _windowed(fields, heads, windowed)


def _gpt_oss(fields: Fields) -> Need:
    heads = _heads(fields, fields.whole("head_dim"))
    return _windowed(fields, heads, _where(_types(fields, (FULL, SLIDING)), SLIDING))


def _gemma3(fields: Fields) -> Need:
    """The published 4B, 12B and 27B configs leave out the defaults of transformers'
    Gemma3TextConfig: 4 KV heads of 256, full attention on every 6th layer.
    """
    if fields.flag("use_bidirectional_attention"):
        raise fields.wrong("use_bidirectional_attention", "false (an encoder has no KV state)")
    heads = MHA(fields.whole_or("num_key_value_heads", 4), fields.whole_or("head_dim", 256))
    windowed = _typed(fields, SLIDING)
    if windowed is None:
        every = fields.whole_or("sliding_window_pattern", 6)
        windowed = [n for n in range(fields.num_layers) if (n + 1) % every]
    return _windowed(fields, heads, windowed)


def _deepseek_v3(fields: Fields) -> Need:
    return MLAPool, _latent(fields)


def _deepseek_v32(fields: Fields) -> Need:
    """Index keys on all layers, or on those of indexer_types "full": the others reuse the indices
    of the last full layer and have no keys.
    """
    held: tuple[int, ...] = tuple(range(fields.num_layers))
    if fields.has("indexer_types"):
        held = _where(fields.each("indexer_types", ("full", "shared"), len(held)), "full")
    elif fields.whole_or("index_topk_freq", 1) > 1 or fields.has("index_topk_pattern"):
        raise fields.wrong("indexer_types", "a list of 'full' or 'shared', one for each layer")
    elif fields.has("layer_types"):
        held = _where(_types(fields, (*INDEXED, FULL)), *INDEXED)
    return NSAPool, {**_indexed(fields), "index_layers": held}


def _deepseek_v4(fields: Fields) -> Need:
    """Ratios by layer: compress_ratios (published configs; draft layers follow), or layer_types
    with compress_rates (transformers).
    """
    count, found = fields.num_layers, []
    if fields.has("layer_types"):
        found.append(_rated(fields))
    if fields.has("compress_ratios") or not found:
        found.append(_ratios(fields)[:count])
    if len(found) > 1 and found[0] != found[1]:
        raise fields.wrong("compress_ratios", "equal to layer_types with compress_rates")
    return DSv4Pool, {**_compressed(fields), "compress_ratios": found[0]}


def _qwen3_next(fields: Fields) -> Need:
    linear = _typed(fields, LINEAR)
    if linear is None:
        every = fields.whole("full_attention_interval")
        linear = [n for n in range(fields.num_layers) if (n + 1) % every]
    state = gated_delta_net(
        k_heads=fields.whole("linear_num_key_heads"),
        v_heads=fields.whole("linear_num_value_heads"),
        k_dim=fields.whole("linear_key_head_dim"),
        v_dim=fields.whole("linear_value_head_dim"),
        kernel=fields.whole("linear_conv_kernel_dim", 2),
    )
    full = _heads(fields, fields.whole("head_dim"))
    return HybridLinearPool, {"full": full, "linear": state, "linear_layers": tuple(linear)}


def _kimi_linear(fields: Fields) -> Need:
    """Published configs count layers from 1 in linear_attn_config."""
    linear, names = _typed(fields, LINEAR), ("linear_num_heads", "linear_head_dim")
    given, kernel = fields, "linear_conv_kernel_dim"
    if fields.has("linear_attn_config") or not fields.has(names[0]):
        given, names = fields.inner("linear_attn_config"), ("num_heads", "head_dim")
        kernel = "short_conv_kernel_size"
    if linear is None:
        inner, numbers = fields.inner("linear_attn_config"), range(1, fields.num_layers + 1)
        kinds = inner.subset("kda_layers", numbers), inner.subset("full_attn_layers", numbers)
        if sorted((*kinds[0], *kinds[1])) != [*numbers]:
            every = f"a list of the layers from 1 to {len(numbers)} that kda_layers leave out"
            raise inner.wrong("full_attn_layers", every)
        linear = [n - 1 for n in kinds[0]]
    state = kda(given.whole(names[0]), given.whole(names[1]), given.whole(kernel, 2))
    full = MLA(**_latent(fields), rope_pairs=False)
    return HybridLinearPool, {"full": full, "linear": state, "linear_layers": tuple(linear)}


def _deepseek_v3_draft(fields: Fields, layers: range) -> Need:
    return MLAPool, _latent(fields)


def _deepseek_v32_draft(fields: Fields, layers: range) -> Need:
    """The draft layers have index keys."""
    return NSAPool, {**_indexed(fields), "index_layers": tuple(layers)}


def _deepseek_v4_draft(fields: Fields, layers: range) -> Need:
    """The window only, unless compress_ratios has entries for the draft's layers."""
    ratios: tuple[int, ...] = _deepseek_v4(fields)[1]["compress_ratios"]
    further = _ratios(fields)[len(ratios) :] if fields.has("compress_ratios") else ()
    if further and len(further) != len(layers):
        least, most = layers.start, layers.stop
        raise ValueError(
            f"{fields.model} config: compress_ratios must have {least} entries, or {most} with the "
            f"draft's, got {least + len(further)}."
        )
    ratios += further or (0,) * len(layers)
    return DSv4Pool, {**_compressed(fields), "compress_ratios": ratios}


def _qwen3_next_draft(fields: Fields, layers: range) -> Need:
    """Full attention."""
    heads = fields.whole("num_key_value_heads"), fields.whole("head_dim")
    return MHAPool, {"num_kv_heads": heads[0], "head_dim": heads[1]}


TARGETS: dict[str, Callable[[Fields], Need]] = {
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "deepseek_v4": _deepseek_v4,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "kimi_linear": _kimi_linear,
    "llama": _llama,
    "ministral": _mistral,
    "mistral": _mistral,
    "mixtral": _mistral,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
}
DRAFTS: dict[str, Callable[[Fields, range], Need]] = {
    "deepseek_v3": _deepseek_v3_draft,
    "deepseek_v32": _deepseek_v32_draft,
    "deepseek_v4": _deepseek_v4_draft,
    "qwen3_next": _qwen3_next_draft,
}


def _head_dim(fields: Fields) -> int:
    if fields.has("head_dim"):
        return fields.whole("head_dim")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if hidden % heads:
        raise fields.wrong("head_dim", f"given: {heads} heads do not divide {hidden}")
    return hidden // heads


def _heads(fields: Fields, head_dim: int = 0) -> MHA:
    return MHA(fields.whole("num_key_value_heads"), head_dim or _head_dim(fields))


def _windowed(fields: Fields, heads: MHA, windowed: Sequence[int]) -> Need:
    if not windowed:
        return MHAPool, {"num_kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim}
    window = _window(fields)
    return SWAPool, {"full": heads, "window_layers": tuple(windowed), "window": window}


def _window(fields: Fields) -> int:
    """How many tokens before it a token sees: a model's window counts the token too."""
    return fields.whole("sliding_window", 2) - 1


def _types(fields: Fields, allowed: Sequence[str]) -> tuple[str, ...]:
    return fields.each("layer_types", allowed, fields.num_layers)


def _where(types: Sequence[str], *wanted: str) -> tuple[int, ...]:
    return tuple(n for n, name in enumerate(types) if name in wanted)


def _typed(fields: Fields, wanted: str) -> Sequence[int] | None:
    """Layers of type `wanted` (all others are full); None where there are no layer_types."""
    if not fields.has("layer_types"):
        return None
    return _where(_types(fields, (FULL, wanted)), wanted)


def _latent(fields: Fields) -> dict[str, int]:
    return {name: fields.whole(name) for name in ("kv_lora_rank", "qk_rope_head_dim")}


def _indexed(fields: Fields) -> dict[str, int]:
    return {**_latent(fields), "index_head_dim": fields.whole("index_head_dim")}


def _compressed(fields: Fields) -> dict[str, Any]:
    """DSv4Pool's arguments other than the ratios; rope is a size, or a fraction of head_dim."""
    head_dim = fields.whole("head_dim", 2)
    if fields.has("partial_rotary_factor") and not fields.has("qk_rope_head_dim"):
        part = fields.values["partial_rotary_factor"]
        whole = type(part) is float and 0 < part < 1 and (part * head_dim).is_integer()
        if not whole:
            raise fields.wrong("partial_rotary_factor", f"a whole part of head_dim, {head_dim}")
        rope = int(part * head_dim)
    else:
        rope = fields.whole("qk_rope_head_dim", 1, head_dim - 1)
    return {
        "latent_dim": head_dim - rope,
        "qk_rope_head_dim": rope,
        "index_head_dim": fields.whole("index_head_dim"),
        "overlap_ratio": _rate(fields, SPARSE) if fields.has("layer_types") else 4,
        "window": _window(fields),
    }


def _rate(fields: Fields, name: str) -> int:
    return fields.inner("compress_rates").whole(name, 2)


def _rated(fields: Fields) -> tuple[int, ...]:
    rates = {SLIDING: 0, SPARSE: _rate(fields, SPARSE), HEAVY: _rate(fields, HEAVY)}
    if rates[SPARSE] == rates[HEAVY]:
        raise fields.wrong("compress_rates", f"two rates that differ for {SPARSE} and {HEAVY}")
    return tuple(rates[name] for name in _types(fields, (SLIDING, SPARSE, HEAVY)))


def _ratios(fields: Fields) -> tuple[int, ...]:
    held = fields.values.get("compress_ratios")
    if not isinstance(held, (list, tuple)) or len(held) < fields.num_layers:
        raise fields.wrong("compress_ratios", f"{fields.num_layers} numbers or more, one a layer")
    return fields.each("compress_ratios", (0, 4, 128), len(held))
