"""Draft layers (multi-token prediction) of model types, which may differ from the target's."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.models.config import Fields
from kvpool.models.deepseek_v4 import compressed, deepseek_v4, ratios_of
from kvpool.models.layers import Need
from kvpool.pools.dsv4 import DSv4Pool
from kvpool.pools.mha import MHAPool
from kvpool.pools.mla import MLAPool, NSAPool


def _deepseek_v3_draft(fields: Fields, layers: range) -> Need:
    return MLAPool, _rows(fields)


def _deepseek_v32_draft(fields: Fields, layers: range) -> Need:
    """The draft layers have index keys."""
    return NSAPool, {**_indexed_rows(fields), "index_layers": tuple(layers)}


def _deepseek_v4_draft(fields: Fields, layers: range) -> Need:
    """The window only, unless compress_ratios has entries for the draft's layers."""
    ratios: tuple[int, ...] = deepseek_v4(fields)[1]["compress_ratios"]
    further = ratios_of(fields)[len(ratios) :] if fields.has("compress_ratios") else ()
    if further and len(further) != len(layers):
        least, most = layers.start, layers.stop
        raise ValueError(
            f"{fields.model} config: compress_ratios must have {least} entries, or {most} with the "
            f"draft's, got {least + len(further)}."
        )
    ratios += further or (0,) * len(layers)
    return DSv4Pool, {**compressed(fields), "compress_ratios": ratios}


def _qwen3_next_draft(fields: Fields, layers: range) -> Need:
    """Full attention."""
    heads = fields.whole("num_key_value_heads"), fields.whole("head_dim")
    return MHAPool, {"num_kv_heads": heads[0], "head_dim": heads[1]}


DRAFTS: dict[str, Callable[[Fields, range], Need]] = {
    "deepseek_v3": _deepseek_v3_draft,
    "deepseek_v32": _deepseek_v32_draft,
    "deepseek_v4": _deepseek_v4_draft,
    "qwen3_next": _qwen3_next_draft,
}


def _rows(fields: Fields) -> dict[str, int]:
    return {name: fields.whole(name) for name in ("kv_lora_rank", "qk_rope_head_dim")}


def _indexed_rows(fields: Fields) -> dict[str, int]:
    return {**_rows(fields), "index_head_dim": fields.whole("index_head_dim")}
