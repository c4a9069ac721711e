"""Parameters of a model's layers, from the dimensions in its config.

One formula serves all types that parameters.json lists: attention of the kinds that the layers
keep, and an MLP or experts. The file is generated: a type is in it if the formula has the count of
transformers' own model for its default config and for every change of one field, and it lists the
fields that must be given or must have one value for this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypedDict

from kvpool.layout.formats import MHA, MLA, IndexKey, LinearState
from kvpool.models.config import ALIASES, Fields
from kvpool.models.rules import Declaration, LayerStates, layer_fields

OVERLAPPED = 4  # the compress ratio of DeepSeek-V4 whose layers have an indexer
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
STEPS = ("decoder_sparse_step", "moe_layer_interval")  # experts on each layer of so many
DENSE_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


class TypeRules(TypedDict):
    """What a type's config must say for its count to be right.

    `needs` must be given, unless `fixed` has a value: then that, or left out. `plain_mlp`: two
    matrices instead of three. `query_gate`: queries have gates as wide as they are. `tied`: the
    head is the embedding where the config does not say.
    """

    needs: list[str]
    fixed: dict[str, Any]
    plain_mlp: bool
    query_gate: bool
    tied: bool


RULES: dict[str, TypeRules] = json.loads(
    resources.files("kvpool.models").joinpath("parameters.json").read_bytes()
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many tokens an entry of a DeepSeek-V4 layer compresses, 0 for a window only."""

    ratio: int


class NotCounted(ValueError):
    """The weights of a model cannot be estimated from its config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParameters:
    """Parameters of a layer by what quantisation tells apart; `other` is never quantised."""

    attention: int
    mlp: int = 0
    experts: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return self.attention + self.mlp + self.experts + self.other


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters of a model: `head` is 0 where it is the embedding."""

    embedding: int
    head: int
    layers: tuple[LayerParameters, ...]
    draft_layers: tuple[LayerParameters, ...] = ()

    @property
    def total(self) -> int:
        return self.embedding + self.head + sum(layer.total for layer in self.layers)


def parameters(fields: Fields, declaration: Declaration, rules: TypeRules) -> Parameters:
    """Parameters of a text model, without norms, biases and other vectors: under 1% of a model.

    Raises ValueError where a field is missing or does not fit.
    """
    hidden, count = fields.whole(fields.named("hidden_size")), fields.num_layers
    own = layer_fields(fields, count)
    layers = tuple(
        _layer(own[n], kinds, n, rules) for n, kinds in enumerate(_kinds(declaration, count))
    )
    # a draft layer is like the last layer, and projects two hidden states to one
    last = layers[-1]
    draft = LayerParameters(
        attention=last.attention,
        mlp=last.mlp,
        experts=last.experts,
        other=last.other + 2 * hidden * hidden,
    )
    tied = fields.flag("tie_word_embeddings") if fields.has("tie_word_embeddings") else None
    embedding = fields.whole("vocab_size") * hidden
    return Parameters(
        embedding=embedding,
        head=0 if (rules["tied"] if tied is None else tied) else embedding,
        layers=layers,
        draft_layers=(draft,) * fields.num_draft_layers,
    )


def _kinds(declaration: Declaration, count: int) -> list[Sequence[Any]]:
    """What each layer's attention works on: kinds of states, or DeepSeek-V4's compress ratio."""
    ratios = declaration.arguments.get("compress_ratios")
    if ratios is not None:
        return [(Ratio(ratio),) for ratio in ratios]
    states: Mapping[int, LayerStates] = declaration.arguments["states"]
    return [[state.kind for state in states.get(n, ())] for n in range(count)]


def _layer(fields: Fields, kinds: Sequence[Any], number: int, rules: TypeRules) -> LayerParameters:
    hidden = fields.whole(fields.named("hidden_size"))
    matrix = (2 if rules["plain_mlp"] else 3) * hidden
    gate = 2 if rules["query_gate"] else 1
    attention = sum(_attention(fields, kind, hidden, gate) for kind in kinds)
    experts = _first(fields, EXPERTS) if is_sparse(fields, number) else 0
    own_width = experts and fields.has("moe_intermediate_size")
    name = "moe_intermediate_size" if own_width else fields.named("intermediate_size")
    width = fields.whole(name)
    if not experts:
        return LayerParameters(attention=attention, mlp=matrix * width)
    shared = _first(fields, ("shared_expert_intermediate_size",)) or width * _first(fields, SHARED)
    return LayerParameters(
        attention=attention,
        mlp=matrix * shared,
        experts=matrix * experts * width,
        other=experts * hidden,
    )


def is_sparse(fields: Fields, number: int) -> bool:
    """Whether a layer of a model with experts has them."""
    if fields.has("mlp_layer_types"):
        types = fields.each("mlp_layer_types", ("dense", "sparse", "moe", "hash_moe"))
        return number < len(types) and types[number] != "dense"
    if fields.has("mlp_only_layers") and number in fields.get("mlp_only_layers"):
        return False
    last = fields.whole("moe_layer_end_index") if fields.has("moe_layer_end_index") else number
    step = _first(fields, STEPS) or 1
    return _first(fields, DENSE_LAYERS) <= number <= last and (number + 1) % step == 0


def _attention(fields: Fields, kind: Any, hidden: int, gate: int) -> int:
    """Parameters of the projections to and from a state."""
    if isinstance(kind, LinearState):
        return _linear(fields, hidden)
    if isinstance(kind, Ratio):
        return _compressed(fields, hidden, kind.ratio)
    if isinstance(kind, IndexKey):
        queries = fields.whole("index_n_heads") * kind.head_dim
        source = fields.whole_or("q_lora_rank", hidden)
        return source * queries + hidden * (kind.head_dim + fields.whole("index_n_heads"))
    heads = fields.whole(fields.named("num_attention_heads"))
    if isinstance(kind, MHA):
        v_dim = kind.head_dim if kind.v_head_dim is None else kind.v_head_dim
        kv = kind.num_kv_heads * (kind.head_dim + v_dim)
        return hidden * (gate * heads * kind.head_dim + kv + heads * v_dim)
    if not isinstance(kind, MLA):
        raise NotCounted(f"{fields.model}: projections of {type(kind).__name__} are not known.")
    nope, v_dim = fields.whole("qk_nope_head_dim", 0), fields.whole("v_head_dim")
    queries, latent = heads * (nope + kind.qk_rope_head_dim), kind.kv_lora_rank
    rank = fields.whole_or("q_lora_rank", 0)
    total = rank * (hidden + queries) if rank else hidden * queries
    total += hidden * (latent + kind.qk_rope_head_dim)  # down to the row that is kept
    return total + latent * heads * (nope + v_dim) + heads * v_dim * hidden


def _linear(fields: Fields, hidden: int) -> int:
    """Gated delta nets (Qwen3-Next), or KDA (Kimi-Linear)."""
    if fields.has("linear_num_value_heads"):
        heads = fields.whole("linear_num_value_heads")
        keys = fields.whole("linear_num_key_heads") * fields.whole("linear_key_head_dim")
        values = heads * fields.whole("linear_value_head_dim")
        return hidden * (2 * keys + 3 * values + 2 * heads)
    sizes, names = fields, ("linear_num_heads", "linear_head_dim")
    if not fields.has("linear_attn_config") and not fields.has(names[0]):
        raise NotCounted(f"{fields.model}: projections of its linear layers are not known.")
    if fields.has("linear_attn_config"):
        sizes, names = fields.inner("linear_attn_config"), ("num_heads", "head_dim")
    heads, dim = map(sizes.whole, names)
    width = heads * dim
    return hidden * (4 * width + heads) + 2 * dim * (hidden + width)  # gates of rank `dim`


def _compressed(fields: Fields, hidden: int, ratio: int) -> int:
    """DeepSeek-V4: shared keys and values, an output in groups, and what compresses the keys."""
    dim, heads = fields.whole("head_dim"), fields.whole("num_attention_heads")
    rank, output = fields.whole("q_lora_rank"), fields.whole("o_lora_rank")
    total = rank * (hidden + heads * dim) + hidden * dim
    total += output * (heads * dim + fields.whole("o_groups") * hidden)
    # hyper-connections before attention and MLP mix copies of the hidden state
    copies = fields.whole("hc_mult")
    total += 2 * copies * (copies + 2) * copies * hidden
    if ratio == 0:
        return total
    if ratio > OVERLAPPED:
        return total + 2 * hidden * dim
    index, index_heads = fields.whole("index_head_dim"), fields.whole("index_n_heads")
    total += 4 * hidden * (dim + index)  # windows overlap: twice as wide
    return total + index_heads * (rank * index + hidden)


def aliases(name: str) -> Sequence[str]:
    """All names under which configs have a number."""
    groups = (
        EXPERTS,
        SHARED,
        (*DENSE_LAYERS, "mlp_layer_types"),
        *((key, *others) for key, others in ALIASES.items()),
    )
    return next((group for group in groups if name in group), (name,))


def _first(fields: Fields, names: Sequence[str]) -> int:
    """The number that a config has under one of these names, or 0."""
    return next((fields.whole(name, 0) for name in names if fields.has(name)), 0)
