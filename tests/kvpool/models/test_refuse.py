"""Configs that cannot be declared: the model type, the field and what is expected are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from kvpool.models import declare, declare_draft, known, shipped

CONFIGS = Path(__file__).parents[3] / "kvpool" / "models" / "configs"


def config_of(name, **changes):
    held = json.loads((CONFIGS / f"{name}.json").read_text())
    return {k: v for k, v in {**held, **changes}.items() if v is not ...}


@pytest.mark.parametrize("config", [{}, {"model_type": "no_such_type"}, {"model_type": ["llama"]}])
def test_an_unknown_type_lists_the_known_and_says_how_to_declare_by_hand(config):
    with pytest.raises(ValueError) as caught:
        declare(config)
    told = str(caught.value)
    assert all(model in told for model in known())
    assert all(word in told for word in ("MHAPool", "KVPool", "declare()", "docs/add-a-pool.md"))


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
        with pytest.raises(ValueError, match="nor a shipped config"):
            declare(missing)
    with pytest.raises(ValueError, match="to_dict"):
        declare(object())


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
