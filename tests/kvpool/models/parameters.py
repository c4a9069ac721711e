"""kvpool/models/parameters.json, derived from transformers' own models on the meta device.

Written by `python -m tests.kvpool.models.parameters`, which takes minutes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers

from kvpool.models import REFUSED, declare
from kvpool.models.config import Fields
from kvpool.models.parameters import EXPERTS, TypeRules, parameters
from tests.kvpool.models.tiny import TYPES

FEW = {"num_hidden_layers": 4, "n_layer": 4, "num_layers": 4, "vocab_size": 4096}
"""Small enough that a change of a layer is not lost among the rest."""
# transformers' default has none that its own model takes, or a layer list of its own length
DEFAULTS: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "dots1": {"n_routed_experts": 64, "n_shared_experts": 2},
    "nemotron": {"num_key_value_heads": 8},
}
TOLERANCE = 0.015  # norms and biases are not counted
STEPS = re.compile("expert|dense|shared|step|interval|freq|start|end")
NO_SIZE = re.compile(
    r".*(token_id|token_index|dropout|_eps|epsilon|theta|_range|_std|coef|jitter|_factor|_act|scaling|multiplier|"
    r"_per_tok|topk|_cap|_limit)|rope_.*|chunk_size_feed_forward|pretraining_tp|use_cache|"
    r"is_(decoder|encoder_decoder)|output_.*|return_dict|id2label|label2id|problem_type|transformers_version"
)


def counted(name: str, fields: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Parameters of transformers' model with these fields, and its config as a mapping."""
    config = transformers.AutoConfig.for_model(name, **DEFAULTS.get(name, {}) | dict(fields))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return sum(parameter.numel() for parameter in model.parameters()), config.to_dict()


def estimated(config: Mapping[str, Any], rules: TypeRules) -> int:
    return parameters(Fields(config, config["model_type"]), declare(config), rules).total


def near(config: Mapping[str, Any], rules: TypeRules, count: int) -> bool:
    """Whether the formula refuses a config or has its count."""
    try:
        return abs(estimated(config, rules) / count - 1) < TOLERANCE
    except ValueError:
        return True


def changes(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Changes of one field."""
    for name, value in config.items():
        if NO_SIZE.fullmatch(name) or name in ("architectures", "dtype", "model_type"):
            continue
        if isinstance(value, bool):
            values: list[Any] = [not value]
        elif isinstance(value, int):
            values = [2 * value] if value else [1]
            if STEPS.search(name):
                values += [value + 1] if name in EXPERTS else [0, value + 1]
        elif isinstance(value, float):
            values = [2 * value]
        elif value is None:
            values = [True, 64]
        elif name == "mlp_only_layers":
            values = [[0, 1]]
        elif name == "mlp_layer_types":
            values = [["dense"] * 3 + ["sparse"] * (len(value) - 3), ["sparse"] * len(value)]
        else:
            values = []
        for changed in values:
            yield {name: changed}


def rules_of(name: str) -> TypeRules | None:
    """The rules of a type, or None where the formula is not its own."""
    full, config = counted(name, {})
    few: dict[str, Any] = {field: value for field, value in FEW.items() if config.get(field)}
    if name == "kimi_linear":  # with fewer, no layer has attention
        few["num_hidden_layers"] = 8
    few |= {"pad_token_id": None} if config.get("pad_token_id") else {}
    base, small = counted(name, few)
    tied = config.get("tie_word_embeddings") is True
    choices = [
        TypeRules(needs=[], fixed={}, plain_mlp=plain, query_gate=gate, tied=tied)
        for plain, gate in ((False, False), (True, False), (False, True))
    ]
    try:
        rules = min(choices, key=lambda rules: abs(estimated(small, rules) - base))
    except (ValueError, KeyError):
        return None
    if not near(small, rules, base) or not near(config, rules, full):
        return None
    for change in changes(small):
        (field,) = change
        if field in few or field in rules["fixed"]:
            continue
        try:
            count, changed = counted(name, few | change)
        except Exception:
            continue
        if not near(changed, rules, count):
            rules["fixed"][field] = small[field]
    lists = [value for value in rules["fixed"].values() if isinstance(value, list)]
    if lists or len(rules["fixed"]) > 2:  # it depends on more than the formula knows
        return None
    rules["needs"] = [field for field in small if changes_by_leaving_out(field, small, rules)]
    return rules


def changes_by_leaving_out(field: str, config: Mapping[str, Any], rules: TypeRules) -> bool:
    rest = {name: value for name, value in config.items() if name != field}
    try:
        return estimated(rest, rules) != estimated(config, rules)
    except (ValueError, KeyError):  # it is refused
        return False


def main() -> str:
    """The file, a line for each type of which transformers can make a model."""
    lines = []
    for name in sorted(set(sys.argv[1:] or TYPES) - {*REFUSED}):
        try:
            rules = rules_of(name)
        except Exception as error:  # of transformers
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        lines += [f"  {json.dumps(name)}: {json.dumps(rules)}"] if rules else []
    return "{\n" + ",\n".join(lines) + "\n}"


if __name__ == "__main__":
    print(main())
