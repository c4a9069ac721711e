"""Model types with linear states: convolutions, Mamba, lightning attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvpool.layout import formats
from kvpool.layout.formats import MHA, IndexKey, LinearState
from kvpool.models.config import Fields
from kvpool.models.layer_types import FULL, INDEXED, LINEAR, SLIDING, always, every, listed
from kvpool.models.rules import (
    BOTH,
    HEAD_DIM,
    HEADS,
    ONLY_HEADS,
    Family,
    LayerStates,
    grouped,
    heads,
    indexed,
    latent,
    latent_row,
    window_state,
)
from kvpool.pools.states import State

CONV, HYBRID, HYBRID_SLIDING, NOTHING = "conv", "hybrid", "hybrid_sliding", ("moe", "mlp")
AttentionReader = Callable[[Fields, str], LayerStates]
MAMBA_UNREAD = ("mamba_proj_bias", "mamba_chunk_size", "chunk_size", "use_mamba_kernels")


def beside(
    linear: Callable[[Fields], LinearState], attention: AttentionReader = grouped
) -> AttentionReader:
    """The linear state on layers of types linear_attention and conv, the attention on others, both
    on those of type hybrid, and nothing on moe and mlp.
    """

    def layer(fields: Fields, name: str) -> LayerStates:
        state = (State(linear(fields)),)
        fields.ignore(HEADS, HEAD_DIM)  # also where no layer has attention
        if name in NOTHING:
            return ()
        if name in (LINEAR, CONV):
            return state
        return attention(fields, FULL) + state if name == HYBRID else attention(fields, name)

    return layer


def _gated_delta_net(fields: Fields) -> LinearState:
    return formats.gated_delta_net(
        k_heads=fields.whole("linear_num_key_heads"),
        v_heads=fields.whole("linear_num_value_heads"),
        k_dim=fields.whole("linear_key_head_dim"),
        v_dim=fields.whole("linear_value_head_dim"),
        kernel=fields.whole("linear_conv_kernel_dim", 2),
    )


def _kda(fields: Fields) -> LinearState:
    """Sizes are in linear_attn_config in published configs."""
    sizes, names, kernel = fields, ("linear_num_heads", "linear_head_dim"), "linear_conv_kernel_dim"
    fields.ignore(*names, kernel)
    if fields.has("linear_attn_config") or not fields.has(names[0]):
        sizes, names = fields.inner("linear_attn_config"), ("num_heads", "head_dim")
        kernel = "short_conv_kernel_size"
    return formats.kda(sizes.whole(names[0]), sizes.whole(names[1]), sizes.whole(kernel, 2))


def _bailing(fields: Fields) -> LinearState:
    """transformers writes the names that begin with linear_."""
    fields.ignore(HEAD_DIM, "short_conv_kernel_size", "layer_group_size")
    if fields.has("linear_num_heads"):
        return _kda(fields)
    count, dim = fields.whole("num_attention_heads"), fields.whole(HEAD_DIM)
    return formats.kda(count, dim, fields.whole("short_conv_kernel_size", 2))


def _unrotated(fields: Fields, name: str) -> LayerStates:
    """Kimi-Linear does not rotate its rope key."""
    return (State(replace(latent_row(fields), rope_pairs=False)),)


def _kda_layers(fields: Fields, count: int) -> Sequence[str]:
    """Published configs count layers from 1 in linear_attn_config."""
    inner, numbers = fields.inner("linear_attn_config"), range(1, count + 1)
    kinds = inner.subset("kda_layers", numbers), inner.subset("full_attn_layers", numbers)
    if sorted((*kinds[0], *kinds[1])) != [*numbers]:
        every = f"a list of the layers from 1 to {count} that kda_layers leave out"
        raise inner.wrong("full_attn_layers", every)
    return [LINEAR if n in kinds[0] else FULL for n in numbers]


def _glm5_next(fields: Fields, name: str) -> LayerStates:
    """A latent without a rope key, and what an indexer pools: the keys of index_kpool tokens."""
    fields.ignore("index_kpool", "index_kpool_always_select_tail")
    row = latent_row(fields, rope=range(1))
    return State(row), State(IndexKey(fields.whole("index_head_dim"), pooled=True))


def _mamba2(*names: str) -> Callable[[Fields], LinearState]:
    """Mamba-2, with the names of its heads, their dim, groups, state size and kernel."""
    *sizes, kernel = names

    def state(fields: Fields) -> LinearState:
        fields.ignore(*MAMBA_UNREAD, "mamba_expand", "expand", "mamba_d_ssm")
        if fields.get("mamba_ssm_cache_dtype") not in (None, "float32"):
            raise fields.wrong("mamba_ssm_cache_dtype", "'float32'")
        count, dim, groups, size = map(fields.whole, sizes)
        return formats.mamba2(count, dim, groups, size, fields.whole(kernel, 2))

    return state


BAMBA = _mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
NEMOTRON = _mamba2("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
ZAMBA2 = _mamba2("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv")
MAMBA2 = _mamba2("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")


def _mamba1(expand: str, size: str, kernel: str) -> Callable[[Fields], LinearState]:
    """Mamba-1: channels are hidden_size times `expand`."""

    def state(fields: Fields) -> LinearState:
        fields.ignore(*MAMBA_UNREAD, "mamba_dt_rank", "use_mambapy")
        channels = fields.whole("hidden_size") * fields.whole(expand)
        if expand == "expand":  # elsewhere it is that of the MLP
            channels = fields.whole_or("intermediate_size", channels)
        return formats.mamba1(channels, fields.whole(size), fields.whole(kernel, 2))

    return state


def _zamba(fields: Fields) -> LinearState:
    """Mamba-1 with heads."""
    fields.ignore(*MAMBA_UNREAD, "mamba_dt_rank", "attn_layer_period", "attn_layer_offset")
    wide, count = fields.whole("hidden_size") * fields.whole("mamba_expand"), "n_mamba_heads"
    if wide % fields.whole(count):
        raise fields.wrong(count, f"a divisor of {wide}")
    sections = (("x", fields.whole(count), wide // fields.whole(count)),)
    taps, size = fields.whole("mamba_d_conv", 2) - 1, fields.whole("mamba_d_state")
    return LinearState(sections, taps, fields.whole(count), (sections[0][2], size))


def _inkling(fields: Fields, name: str) -> LayerStates:
    """Attention, and float32 convolutions of its keys, its values, its output and the MLP's."""
    own_fields = fields
    if name == HYBRID_SLIDING:
        own = {n: fields.whole(f"swa_{n}") for n in (HEADS, HEAD_DIM)}
        own_fields = replace(fields, values={**fields.values, **own})
    fields.ignore("swa_num_attention_heads", "local_layer_ids", "number_of_conv_states")
    kernel, hidden = fields.whole("conv_kernel_size", 2), fields.whole("hidden_size")
    kv = heads(own_fields)
    wide = kv.num_kv_heads * kv.head_dim
    convs = [formats.short_conv(channels, kernel) for channels in (wide, wide, hidden, hidden)]
    attention = window_state(fields, SLIDING if name == HYBRID_SLIDING else FULL, kv)
    return attention + tuple(State(conv, dtype="f32") for conv in convs)


def _by_period(fields: Fields, count: int) -> Sequence[str]:
    """Attention on layers attn_layer_offset, attn_layer_offset + attn_layer_period, .."""
    period, offset = fields.whole("attn_layer_period"), fields.whole("attn_layer_offset", 0)
    return [FULL if n % period == offset else LINEAR for n in range(count)]


def _by_indices(name: str, rest: str) -> Callable[[Fields, int], Sequence[str]]:
    """Full attention on the layers that `name` lists."""

    def types(fields: Fields, count: int) -> Sequence[str]:
        full = fields.subset(name, range(count)) if fields.get(name) else ()
        return [FULL if n in full else rest for n in range(count)]

    return types


def _short_conv(fields: Fields) -> LinearState:
    fields.ignore("conv_bias", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "full_attn_idxs")
    return formats.short_conv(fields.whole("hidden_size"), fields.whole("conv_L_cache", 2))


def _as_listed(fields: Fields) -> int:
    """As many as the list of their types has, or hybrid_override_pattern letters."""
    for name in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        listed_types = fields.get(name)
        if isinstance(listed_types, (list, tuple, str)) and listed_types:
            return len(listed_types)
    return fields.num_layers


def _nemotron_types(fields: Fields, count: int) -> Sequence[str]:
    letters = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
    pattern = fields.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or set(pattern) - set(letters):
        raise fields.wrong("layers_block_type", f"a list of {count} values, one for each layer")
    return [letters[letter] for letter in pattern]


def _zamba2_attention(fields: Fields, name: str) -> LayerStates:
    """The shared attention works on the hidden states beside the embeddings: twice as wide."""
    fields.ignore("hybrid_layer_ids", "kv_channels", "num_query_groups", "attention_hidden_size")
    count = fields.whole(HEADS if fields.needed(HEADS) else "num_attention_heads")
    return (State(MHA(count, fields.whole("attention_head_dim"))),)


def _lightning(fields: Fields) -> LinearState:
    return formats.lightning(fields.whole("num_attention_heads"), heads(fields).head_dim)


def _zaya(fields: Fields, name: str) -> LayerStates:
    """Compressed convolutional attention: K and V, and what their convolutions take."""
    kv, count = heads(fields), fields.whole("num_attention_heads")
    kernels = fields.whole("cca_time0"), fields.whole("cca_time1")
    attention = window_state(fields, SLIDING if name == HYBRID_SLIDING else FULL, kv)
    return (*attention, State(formats.cca(count, kv.num_kv_heads, kv.head_dim, kernels)))


JAMBA = _mamba1("mamba_expand", "mamba_d_state", "mamba_d_conv")
MAMBA = _mamba1("expand", "state_size", "conv_kernel")
GATED = beside(_gated_delta_net)
QWEN = Family(GATED, every(None, "full_attention_interval", LINEAR), (FULL, LINEAR), needs=BOTH)
FAMILIES: dict[str, Family] = {
    "bamba": Family(
        beside(BAMBA), _by_indices("attn_layer_indices", LINEAR), (FULL, LINEAR), needs=ONLY_HEADS
    ),
    "falcon_h1": Family(beside(BAMBA), always(HYBRID), (HYBRID,), needs=ONLY_HEADS),
    "granitemoehybrid": Family(beside(BAMBA), listed, (FULL, LINEAR)),
    "bailing_hybrid": Family(
        beside(_bailing, latent), every(None, "layer_group_size", LINEAR), (FULL, LINEAR)
    ),
    "inkling2_text inkling_text": Family(_inkling, listed, (HYBRID, HYBRID_SLIDING), needs=BOTH),
    "glm5_next_text": Family(
        beside(_kda, _glm5_next), every(4, rest=LINEAR), (FULL, INDEXED, LINEAR), also=indexed
    ),
    "jamba": Family(beside(JAMBA), _by_period, (FULL, LINEAR), needs=ONLY_HEADS),
    "kimi_linear": Family(beside(_kda, _unrotated), _kda_layers, (FULL, LINEAR)),
    "lfm2": Family(
        beside(_short_conv), _by_indices("full_attn_idxs", CONV), (FULL, CONV), needs=ONLY_HEADS
    ),
    "lfm2_moe": Family(beside(_short_conv), listed, (FULL, CONV), needs=ONLY_HEADS),
    "lfm3": Family(beside(_short_conv), listed, (FULL, SLIDING, CONV), needs=BOTH),
    "falcon_mamba mamba": Family(beside(MAMBA), always(LINEAR)),
    "mamba2": Family(beside(MAMBA2), always(LINEAR)),
    "minimax": Family(beside(_lightning), listed, (FULL, LINEAR), needs=ONLY_HEADS),
    "nemotron_h": Family(
        beside(NEMOTRON), _nemotron_types, (FULL, LINEAR, *NOTHING), layers=_as_listed, needs=BOTH
    ),
    "olmo_hybrid": Family(GATED, listed, (FULL, LINEAR)),
    "qwen3_5_moe_text qwen3_5_text": QWEN,
    "qwen3_next": replace(QWEN, draft=FULL),
    "zamba": Family(beside(_zamba, _zamba2_attention), listed, (LINEAR, HYBRID), needs=ONLY_HEADS),
    "zaya": Family(_zaya, always(HYBRID), (HYBRID, HYBRID_SLIDING), needs=BOTH),
    "zamba2": Family(beside(ZAMBA2, _zamba2_attention), listed, (LINEAR, HYBRID)),
}
