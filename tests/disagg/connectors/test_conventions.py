"""The document that a connector fills in, from a model's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvpool.models
from disagg.connectors.conventions import SAMPLE_BYTES, conventions, weights_digest
from disagg.protocol.agreement import differences
from disagg.protocol.messages import checked_conventions

SIZES = {"hidden_size": 64, "num_attention_heads": 8, "head_dim": 8, "vocab_size": 512}
SAME = {**SIZES, "rms_norm_eps": 1e-05}
SCALING = {"factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA = {
    "model_type": "llama",
    **SAME,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "_name_or_path": "/models/llama",
    "transformers_version": "4.57.0",
    "rope_scaling": {"type": "llama3", **SCALING},
}
NEWER = {
    "model_type": "llama",
    **SAME,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **SCALING},
    "torch_dtype": "float32",
    "_name_or_path": "/elsewhere",
    "transformers_version": "5.19.0",
}
CONFIGS = sorted((Path(kvpool.models.__file__).parent / "configs").glob("*.json"))


def as_object(fields):
    """A configuration as transformers, vLLM and SGLang have it."""
    return SimpleNamespace(to_dict=lambda: fields)


def test_a_model_is_the_same_in_every_form_of_its_configuration():
    expected = SAME | {
        "model": "llama",
        "rope": "llama3",
        "rope_theta": 500000.0,
        "rope_parameters": '{"factor":8.0}',
        "original_max_position_embeddings": 8192,
        "quantization": "none",
        "index_keys": "none",
    }
    forms = (LLAMA, NEWER, as_object(NEWER), SimpleNamespace(**NEWER), {"text_config": LLAMA})
    for form in (*forms, as_object({"model_type": "llava", "text_config": as_object(NEWER)})):
        assert conventions(form) == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_theta": 10000.0}, "rope_theta: 500000.0 on prefill, 10000.0 on decode"),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0}}, "rope: 'llama3' on prefill, 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_parameters: "),
        ({"rms_norm_eps": 1e-06}, "rms_norm_eps: 1e-05 on prefill, 1e-06 on decode"),
        ({"model_type": "qwen3"}, "model: 'llama' on prefill, 'qwen3' on decode"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization: 'none' on prefill"),
    ],
)
def test_what_decides_what_state_means_is_named(change, named):
    found = differences(conventions(LLAMA), conventions({**LLAMA, **change}))
    assert any(line.startswith(named) for line in found)


def test_what_the_engine_knows_beside_the_configuration():
    dsa = {**LLAMA, "index_head_dim": 128}
    known = {"index_keys": "hadamard", "rope_style": "neox", "revision": "5f0c"}
    document = conventions(dsa, quantization="fp8", **known)
    more = {"index_head_dim": 128, "quantization": "fp8", **known}
    assert document == conventions(LLAMA) | more
    assert conventions(LLAMA, index_keys="hadamard")["index_keys"] == "none"
    assert "index_keys" not in conventions(dsa)  # nobody has said how they are


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_models_document_can_be_sent(path):
    config = json.loads(path.read_text())
    said = conventions(config, revision="0" * 40, rope_style="neox")
    assert checked_conventions(said) == said
    assert said["model"] and "rope" in said


def test_long_lists_are_told_apart_by_a_digest():
    kinds = ["full_attention", "sliding_attention"]
    one, other = (conventions({**LLAMA, "layer_types": kinds * 40 + last}) for last in ([], kinds))
    assert one["layer_types"] != other["layer_types"]
    assert len(one["layer_types"]) < 64


def test_weights_are_told_apart_by_samples_of_their_files(tmp_path):
    def folder(name, files):
        made = tmp_path / name
        made.mkdir()
        for file, data in files.items():
            (made / file).write_bytes(data)
        return made

    body = bytes(3 * SAMPLE_BYTES)
    same = {"model.safetensors": b"head" + body + b"tail"}
    one = folder("one", same)
    assert conventions(LLAMA, folder=one)["weights"] == weights_digest(folder("two", same))
    for number, other in enumerate(
        (
            {"model.safetensors": b"Head" + body + b"tail"},
            {"model.safetensors": b"head" + body + b"Tail"},
            {"model.safetensors": b"head" + body + b"0tail"},
            {"other.safetensors": b"head" + body + b"tail"},
            {**same, "more.safetensors": b""},
        )
    ):
        assert weights_digest(folder(f"other{number}", other)) != weights_digest(one)
    assert "weights" not in conventions(LLAMA, folder=folder("empty", {"config.json": b"{}"}))


def test_a_folder_of_the_hubs_cache_says_its_commit(tmp_path):
    commit = "0123456789abcdef" * 2 + "01234567"
    folder = tmp_path / "models--a--b" / "snapshots" / commit
    folder.mkdir(parents=True)
    assert conventions(LLAMA, folder=folder)["revision"] == commit
    assert conventions(LLAMA, folder=folder, revision="main")["revision"] == "main"
    assert "revision" not in conventions(LLAMA, folder=tmp_path)
