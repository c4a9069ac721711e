"""A tiny random model of every causal-LM type of transformers, and what transformers caches of it:
the independent count that pools are held against.
"""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvpool.models.families import WRAPPERS

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_TABLES = json.loads(Path(__file__).with_name("tiny.json").read_text())
TEXTS = tuple(_TABLES["texts"])
"""Text models that AutoModelForCausalLM does not make: most are found in multimodal ones only."""
CLASSES: dict[str, str] = _TABLES["classes"]
"""Models of them that AutoModel does not make by themselves."""
SIZES: dict[str, Any] = {n: size for names, size in _TABLES["sizes"].items() for n in names.split()}
"""What a config has of these, whatever its type; windows count the token itself."""
SMOOTH = {"num_experts_per_tok": 4, "index_topk": 99, "initializer_range": 0.05}
CHANGES: dict[str, dict[str, Any]] = defaultdict(dict)
"""By type, which several lines of the table may name. A field may be "left out"."""
for _types, _fields in _TABLES["changes"].items():
    for _type in _types.split():
        CHANGES[_type].update(_fields)


def changes(model: str) -> dict[str, Any]:
    """The fields of a tiny config that differ from transformers' defaults."""
    held = transformers.AutoConfig.for_model(model).to_dict()
    if model in WRAPPERS:
        text = held["text_config"].get("model_type", WRAPPERS[model])
        own = text if text in TYPES else model
        return {"text_config": _changes(held["text_config"], own)}
    return _changes(held, model)


def _changes(held: dict[str, Any], model: str) -> dict[str, Any]:
    fields = {**{n: v for n, v in SIZES.items() if n in held}, **CHANGES.get(model, {})}
    return {name: value for name, value in fields.items() if value != "left out"}


@lru_cache(maxsize=8)
def tiny(model: str) -> Any:
    return made(model, changes(model))


def made(model: str, fields: dict[str, Any]) -> Any:
    """A random float32 model with these fields."""
    config = transformers.AutoConfig.for_model(model, **fields)
    torch.manual_seed(7)
    if model in CLASSES:
        module, _, name = CLASSES[model].rpartition(".")
        found = getattr(import_module(f"transformers.models.{module}"), name)
        return found._from_config(config, dtype=torch.float32).eval()
    kind = transformers.AutoModel if model in TEXTS else transformers.AutoModelForCausalLM
    return kind.from_config(config, dtype=torch.float32).eval()


def smooth(model: str) -> Any:
    """One that has no choice among experts or tokens that a rounding could turn."""
    numbers = changes(model)
    return made(model, numbers | {name: SMOOTH[name] for name in SMOOTH if name in numbers})


def own_cache(model: Any) -> Any:
    if model.config.model_type == "minimax":
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        return MiniMaxCache()
    return transformers.DynamicCache(config=model.config)


@torch.no_grad()
def run(model: Any, cache: Any, ids: torch.Tensor, chunks: tuple[int, ...]) -> list[torch.Tensor]:
    """Logits of each chunk of the ids; of a text model without a head, its hidden states."""
    names = inspect.signature(model.forward).parameters
    name = "cache_params" if "cache_params" in names else "past_key_values"
    parts = torch.split(ids, chunks, dim=1)
    more = {name: cache, "use_cache": True}
    if model.config.model_type == "voxtral_realtime_text":  # the delay of the transcription
        more["t_cond"] = torch.linspace(-1, 1, model.config.hidden_size)[None]
    said = [model(input_ids=part, **more) for part in parts]
    return [each.logits if "logits" in each else each.last_hidden_state for each in said]


def kept(cache: Any, number: int, tokens: int, unread: int = 1) -> tuple[int, int, int, int]:
    """What a layer of transformers' cache keeps after `tokens` tokens: elements of each token that
    it keeps for ever, elements of each token in its window, tokens in the window, and elements that
    it keeps once, less the `unread` first taps of a convolution, on which no output depends.
    """
    layer = cache.layers[number] if number < len(cache.layers) else None
    held = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys", "idx_keys")]
    rows = [x.reshape(1, -1, *x.shape[-2:]) for x in held if x is not None and x.numel()]
    full = sum(x.shape[1] * x.shape[3] for x in rows if x.shape[2] == tokens)
    windowed = [x for x in rows if x.shape[2] < tokens]
    length = {x.shape[2] for x in windowed} or {0}
    assert len(length) == 1
    once = [x[..., unread:] for x in getattr(layer, "conv_states", {}).values() if x is not None]
    once += [x for x in getattr(layer, "recurrent_states", {}).values() if x is not None]
    lightning = getattr(cache, "linear_cache", [])
    once += [x for x in lightning[number : number + 1] if len(x)]
    swa = sum(x.shape[1] * x.shape[3] for x in windowed)
    return full, swa, length.pop(), sum(x.numel() for x in once)
