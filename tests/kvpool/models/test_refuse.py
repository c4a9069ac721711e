"""Configs that cannot be declared: the model type, the field and what is expected are named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from kvpool.models import REFUSED, declare, declare_draft, known, shipped
from tests.kvpool.models.configs import config_of


def refusal(config):
    with pytest.raises(ValueError) as caught:
        declare(config)
    return str(caught.value)


@pytest.mark.parametrize("model", ["no_such_type", "x" * 5000])
def test_an_unknown_type_is_told_where_the_known_are_listed_and_how_to_declare_by_hand(model):
    told = refusal({"model_type": model})
    assert told.startswith(f"model_type '{model[:50]}")
    assert "kvpool.models.known()" in told
    assert all(word in told for word in ("MHAPool", "KVPool", "declare()", "docs/add-a-pool.md"))
    assert sum(model in told.split() for model in known()) == 0
    assert len(told) < 500


@pytest.mark.parametrize(
    ("model", "near"),
    [
        ("lama", "'llama', "),
        ("Llama", "'llama', "),
        ("DeepseekV3ForCausalLM", "'deepseek_v3' or 'deepseek_v32'? "),
    ],
)
def test_the_types_nearest_to_an_unknown_one_are_named_first(model, near):
    told = refusal({"model_type": model})
    assert told.startswith(f"model_type '{model}' is not known. Did you mean {near}")


@pytest.mark.parametrize("config", [{}, {"hidden_size": 64}, {"model_type": ["llama"]}])
def test_a_config_without_a_type_is_told_to_give_one(config, tmp_path):
    told = "give model_type, as the model's config.json does"
    assert refusal(config).startswith(f"config: {told}")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert refusal(tmp_path).startswith(f"config {str(tmp_path)!r}: {told}")


@pytest.mark.parametrize(
    "config", [{"model_type": "clip_vision_model"}, {"model_type": "vit", "patch_size": 16}]
)
def test_a_vision_model_is_told_to_give_the_model_that_contains_it(config):
    assert "give the config of the model that contains it" in refusal(config)


@pytest.mark.parametrize("model", REFUSED)
def test_a_type_that_no_pool_holds_is_refused_with_its_reason(model):
    text = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1}
    for config in ({}, {"text_config": {**text, "hidden_size": 8}}):
        told = refusal({"model_type": model, **config})
        assert told.startswith(f"model_type '{model}' cannot be declared: {REFUSED[model]}. ")
    told = refusal({"model_type": "llava", "text_config": {"model_type": model}})
    assert f"with a text_config of '{model}' cannot be declared: {REFUSED[model]}. " in told


def test_an_encoder_with_a_decoder_is_refused_whatever_its_type():
    told = refusal({"model_type": "t5", "is_encoder_decoder": True})
    assert "also caches an encoder's keys and values" in told


NEEDED = {
    "deepseek_v3": "num_hidden_layers kv_lora_rank qk_rope_head_dim",
    "deepseek_v32": "num_hidden_layers kv_lora_rank qk_rope_head_dim index_head_dim",
    "deepseek_v4": "num_hidden_layers head_dim qk_rope_head_dim sliding_window index_head_dim "
    "compress_ratios",
    "gpt_oss_120b": "num_hidden_layers num_key_value_heads head_dim sliding_window layer_types",
    "kimi_linear_48b": "num_hidden_layers kv_lora_rank qk_rope_head_dim linear_attn_config",
    "llama_3_1_70b": "num_hidden_layers hidden_size num_attention_heads",
    "qwen3_235b": "num_hidden_layers num_key_value_heads",
    "qwen3_next_80b": "num_hidden_layers num_key_value_heads head_dim full_attention_interval "
    "linear_conv_kernel_dim linear_key_head_dim linear_num_value_heads",
}
BROKEN = [..., -1, 0, True, 2.0, "64", [], [64], {"a": 1}, 1 << 40]


@pytest.mark.parametrize("held", BROKEN, ids=repr)
@pytest.mark.parametrize(
    ("name", "field"), [(n, field) for n, fields in NEEDED.items() for field in fields.split()]
)
def test_a_field_that_is_missing_or_wrong_is_named_with_what_is_expected(name, field, held):
    config = config_of(name, **{field: held})
    with pytest.raises(ValueError, match=f"{config['model_type']} config: .*{field}.* must "):
        declare(config)


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("gpt_oss_120b", {"layer_types": ["chunked_attention"] * 36}, "'sliding_attention'"),
        ("gpt_oss_120b", {"layer_types": ["full_attention"] * 35}, "a list of 36 values"),
        ("llama_3_1_70b", {"num_attention_heads": 60}, "60 heads do not divide 8192"),
        ("deepseek_v32", {"index_topk_freq": 4}, "indexer_types must be"),
        ("deepseek_v4", {"compress_ratios": [8] * 43}, "values of 0, 4, 128, got 8"),
        ("deepseek_v4", {"compress_ratios": [0] * 42}, "43 numbers or more"),
        ("deepseek_v4", {"qk_rope_head_dim": 512}, "from 1 to 511"),
        ("deepseek_v4", {"qk_rope_head_dim": ..., "partial_rotary_factor": 0.3}, "whole part"),
        ("deepseek_v4", {"layer_types": ["sliding_attention"] * 43}, "compress_rates must be"),
        ("kimi_linear_48b", {"num_hidden_layers": 28}, "kda_layers leave out"),
        ("kimi_linear_48b", {"linear_attn_config": {"kda_layers": [0]}}, "1 to 27, got 0"),
        ("deepseek_v3", {"num_mtp_layers": 2}, "must be equal"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(name, changes, told):
    with pytest.raises(ValueError, match=told):
        (declare_draft if "num_mtp_layers" in changes else declare)(config_of(name, **changes))


@pytest.mark.parametrize(
    ("text", "told"),
    [(b"[1]", "must hold a JSON object"), (b"{", "not JSON"), (b"\xff", "not JSON")],
)
def test_a_file_that_is_no_config_is_refused_by_name(tmp_path, text, told):
    path = tmp_path / "some.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=f"some.json: {told}"):
        declare(path)
    for missing in (tmp_path / "none", "no_such_name", "\0", "x" * 5000):
        with pytest.raises(
            ValueError, match=r"Give the path of a config\.json or of its directory"
        ):
            declare(missing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty.config\.json': No such file or directory"):
        declare(tmp_path / "empty")
    for other in (object(), None, [], 7):
        with pytest.raises(
            ValueError, match=r"^config: give config\.to_dict\(\) of a transformers"
        ):
            declare(other)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=6,
)


@given(st.data())
def test_any_config_is_declared_or_refused_with_its_type_named(data):
    config = config_of(data.draw(st.sampled_from(shipped())))
    config["layer_types"] = ...
    for field in data.draw(st.lists(st.sampled_from([*config]), max_size=3)):
        if field != "model_type":
            config[field] = data.draw(ANY)
    config = {k: v for k, v in config.items() if v is not ...}
    for read in (declare, declare_draft):
        try:
            declared = read(config)
        except ValueError as error:
            assert str(error).startswith(f"{config['model_type']} config: "), error
        else:
            assert declared is None or declared.layers == tuple(sorted(declared.layers))
