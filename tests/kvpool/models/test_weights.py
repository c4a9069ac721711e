"""Weights of models, against transformers' own models on the meta device and files of tensors."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from kvpool.models import REFUSED, declare, shipped
from kvpool.models.config import read_config
from kvpool.models.parameters import RULES, NotCounted
from kvpool.models.weights import Weights, given, weights_of
from tests.kvpool.models.parameters import DEFAULTS, counted, rules_of
from tests.kvpool.models.tiny import TYPES

BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "vocab_size": 1000}
LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1536}
# llama's matrices: attention (queries and output, keys and values), MLP; embedding and head
ATTENTION, MLP, VOCABULARY = 512 * 512 * 2 + 512 * 128 * 2, 3 * 512 * 1536, 1000 * 512


def model_of(config):
    fields = {name: value for name, value in config.items() if name != "quantization_config"}
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**fields)
        )


def elements(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_types_default_config_has_the_parameters_of_transformers_own_model(name):
    count, config = counted(name, {})
    config = {**config, "dtype": "bfloat16"}
    assert weights_of(config).total / 2 == pytest.approx(count, rel=0.01)


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_config_has_the_parameters_of_transformers_own_model(name):
    left_out = ("quantization_config", "expert_dtype", "num_nextn_predict_layers")
    config = {n: v for n, v in read_config(name).items() if n not in left_out}
    assert weights_of(config).total / 2 == pytest.approx(elements(model_of(config)), rel=0.01)


def test_what_a_formula_does_not_know_is_not_counted():
    """Of the types that can be declared, more than half are estimated; the rest says so."""
    declared = [name for name in TYPES if name not in REFUSED]
    assert len(RULES) > len(declared) / 2 and {*RULES} <= {*declared}
    for name in sorted({*declared} - {*RULES}):
        try:
            config = transformers.AutoConfig.for_model(name, **DEFAULTS.get(name, {})).to_dict()
            declare(config)
        except (ValueError, ImportError, TypeError, AttributeError):
            continue
        with pytest.raises(NotCounted):
            weights_of(config)


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_field_without_which_the_count_would_be_wrong_must_be_given(name):
    rules = RULES[name]
    config = transformers.AutoConfig.for_model(name, **DEFAULTS.get(name, {})).to_dict()
    for field in rules["needs"]:
        without = {n: v for n, v in config.items() if n != field}
        with pytest.raises(NotCounted, match="must be given"):
            weights_of(without)
    for field, value in rules["fixed"].items():
        other = not value if isinstance(value, bool) else value + 1
        with pytest.raises(NotCounted, match=field):
            weights_of({**config, field: other})


# quantised


def linears(model):
    """Elements of the linear modules in layers, and of the others' parameters."""
    inside = [
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name
    ]
    return sum(inside), elements(model) - sum(inside)


@pytest.mark.parametrize(
    ("quantisation", "nbytes"),
    [
        (BLOCK_FP8, 1 + 4 / 128**2),
        ({"quant_method": "fbgemm_fp8"}, 1),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, 1 + 3 / 32),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5 + 4 / 64),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5 + 1 / 16),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 4, "type": "int", "group_size": 64},
                    }
                },
                "ignore": ["lm_head"],
            },
            0.5 + 2 / 64,
        ),
    ],
    ids=lambda value: value["quant_method"] if isinstance(value, dict) else "",
)
def test_linear_modules_of_layers_are_stored_as_the_quantisation_says(quantisation, nbytes):
    quantised, rest = linears(model_of(LLAMA))
    weights = weights_of({**LLAMA, "dtype": "float32", "quantization_config": quantisation})
    assert weights.total == pytest.approx(quantised * nbytes + rest * 4, rel=0.003)


def test_fp8_and_fp4_experts_take_the_bytes_of_transformers_own_modules():
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    for name, experts in (("deepseek_v3", "fp8"), ("deepseek_v4", "fp4")):
        config = {**read_config(name), "num_nextn_predict_layers": 0}
        model = model_of(config).to(torch.bfloat16)
        scales = {"fp8": "float", "fp4": "ue8m0"}[experts]
        own = FineGrainedFP8Config(
            weight_block_size=(128, 128), expert_dtype=experts, scale_fmt=scales
        )
        model = replace_with_fp8_linear(model, ["lm_head"], own)
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        assert weights_of(config).total == pytest.approx(nbytes, rel=0.01), name
        assert (f"experts {experts}" in weights_of(config).words) == (experts == "fp4")


def test_published_checkpoints_have_the_size_that_is_estimated():
    """The total_size of their index: gpt-oss-120b, and DeepSeek-V3 with its draft layer, which has
    an embedding and a head of its own.
    """
    assert weights_of("gpt_oss_120b").total == pytest.approx(65.25e9, rel=0.01)
    weights = weights_of("deepseek_v3")
    copies = weights.embedding + weights.head
    assert weights.total + weights.draft + copies == pytest.approx(688.6e9, rel=0.01)


def test_parts_that_are_not_quantised_are_counted_so():
    quantisation = {**BLOCK_FP8, "modules_to_not_convert": ["lm_head", "model.layers.1.self_attn"]}
    weights = weights_of({**LLAMA, "dtype": "bfloat16", "quantization_config": quantisation})
    assert weights.layers[1] - weights.layers[0] == pytest.approx(ATTENTION, rel=0.001)


@pytest.mark.parametrize(
    "quantisation",
    [
        {"quant_method": "torchao"},
        {**BLOCK_FP8, "modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True},
        {"quant_method": "compressed-tensors", "config_groups": {}},
    ],
)
def test_an_unknown_quantisation_is_not_counted(quantisation):
    with pytest.raises(NotCounted, match="llama"):
        weights_of({**LLAMA, "quantization_config": quantisation})


# files


@pytest.fixture
def folder(tmp_path):
    """A llama's config and its tensors in two files, with a draft layer and a vision tower."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = transformers.AutoConfig.for_model(**{**LLAMA, "num_hidden_layers": 5})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = {**model.state_dict(), "visual.blocks.0.weight": torch.zeros(100)}
    names = sorted(tensors)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {name: file for file, part in files.items() for name in part}
    total = sum(tensor.nbytes for tensor in tensors.values())
    document = {"metadata": {"total_size": total}, "weight_map": index}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(document))
    return tmp_path


def test_files_beside_a_config_are_read_tensor_by_tensor(folder):
    weights = weights_of(folder)
    assert weights.words == "read from 2 safetensors files"
    layer = (ATTENTION + MLP + 2 * 512) * 2
    assert weights.layers == (layer,) * 4 and weights.draft == layer
    assert (weights.embedding, weights.others) == (VOCABULARY * 2, 400)
    assert weights.head == (VOCABULARY + 512) * 2
    assert weights_of(folder / "config.json") == weights


def test_an_index_without_its_files_has_the_total(folder):
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    (folder / "model-1.safetensors").unlink()
    weights = weights_of(folder)
    assert weights.words.startswith("read from model.safetensors.index.json")
    assert weights.total == pytest.approx(total, rel=0.001)


def test_a_block_of_the_files_may_have_several_layers_that_keep_state(folder):
    """LongCat's have two attentions each."""
    config = transformers.AutoConfig.for_model("longcat_flash", num_layers=5).to_dict()
    (folder / "config.json").write_text(json.dumps(config))
    weights = weights_of(folder)
    assert len(weights.layers) == 10 and sum(weights.layers) == 5 * 2 * (ATTENTION + MLP + 1024)


def test_a_shipped_name_is_not_the_folder_of_that_name(folder, monkeypatch):
    named = folder.rename(folder.parent / "llama_3_1_70b")
    monkeypatch.chdir(named.parent)
    assert weights_of("llama_3_1_70b").source == "estimated"
    assert weights_of("./llama_3_1_70b").source == "read"


def test_a_model_with_other_parts_than_text_is_not_estimated():
    for more in ({"vision_config": {"depth": 1}}, {"audio_tower_config": {"depth": 1}}):
        with pytest.raises(NotCounted, match="other parts"):
            weights_of({**LLAMA, **more})
    with pytest.raises(NotCounted, match="other parts"):
        weights_of({"model_type": "llava", "text_config": LLAMA})


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "laguna"])
def test_the_file_of_rules_is_what_transformers_models_give(name):
    """All of it is written by `python -m tests.kvpool.models.parameters`."""
    assert rules_of(name) == RULES[name]


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 8 + b"{}", (9).to_bytes(8, "little") + b'{"a": {}}']
)
def test_a_broken_file_is_refused_by_name(folder, data):
    (folder / "model-1.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"model-1\.safetensors"):
        weights_of(folder)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"metadata": [], "weight_map": {"a": "gone"}}, "metadata must be an object, got \\[\\]"),
        ({"weight_map": 7}, "weight_map must be an object, got 7"),
        ({"weight_map": {"a": "gone"}}, "no metadata.total_size"),
        (
            {"metadata": {"total_size": float("inf")}, "weight_map": {"a": "gone"}},
            "no metadata.total_size",
        ),
    ],
)
def test_a_broken_index_is_refused_by_name(folder, document, words):
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=rf"index\.json: {words}"):
        weights_of(folder)


# ranks


def test_stages_have_their_layers_the_first_the_embedding_and_the_last_the_head():
    weights = Weights(
        source="read", words="", layers=(10, 20, 30), embedding=7, head=5, others=2, draft=4
    )
    assert [weights.on_rank(layers) for layers in ((0,), (1,), (2,))] == [19, 20, 35]
    assert weights.on_rank((2,), draft=True) == 39
    assert weights.on_rank((0, 1, 2)) == weights.total == 74
    assert weights.on_rank((0, 1, 2), tp=4) == 19  # rounded up
    assert given(9).on_rank((1,), tp=4) == 9


def test_a_head_that_is_the_embedding_is_in_the_last_stage_too():
    weights = weights_of({**LLAMA, "tie_word_embeddings": True, "dtype": "float16"})
    first, last = weights.on_rank((0, 1)), weights.on_rank((2, 3))
    assert first == last == 2 * (2 * (ATTENTION + MLP) + VOCABULARY)
    assert weights.on_rank(range(4)) == 2 * (4 * (ATTENTION + MLP) + VOCABULARY)
