"""What the fields of a config say, by hand; what is not understood is refused by its name."""

from __future__ import annotations

import pytest

from kvpool import MHA, MLA, IndexKey, LayeredPool, State, kda, mamba2
from kvpool.models import declare
from tests.kvpool.models.configs import FEW, LLAMA, full, kept, published, windowed

SWA, FULL = "sliding_attention", "full_attention"
FEW = {**FEW, "dtype": "f32"}


def test_a_head_has_its_part_of_the_hidden_size_unless_it_is_given():
    assert kept({**LLAMA, "model_type": "qwen2"}) == full(MHA(2, 16))
    with pytest.raises(ValueError, match=r"qwen3 config: head_dim must be .* it is missing"):
        declare({**LLAMA, "model_type": "qwen3"})
    with pytest.raises(ValueError, match=r"qwen2 config: num_key_value_heads must .* missing"):
        declare({**LLAMA, "model_type": "qwen2", "num_key_value_heads": None})


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        ("gpt2", "num_key_value_heads", 2),
        ("gpt2", "head_dim", 12),
        ("persimmon", "num_key_value_heads", 2),
        ("gpt_bigcode", "head_dim", 12),
        ("stablelm", "head_dim", 12),
    ],
)
def test_heads_that_models_of_a_type_never_have_are_refused(model, field, value):
    config = {**LLAMA, "model_type": model, "num_key_value_heads": 4}
    with pytest.raises(ValueError, match=f"{model} config: {field} must be .* do not read it"):
        declare({**config, field: value})
    with pytest.raises(ValueError, match=f"{model} config: {field} must be .* do not read it"):
        declare({**config, "per_layer_config": {"1": {field: value}}})
    same = {"num_key_value_heads": 4, "head_dim": 16}[field]
    assert declare({**config, field: same}) == declare(config)


def test_another_name_of_a_head_s_dim_is_not_enough():
    assert kept({**LLAMA, "attention_head_dim": 24, "head_dim": 24}) == full(MHA(2, 24))
    with pytest.raises(ValueError, match=r"llama config: head_dim must be .* it is missing"):
        declare({**LLAMA, "attention_head_dim": 24})


def test_two_names_of_a_rope_key_must_agree():
    config = {**LLAMA, "model_type": "glm4_moe_lite", "kv_lora_rank": 32, "qk_rope_head_dim": 8}
    assert declare({**config, "head_dim": 8}) == declare(config)
    with pytest.raises(
        ValueError, match="glm4_moe_lite config: head_dim must be qk_rope_head_dim, 8"
    ):
        declare({**config, "head_dim": 16})


@pytest.mark.parametrize("model", ["exaone4", "exaone_moe", "ministral", "mistral"])
def test_a_window_that_is_left_out_is_not_taken_for_none(model):
    """transformers has 4,096 then."""
    with pytest.raises(ValueError, match=f"{model} config: sliding_window must be given, or null"):
        declare({**LLAMA, "model_type": model})
    assert kept({**LLAMA, "model_type": model, "sliding_window": None}) == full(MHA(2, 16))


@pytest.mark.parametrize("field", ["swa_num_key_value_heads", "swa_head_dim"])
def test_heads_of_window_layers_are_not_guessed(field):
    config = {**LLAMA, "model_type": "inkling_text", "head_dim": 16, "swa_num_key_value_heads": 4}
    config |= {"swa_head_dim": 8, "sliding_window_size": 9, "conv_kernel_size": 4}
    config["layer_types"] = ["hybrid_sliding", "hybrid"] * 2
    assert kept(config)[0][0] == State(MHA(4, 8), 8)
    with pytest.raises(ValueError, match=f"inkling_text config: {field} must be a whole number"):
        declare({**config, field: None})


def test_layers_are_full_where_nothing_says_otherwise():
    assert kept({**LLAMA, "model_type": "cohere_compass_text"}) == full(MHA(2, 16))
    with pytest.raises(ValueError, match="cohere_compass_text config: sliding_window must be left"):
        declare({**LLAMA, "model_type": "cohere_compass_text", "sliding_window": 9})


def test_listed_types_of_layers_count_for_every_model():
    config = {**LLAMA, "layer_types": [SWA, FULL, FULL, SWA], "sliding_window": 9}
    assert kept(config) == windowed(MHA(2, 16), 8, (0, 3))


def test_single_layers_may_have_fields_of_their_own():
    declared = declare({**LLAMA, "per_layer_config": {"1": {"num_key_value_heads": 1}}})
    heads = [2, 1, 2, 2]
    states = {n: (State(MHA(count, 16)),) for n, count in enumerate(heads)}
    assert declared.arguments == {"states": states}
    pool = declared.build(page_size=4, **FEW)
    assert [pool.view("k", n).shape[2] for n in range(4)] == heads
    assert pool.bytes_per_token == sum(2 * count * 16 * 4 for count in heads)


REFUSED = {
    "num_kv_shared_layers": 2,
    "sliding_window": 9,
    "attention_chunk_size": 8,
    "kv_lora_rank": 16,
    "v_head_dim": 8,
    "swa_num_key_value_heads": 1,
    "global_head_dim": 32,
    "mamba_d_state": 16,
    "conv_L_cache": 3,
    "compress_ratios": [0, 4, 4, 4],
    "index_head_dim": 16,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "use_cla": True,
    "layers_block_type": ["mamba"] * 4,
    "use_bidirectional_attention": True,
    "layer_types": ["chunked_attention"] * 4,
    "per_layer_config": [1],
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_may_change_the_state_and_is_not_read_is_refused(name):
    with pytest.raises(ValueError, match=f"llama config: {name} must "):
        declare({**LLAMA, name: REFUSED[name]})
    neutral = [None, False] if name == "use_bidirectional_attention" else [None]
    for nothing in neutral:
        assert declare({**LLAMA, name: nothing}) == declare(LLAMA)


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"1": {"skip": ["attention"]}}, r"per_layer_config\.1\.skip must be left out"),
        ({"1": {"kv_lora_rank": 8}}, r"per_layer_config\.1\.kv_lora_rank must be left out"),
        ({"4": {"head_dim": 8}}, "with layers from 0 to 3"),
        ({"a": {"head_dim": 8}}, "an object of objects"),
    ],
)
def test_what_a_single_layer_may_not_have_is_named(own, told):
    with pytest.raises(ValueError, match=told):
        declare({**LLAMA, "per_layer_config": own})


def test_fields_that_cannot_concern_state_are_let_be():
    more = {"attention_bias": True, "rope_theta": 1e4, "use_cache": True, "q_lora_rank": 8}
    assert declare({**LLAMA, **more, "my_own_field": 3}) == declare(LLAMA)


def test_names_of_one_number_must_agree():
    renamed = {**LLAMA, "model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 64}
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "num_key_value_heads"):
        del renamed[name]
    assert kept(renamed) == full(MHA(4, 16))
    with pytest.raises(ValueError, match="mean the same and must be equal"):
        declare({**renamed, "num_hidden_layers": 5})


def test_a_wrapper_of_an_unknown_type_is_read_as_its_text_model():
    declared = declare({"model_type": "llava", "vision_config": {}, "text_config": LLAMA})
    assert declared.arguments == declare(LLAMA).arguments
    with pytest.raises(ValueError, match=r"llava' with a text_config of 'bert' cannot be declared"):
        declare({"model_type": "llava", "text_config": {"model_type": "bert"}})


def test_windows_that_differ_have_spaces_of_their_own():
    held = {"1": {"sliding_window": 5}}
    declared = declare(
        {**LLAMA, "layer_types": [SWA, SWA, FULL, FULL], "sliding_window": 9,
         "per_layer_config": held}
    )  # fmt: skip
    layout = declared.build(page_size=4, **FEW).layout
    assert {s.name: s.window for s in layout.spaces} == {"kv": None, "swa4": 4, "swa8": 8}
    assert {r.role for r in layout.regions} == {"k", "v", "swa.k", "swa.v"}


def test_a_layer_may_keep_several_kinds():
    linear = mamba2(4, 3, 2, 5, 4)
    states = {0: (State(MHA(2, 16)), State(linear)), 2: (State(MLA(16, 8)), State(IndexKey(16)))}
    pool = LayeredPool(states=states, layers=range(3), page_size=4, index_packing="f32", **FEW)
    roles = {n: {r.role for r in pool.layout.regions if r.layer == n} for n in range(3)}
    assert roles[0] == {"k", "v", *linear.inputs}
    assert roles[1] == set()
    assert roles[2] == {"latent", "rope", "index_key"}


@pytest.mark.parametrize("state", [(mamba2(4, 3, 2, 5, 4), 6), (MHA(2, 16), 0)])
def test_a_window_that_cannot_be_is_refused(state):
    with pytest.raises(ValueError, match="Give 1 or more, and none for a state that a req"):
        State(*state)


GEMMA4 = published("gemma4")
MIMO = published("mimo")
PUBLISHED = [
    (GEMMA4, windowed(MHA(2, 32), 8, (0, 1, 2), MHA(2, 16))),
    ({**GEMMA4, "attention_k_eq_v": True}, windowed(MHA(1, 32), 8, (0, 1, 2), MHA(2, 16))),
    (MIMO, windowed(MHA(2, 24, 16), 8, (1, 2), MHA(3, 24, 16))),
]


@pytest.mark.parametrize(("config", "states"), PUBLISHED)
def test_full_and_window_layers_of_published_configs_have_heads_of_their_own(config, states):
    assert kept(config) == states


LARGE4 = published("large4")


def test_a_layer_without_rotation_has_no_rope_key_and_one_that_reads_another_s_latents_has_none():
    declared = declare(LARGE4)
    states = {
        0: (State(MLA(32, 8)), State(IndexKey(16))),
        1: (State(MLA(32, 0)),),
        2: (State(IndexKey(16)),),
    }
    assert declared.arguments == {"states": states}
    pool = declared.build(page_size=4, index_packing="f32", **FEW)
    roles = {n: {r.role for r in pool.layout.regions if r.layer == n} for n in range(4)}
    assert roles == {0: {"latent", "rope", "index_key"}, 1: {"latent"}, 2: {"index_key"}, 3: set()}
    own = {**LARGE4, "kv_source_layers": None, "no_rope_layers": None, "indexer_types": None}
    rows = [layer[0].kind for layer in kept(own).values()]
    assert rows == [MLA(32, 8)] * 3 + [MLA(32, 0)]  # all but every fourth rotate
    narrow = kept({**LARGE4, "per_layer_config": {"1": {"kv_lora_rank": 16}}})
    assert narrow[1] == (State(MLA(16, 0)),)


@pytest.mark.parametrize("sources", [[0, 1, 3, 3], [0, 0, 1, 3], [0, 1, 2], [0, 1, 2, 4]])
def test_layers_that_read_a_later_one_or_one_without_latents_are_refused(sources):
    with pytest.raises(ValueError, match="mistral_large4_text config: kv_source_layers must"):
        declare({**LARGE4, "kv_source_layers": sources})


GLM5 = published("glm5")


def test_every_fourth_layer_of_glm5_has_latents_and_the_rows_that_its_indexer_pools():
    linear, row = (State(kda(2, 8, 4)),), (State(MLA(32, 0)), State(IndexKey(16, pooled=True)))
    listed = ["linear_attention"] * 3 + [FULL]  # as published
    for config in (GLM5, {**GLM5, "layer_types": listed}):
        assert kept(config) == {0: linear, 1: linear, 2: linear, 3: row}
    pool = declare(config).build(page_size=4, **{**FEW, "dtype": None, "packing": "bf16"})
    assert pool.view("index_key", 3).shape == (2, 4, 33)
    assert pool.layout.region_by_key["target", 3, "index_key"].dtype == "bfloat16"
    assert kept({**GLM5, "layer_types": [FULL] * 4}) == dict.fromkeys(range(4), row)
    with pytest.raises(ValueError, match="qk_rope_head_dim must be a whole number from 0 to 0"):
        declare({**GLM5, "qk_rope_head_dim": 8})


STEP = published("step")


def step(groups=2, dim=16, **more):
    own = {"num_attention_heads": 6, "num_attention_groups": groups, "head_dim": dim}
    fields = {**STEP, "attention_other_setting": own, **more}
    return {name: value for name, value in fields.items() if value is not ...}


def test_window_layers_of_step_have_more_query_heads_and_a_list_of_layers_may_end_with_drafts():
    for config in (step(), {"model_type": "step3p7", "text_config": step()}):
        assert kept(config) == windowed(MHA(2, 16), 8, (1, 2, 3))
    with pytest.raises(ValueError, match="layer_types must be a list of 4 values"):
        declare(step(num_nextn_predict_layers=2))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"groups": 1}, r"attention_other_setting\.num_attention_groups must be 2, .* got 1"),
        ({"dim": 8}, r"attention_other_setting\.head_dim must be 16, .* got 8"),
        ({"num_key_value_heads": 4}, "num_attention_groups must be num_key_value_heads, 4, got 2"),
        ({"num_attention_groups": ...}, "num_key_value_heads must be .* it is missing"),
    ],
)
def test_kv_heads_of_step_that_contradict_each_other_are_refused(changes, told):
    with pytest.raises(ValueError, match=f"step3p5 config: {told}"):
        declare(step(**changes))


def test_the_letters_of_nemotron_h_are_its_layers():
    config = {**LLAMA, "model_type": "nemotron_h", "head_dim": 16, "num_hidden_layers": 6}
    config |= {"hybrid_override_pattern": "M-M*-E", "mamba_num_heads": 8, "mamba_head_dim": 16}
    config |= {"n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4}
    linear = (State(mamba2(8, 16, 2, 16, 4)),)
    assert kept(config) == {0: linear, 2: linear, 3: (State(MHA(2, 16)),)}
    assert declare(config).layers == tuple(range(6))
