"""From a model's config.json to the declaration of its pool.

`declare("deepseek_v32").build(num_pages=1000, packing="fp8")` is a pool for the model of a shipped
config. A path of a config.json, its directory, or its fields as a mapping are read too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from kvpool.layout.text import nearest
from kvpool.models.config import Fields, read_config, shipped as shipped, short
from kvpool.models.families import DRAFTS, FAMILIES, TARGETS, WRAPPERS
from kvpool.models.rules import Declaration as Declaration, refuse_unread

_REASONS = json.loads(resources.files("kvpool.models").joinpath("refused.json").read_bytes())
REFUSED: dict[str, str] = {name: reason for reason, names in _REASONS.items() for name in names}
"""Model types that transformers can make and that no pool holds, each with the reason."""
BY_HAND = (
    "build MHAPool, MLAPool, NSAPool, SWAPool, HybridLinearPool, DSv4Pool or LayeredPool with the "
    "model's heads, dims and layers, or subclass KVPool and define declare() (docs/add-a-pool.md)"
)


def declare(config: str | Path | Mapping[str, Any]) -> Declaration:
    """The declaration of a model's pool. `config` is a config.json, a directory that has one, the
    name of a shipped config, or the fields.

    Raises ValueError for an unknown model type, and names model type, field, the expected and the
    found value where a field does not fit.
    """
    fields, text = text_fields(config)
    declaration = TARGETS[text](fields)
    refuse_unread(fields)
    return replace(declaration, total_kv_layers=len(declaration.layers), model=fields.model)


def declare_draft(config: str | Path | Mapping[str, Any]) -> Declaration | None:
    """The declaration of a model's draft layers (multi-token prediction); None if it has none. With
    the target's page size the two pools share ids, so their layouts merge.
    """
    fields, text = text_fields(config)
    count, family = fields.num_draft_layers, FAMILIES.get(text)
    first = family.layers(fields) if family else fields.num_layers
    if count == 0:
        return None
    if text not in DRAFTS:
        raise ValueError(
            f"{fields.model} config: {count} draft layers, but drafts of this type are not known "
            f"(known: {', '.join(sorted(DRAFTS))}). Build their pool yourself, with owner='draft'."
        )
    declaration = DRAFTS[text](fields, range(first, first + count))
    return replace(declaration, total_kv_layers=first, owner="draft", model=fields.model)


def known() -> tuple[str, ...]:
    """Model types that can be declared. So can any other whose text_config is of one of them."""
    return tuple(sorted({*TARGETS, *WRAPPERS}))


def text_fields(config: str | Path | Mapping[str, Any]) -> tuple[Fields, str]:
    """The fields of the text model, and its type."""
    values = read_config(config)
    model = values.get("model_type")
    if not isinstance(model, str):
        wrong = "it is missing" if model is None else f"got {short(model)}"
        name = "config" if values is config else f"config {str(config)!r}"
        raise ValueError(f"{name}: give model_type, as the model's config.json does ({wrong}).")
    fields, text = Fields(values, model), model
    wrapped = isinstance(values.get("text_config"), Mapping)
    if model not in {*TARGETS, *REFUSED} and (wrapped or model in WRAPPERS):
        fields = fields.inner("text_config")
        inside = fields.values.get("model_type", WRAPPERS.get(model))
        if not isinstance(inside, str):
            raise fields.wrong("model_type", "given: it says how the text model is read")
        text = inside
    if text not in TARGETS:
        raise ValueError(_unknown(model, text, values))
    return fields, text


def _unknown(model: str, text: str, values: Mapping[str, Any]) -> str:
    """Why a type cannot be declared, and what to do."""
    name = short(model) if text == model else f"{short(model)} with a text_config of {short(text)}"
    like = "bart" if values.get("is_encoder_decoder") is True else text
    if reason := REFUSED.get(text, REFUSED.get(like)):
        return f"model_type {name} cannot be declared: {reason}. For part of its state, {BY_HAND}."
    if "vision" in text or ("patch_size" in values and "text_config" not in values):
        advice = " A vision model keeps no KV state: give the config of the model that contains it."
    else:
        advice = nearest(text.lower(), known(), 3)
    return (
        f"model_type {name} is not known.{advice} docs/models.md and kvpool.models.known() list "
        f"what is. For another, {BY_HAND}."
    )
