"""What a model's layers keep, the pool that holds it, and rules of what a config says of it.

A model is a list of layers, each a tuple of states: one of attention, two where a layer also has
index keys or a linear state, none where a layer has no attention or reads another's keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvpool.layout.formats import MHA, MLA, IndexKey
from kvpool.layout.text import steps
from kvpool.models.config import MAX_VALUE, Fields
from kvpool.models.layer_types import CHUNKED, FULL, INDEXED, SLIDING, Types, all_full, types_of
from kvpool.pools.states import LayeredPool, State, UnionPool

LayerStates = tuple[State, ...]
HEADS, HEAD_DIM = "num_key_value_heads", "head_dim"
Needs = frozenset[str]
BOTH = frozenset((HEADS, HEAD_DIM))
ONLY_HEADS, ONLY_DIM = frozenset((HEADS,)), frozenset((HEAD_DIM,))

# fields that may concern state: one that no rule has read is refused, unless it says nothing
STATE = re.compile(
    r"head|window|sliding|chunk|local_att|global_att|full_attn|cross_attention|bidirectional|"
    r"layer_types|per_layer_config|block_type|attn_layer|attention_types|attention_layers|hybrid|"
    r"kv|mqa|multi_query|query_groups|lora_rank|index|compress|cache|cycles|(^|_)cla(_|$)|"
    r"state|recurrent|conv|linear|mamba|ssm|cca_|number_of"
)
# names that match and concern queries, projections, outputs or training only
STATELESS = re.compile(
    r"(swa_)?num_attention_heads(_per_layer)?|n_heads?|encoder_attention_heads|q_lora_rank|qk_head_dim|"
    r"index_(n_heads|topk|block_size|local_blocks|topk_blocks|share_for_mtp_iteration|skip_topk_offset)|"
    r"indexer_rope_interleave|cla_share_factor|layernorm_\w+_(alpha|beta)|"
    r"mlp_layer_types|moe_layer_\w+|mtp_\w+|\w+_per_layer_input|scale_attn_by_inverse_layer_idx|"
    r"(full|linear)_attn_(alpha|beta)_factor|linear_(a_log|dt|allow|lower)_\w+|ssm_\w*multipliers?|"
    r"mamba_\w*norm\w*|mamba_dt_\w+|\w*_act|\w+_bias|num_ln_in_parallel_attn|lm_head\w*|"
    r"output_hidden_states|hidden_states_\w+|use_cache|cache_implementation|keep_window_size|"
    r"chunk_size_feed_forward|quantization_config"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A pool class and its arguments, without sizes, dtype, device, shard and pipeline stage.

    `layers` are global ids: all layers of a target; a draft's follow them. `page_size` is the
    default of `build`, `kinds` are the classes of the states that it has, `speculation` the
    arguments of a pool that serves speculative decoding. Rules of model types leave out whose
    layers these are: `total_kv_layers`, `owner` and `model`.
    """

    pool: type[UnionPool]
    arguments: Mapping[str, Any]
    kinds: frozenset[type]
    page_size: int = 64
    speculation: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    total_kv_layers: int = 0
    owner: str = "target"
    model: str = ""

    def __str__(self) -> str:
        """The model and its pool, then a line for all layers that keep the same."""
        others = dict(self.arguments)
        layers: dict[LayerStates, list[int]] = {}
        for layer, states in others.pop("states", {}).items():
            layers.setdefault(states, []).append(layer)
        rows = [f"{self.model} ({self.owner}): {self.pool.__name__}, {len(self.layers)} layers"]
        for states, numbers in layers.items():
            kept = (f"{s.kind}{f', a window of {s.window}' * bool(s.window)}" for s in states)
            rows.append(f"layers {steps(numbers)}: {'; '.join(kept)}")
        return "\n".join((*rows, *(f"{name}: {value}" for name, value in others.items())))

    def build(self, **common: Any) -> UnionPool:
        """The pool. Give a dtype or a packing, and num_pages, num_window_pages and num_slots where
        the pool has such spaces. What is given here overrides the declaration.
        """
        return self.pool(**self._arguments(common))

    def from_budget(self, nbytes: int, **common: Any) -> UnionPool:
        """As `build`, with as many pages as fit into `nbytes`; see KVPool.from_budget."""
        return self.pool.from_budget(nbytes, **self._arguments(common))

    def _arguments(self, common: Mapping[str, Any]) -> dict[str, Any]:
        names = ("layers", "total_kv_layers", "owner", "model", "page_size")
        return {**{name: getattr(self, name) for name in names}, **self.arguments, **common}


def layered(layers: Sequence[LayerStates], first: int = 0) -> Declaration:
    """The pool of these layers, numbered from `first`."""
    states = {n: layer for n, layer in enumerate(layers, first) if layer}
    kinds = frozenset(type(state.kind) for layer in layers for state in layer)
    numbers = tuple(range(first, first + len(layers)))
    return Declaration(pool=LayeredPool, arguments={"states": states}, kinds=kinds, layers=numbers)


def layer_fields(fields: Fields, count: int) -> list[Fields]:
    """The fields of each layer: the model's, with what per_layer_config says of the layer."""
    by_layer = [fields] * count
    for layer, own in overrides(fields).items():
        if layer >= count:
            raise fields.wrong("per_layer_config", f"an object with layers from 0 to {count - 1}")
        by_layer[layer] = replace(fields, values={**fields.values, **own})
    return by_layer


def overrides(fields: Fields) -> dict[int, Mapping[str, object]]:
    """per_layer_config by layer; `{}` where there is none."""
    if not fields.has("per_layer_config"):
        return {}
    by_layer = fields.inner("per_layer_config").values
    fits = all(re.fullmatch("[0-9]{1,6}", str(key)) for key in by_layer)
    if not fits or not all(isinstance(own, Mapping) for own in by_layer.values()):
        raise fields.wrong("per_layer_config", "an object of objects by layer")
    return {int(key): own for key, own in by_layer.items()}


def refuse_unread(fields: Fields) -> None:
    """Raises ValueError for the first field that may concern state and that no rule has read."""
    sources = {"": fields.values}
    sources |= {f"per_layer_config.{n}.": own for n, own in overrides(fields).items()}
    for inside, values in sources.items():
        for name, value in values.items():
            read = fields.inside + name in fields.used or not value
            skipped = inside and name == "skip" and value
            if skipped or not (read or STATELESS.fullmatch(name) or not STATE.search(name)):
                owner = replace(fields, values=values, inside=fields.inside + inside)
                unread = "it may change what a layer keeps, and models of this type do not read it"
                raise owner.wrong(name, f"left out ({unread})")


def refuse_ignored(fields: Fields, ignored: Needs) -> None:
    """Raises ValueError for heads or dims, among those `ignored`, that models do not have."""
    values = {n: v for n, v in fields.values.items() if n not in ignored}
    plain = replace(fields, values=values, needs=frozenset())
    for name in sorted(ignored):
        had = head_dim(plain) if name == HEAD_DIM else heads(plain).num_kv_heads
        if fields.has(name) and fields.get(name) != had:
            raise fields.wrong(name, f"{had} (models of this type do not read it)")


def window_state(fields: Fields, name: str, kind: MHA | MLA) -> LayerStates:
    """The state of a layer of type `name`: a window counts the current token too."""
    if name == FULL:
        return (State(kind),)
    size = "attention_chunk_size" if name == CHUNKED else fields.named("sliding_window")
    return (State(kind, fields.whole(size, 2) - 1),)


def grouped(fields: Fields, name: str) -> LayerStates:
    """Multi-head or grouped-query attention."""
    return window_state(fields, name, heads(fields))


def latent(fields: Fields, name: str) -> LayerStates:
    """A latent and a rope key, and with `indexed_attention` an indexer's key."""
    row = latent_row(fields)
    if name != INDEXED:
        return window_state(fields, name, row)
    return State(row), State(IndexKey(fields.whole("index_head_dim")))


def latent_row(fields: Fields, rope: range = range(1, MAX_VALUE + 1)) -> MLA:
    """A latent and a rope key, of one of `rope` dims. Heads are made of it, so their dims are none
    of the state's.
    """
    fields.ignore(HEADS, HEAD_DIM, "v_head_dim", "qk_nope_head_dim")
    return MLA(fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim", rope[0], rope[-1]))


def indexed(fields: Fields, layers: list[LayerStates]) -> list[LayerStates]:
    """Index keys on all layers, or on those of indexer_types "full": the others reuse the indices
    of the last full layer and have no keys.
    """
    if fields.has("indexer_types"):
        types = fields.each("indexer_types", ("full", "shared"), len(layers))
        fields.ignore("index_topk_freq", "index_topk_pattern")
        return [layer if kind == "full" else layer[:1] for layer, kind in zip(layers, types)]
    if fields.whole_or("index_topk_freq", 1) > 1 or fields.has("index_topk_pattern"):
        raise fields.wrong("indexer_types", "a list of 'full' or 'shared', one for each layer")
    return layers


def heads(fields: Fields, v_dim: int | None = None) -> MHA:
    """KV heads and their dim."""
    count = fields.whole(HEADS if fields.needed(HEADS) else fields.named("num_attention_heads"))
    dim = head_dim(fields)
    return MHA(count, dim, None if v_dim == dim else v_dim)


def head_dim(fields: Fields) -> int:
    """The field, or hidden_size / heads. An alias alone is not read by transformers."""
    if fields.has(fields.named(HEAD_DIM)) or fields.needed(HEAD_DIM):
        return fields.whole(HEAD_DIM)
    hidden = fields.whole(fields.named("hidden_size"))
    count = fields.whole(fields.named("num_attention_heads"))
    if hidden % count:
        raise fields.wrong(HEAD_DIM, f"given: {count} heads do not divide {hidden}")
    return hidden // count


@dataclass(frozen=True, slots=True)
class Family:
    """What a config of a model type cannot say.

    `attention`: the states of a layer, from its fields and the name of its type, one of `names`.
    `types`: a type for every layer, where the config has no layer_types. `layers`: how many layers
    keep state. `also`: what a rule over all layers changes. `needs`: fields for which the type has
    a default of its own, so that they must be given; others default to hidden_size / heads and to
    as many KV heads as heads. `ignores`: those for which the type has these defaults, given
    or not. `draft`: the type of the draft's layers, where they are known.
    """

    attention: Callable[[Fields, str], LayerStates]
    types: Types = all_full
    names: tuple[str, ...] = (FULL, SLIDING)
    layers: Callable[[Fields], int] = lambda fields: fields.num_layers
    also: Callable[[Fields, list[LayerStates]], list[LayerStates]] = lambda _, layers: layers
    needs: Needs = frozenset()
    ignores: Needs = frozenset()
    draft: str = ""

    def drafted(self, fields: Fields, layers: range) -> Declaration:
        """The pool of a config's draft layers, which are alike."""
        fields = replace(fields, needs=self.needs)
        return layered([self.attention(fields, self.draft)] * len(layers), layers.start)

    def __call__(self, fields: Fields) -> Declaration:
        """The pool of a config. Raises ValueError where a field does not fit."""
        if fields.get("use_bidirectional_attention") not in (None, False, "vision"):
            raise fields.wrong("use_bidirectional_attention", "false (an encoder has no KV state)")
        fields, count = replace(fields, needs=self.needs), self.layers(fields)
        names = types_of(fields, count, self.names, self.types)
        own = layer_fields(fields, count)
        for source in (fields, *own):
            refuse_ignored(source, self.ignores)
        layers = [self.attention(own[n], name) for n, name in enumerate(names)]
        return layered(self.also(fields, layers))
