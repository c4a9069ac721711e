"""Draft layers (multi-token prediction) of model types, which may differ from the target's."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.layout.formats import MHA, MLA, IndexKey
from kvpool.models.config import Fields
from kvpool.models.deepseek_v4 import compressed, deepseek_v4, ratios_of
from kvpool.models.layers import Need, layered
from kvpool.pools.states import State


def _deepseek_v3_draft(fields: Fields, layers: range) -> Need:
    row = MLA(fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim"))
    return layered([(State(row),)] * len(layers), layers.start)


def _deepseek_v32_draft(fields: Fields, layers: range) -> Need:
    """The draft layers have index keys."""
    row = MLA(fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim"))
    key = State(IndexKey(fields.whole("index_head_dim")))
    return layered([(State(row), key)] * len(layers), layers.start)


def _deepseek_v4_draft(fields: Fields, layers: range) -> Need:
    """The window only, unless compress_ratios has entries for the draft's layers."""
    ratios: tuple[int, ...] = deepseek_v4(fields).arguments["compress_ratios"]
    further = ratios_of(fields)[len(ratios) :] if fields.has("compress_ratios") else ()
    if further and len(further) != len(layers):
        least, most = layers.start, layers.stop
        raise ValueError(
            f"{fields.model} config: compress_ratios must have {least} entries, or {most} with the "
            f"draft's, got {least + len(further)}."
        )
    return compressed(fields, ratios + (further or (0,) * len(layers)))


def _qwen3_next_draft(fields: Fields, layers: range) -> Need:
    """Full attention."""
    heads = MHA(fields.whole("num_key_value_heads"), fields.whole("head_dim"))
    return layered([(State(heads),)] * len(layers), layers.start)


DRAFTS: dict[str, Callable[[Fields, range], Need]] = {
    "deepseek_v3": _deepseek_v3_draft,
    "deepseek_v32": _deepseek_v32_draft,
    "deepseek_v4": _deepseek_v4_draft,
    "qwen3_next": _qwen3_next_draft,
}
