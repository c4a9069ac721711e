"""From a model's config to its pool: the bytes and layers of hand arithmetic."""

from __future__ import annotations

import json

import pytest

from kvpool import MHA, PoolLayout, Shard
from kvpool.models import declare, declare_draft, shipped
from tests.kvpool.models.configs import FEW, config_of, full, kept, windowed

# name: kinds of state, layers, bytes a token in bf16, in fp8
V4_FP8 = 21 * (37440 / 256 + 132 / 4) + 20 * 1728 / 256  # pages padded to whole rows of 576
SHIPPED = {
    "deepseek_v3": ("MLA", 61, 61 * 1152, 61 * 656),
    "deepseek_v32": ("MLA IndexKey", 61, 61 * (1152 + 132), 61 * (656 + 132)),
    "deepseek_v4": ("V4Latent IndexKey Ring", 43, 21 * (1024 + 132) / 4 + 20 * 1024 / 128, V4_FP8),
    "gpt_oss_120b": ("MHA", 36, 18 * 2 * 8 * 64 * 2, 18 * 2 * 8 * (64 + 4)),
    "kimi_linear_48b": ("MLA LinearState", 27, 7 * 1152, 7 * 656),
    "llama_3_1_70b": ("MHA", 80, 80 * 2 * 8 * 128 * 2, 80 * 2 * 8 * (128 + 4)),
    "qwen3_235b": ("MHA", 94, 94 * 2 * 4 * 128 * 2, 94 * 2 * 4 * (128 + 4)),
    "qwen3_next_80b": ("MHA LinearState", 48, 12 * 2 * 2 * 256 * 2, 12 * 2 * 2 * (256 + 4)),
}
every_shipped = pytest.mark.parametrize("name", SHIPPED)


def small(declaration, **more):
    return declaration.build(**{"packing": "fp8", **FEW, **more})


def layers_with(pool, role):
    return tuple(r.layer for r in pool.layout.regions if r.role == role)


def test_the_shipped_configs():
    assert shipped() == tuple(SHIPPED)


@every_shipped
def test_a_token_takes_the_bytes_computed_by_hand(name):
    kinds, layers, bf16, fp8 = SHIPPED[name]
    declared = declare(name)
    assert {kind.__name__ for kind in declared.kinds} == {*kinds.split()}
    assert declared.layers == tuple(range(layers))
    assert (declared.owner, declared.total_kv_layers) == ("target", layers)
    assert small(declared, packing=None, dtype="bf16").bytes_per_token == bf16
    assert small(declared).bytes_per_token == fp8


@every_shipped
def test_a_declared_pool_has_its_own_layout(name):
    pool = small(declare(name))
    pool.check_integrity()
    assert pool.layout.model == config_of(name)["model_type"]
    assert {region.owner for region in pool.layout.regions} == {"target"}


def test_a_declaration_says_in_a_line_what_equal_layers_keep():
    heads = "MHA(num_kv_heads=8, head_dim=64, v_head_dim=None, order='nhd')"
    assert str(declare("gpt_oss_120b")) == (
        "gpt_oss (target): LayeredPool, 36 layers\n"
        f"layers 0, 2, ..., 34: {heads}, a window of 127\nlayers 1, 3, ..., 35: {heads}"
    )
    assert str(declare("deepseek_v3")).splitlines()[1:] == [
        "layers 0-60: MLA(kv_lora_rank=512, qk_rope_head_dim=64)"
    ]
    assert "compress_ratios: (0, 0, 4, 128, " in str(declare("deepseek_v4"))


def test_every_fourth_layer_of_qwen3_next_has_full_attention():
    pool = small(declare("qwen3_next_80b"))
    assert layers_with(pool, "k") == tuple(range(3, 48, 4))
    slot = [b.item_bytes for b in pool.layout.buffers if b.space == "state"]
    assert len(slot) == 2 * 36
    assert sum(slot) == 36 * ((16 * 128 + 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 4)


def test_kimi_counts_its_layers_from_one():
    pool = small(declare("kimi_linear_48b"))
    assert layers_with(pool, "latent") == (3, 7, 11, 15, 19, 23, 26)
    slot = [b.item_bytes for b in pool.layout.buffers if b.space == "state"]
    assert sum(slot) == 20 * (3 * 32 * 128 * 3 * 2 + 32 * 128 * 128 * 4)


def test_every_other_layer_of_gpt_oss_has_a_window():
    pool = small(declare("gpt_oss_120b"))
    assert layers_with(pool, "swa.k") == tuple(range(0, 36, 2))
    assert layers_with(pool, "k") == tuple(range(1, 36, 2))
    assert pool.layout.space_by_name["swa"].window == 127  # and the token itself


def test_deepseek_v4_has_compressed_entries_by_ratio_and_a_window_everywhere():
    pool = small(declare("deepseek_v4"))
    assert layers_with(pool, "swa.latent") == tuple(range(43))
    assert layers_with(pool, "c4.latent") == layers_with(pool, "c4.index_key")
    assert layers_with(pool, "c4.latent") == tuple(range(2, 43, 2))
    assert layers_with(pool, "c128.latent") == tuple(range(3, 43, 2))


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("deepseek_v3", {"latent", "rope"}),
        ("deepseek_v32", {"latent", "rope", "index_key", "index_key.scale"}),
        ("deepseek_v4", {"swa.latent", "swa.rope", "swa.latent.scale"}),
    ],
)
def test_a_draft_layer_comes_after_the_last_and_shares_the_targets_ids(name, roles):
    layers = SHIPPED[name][1]
    draft = declare_draft(name)
    assert (draft.layers, draft.owner, draft.total_kv_layers) == ((layers,), "draft", layers)
    fp8 = {"latent.scale"} if name != "deepseek_v4" else set()
    pool = small(draft)
    assert {region.role for region in pool.layout.regions} == roles | fp8
    merged = PoolLayout.merge(small(declare(name)).layout, pool.layout)
    assert len(merged.spaces) == len(small(declare(name)).layout.spaces)


@pytest.mark.parametrize("name", ["llama_3_1_70b", "qwen3_next_80b", "kimi_linear_48b"])
def test_a_config_that_names_no_draft_layers_has_no_draft(name):
    assert declare_draft(name) is None


def test_qwen3_next_has_a_full_attention_draft_if_its_config_says_so():
    draft = declare_draft(config_of("qwen3_next_80b", num_nextn_predict_layers=2))
    assert (draft.kinds, draft.layers) == ({MHA}, (48, 49))
    assert small(draft).bytes_per_token == 2 * 2 * 2 * (256 + 4)


def test_a_draft_whose_attention_is_not_known_is_refused():
    with pytest.raises(ValueError, match="llama config: 1 draft layers"):
        declare_draft(config_of("llama_3_1_70b", num_nextn_predict_layers=1))


def test_draft_ratios_that_are_too_many_are_refused():
    config = config_of("deepseek_v4")
    config["compress_ratios"] += [0, 0]
    with pytest.raises(ValueError, match="43 entries, or 44 with the draft's, got 46"):
        declare_draft(config)
    assert declare(config).arguments["compress_ratios"] == (0, 0, *(4, 128) * 20, 4)


def test_a_path_a_directory_a_name_and_a_dict_say_the_same(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of("deepseek_v32")))
    given = ["deepseek_v32", config_of("deepseek_v32"), tmp_path, str(tmp_path / "config.json")]
    assert all(declare(config) == declare(given[0]) for config in given)


def test_a_stage_a_shard_and_a_page_size_are_given_when_building():
    declared = declare("llama_3_1_70b")
    pool = small(declared, layers=range(40, 80), shard=Shard(1, 4), page_size=16)
    assert (pool.start_layer, pool.end_layer, pool.total_kv_layers) == (40, 80, 80)
    assert pool.bytes_per_token == 40 * 2 * 2 * (128 + 4)
    assert (pool.page_size, declared.page_size, declare("deepseek_v4").page_size) == (16, 64, 256)


# windows


DENSE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
DENSE |= {"num_hidden_layers": 4}
WINDOWS = [
    ("mixtral", {}, ()),
    ("mistral", {"sliding_window": None}, ()),
    ("mistral", {"sliding_window": 32}, (0, 1, 2, 3)),
    ("mixtral", {"sliding_window": 32}, (0, 1, 2, 3)),
    ("qwen3", {"sliding_window": 32, "max_window_layers": 1}, ()),
    (
        "qwen3",
        {"sliding_window": 32, "max_window_layers": 1, "use_sliding_window": True},
        (1, 2, 3),
    ),
    ("qwen3", {"sliding_window": 32, "max_window_layers": 4, "use_sliding_window": True}, ()),
    ("qwen3_moe", {"sliding_window": 32, "use_sliding_window": True}, (0, 1, 2, 3)),
    ("gemma3_text", {"sliding_window": 32, "sliding_window_pattern": 2}, (0, 2)),
    ("gemma3_text", {"sliding_window": 32, "sliding_window_pattern": 1}, ()),
]


@pytest.mark.parametrize(("model", "changes", "windowed_layers"), WINDOWS)
def test_layers_keep_a_window_where_the_config_says_so(model, changes, windowed_layers):
    config = {"model_type": model, **DENSE, **changes}
    assert kept(config) == windowed(MHA(2, 16), 31, windowed_layers)


def test_gemma3_is_read_inside_text_config_with_the_defaults_that_published_configs_rely_on():
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
    declared = declare({"model_type": "gemma3", "text_config": {**text, "hidden_size": 2560}})
    windows = set(range(34)) - {5, 11, 17, 23, 29}
    assert declared.model == "gemma3"
    assert declared.arguments["states"] == windowed(MHA(4, 256), 1023, windows, count=34)


def test_the_first_llamas_have_a_kv_head_for_every_head():
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    assert kept({**config, "num_hidden_layers": 1}) == full(MHA(4, 16), 1)


def test_index_keys_lie_on_the_layers_whose_indexer_is_full():
    types = ["full", "shared", "shared", "full"]
    config = config_of("deepseek_v32", num_hidden_layers=4, indexer_types=types)
    assert layers_with(small(declare(config)), "index_key") == (0, 3)
    assert layers_with(small(declare(config)), "latent") == (0, 1, 2, 3)
    assert layers_with(small(declare_draft(config)), "index_key") == (4,)


def test_a_window_that_engines_read_differently_is_refused():
    config = config_of("qwen3_235b", use_sliding_window=True, sliding_window=32)
    with pytest.raises(ValueError, match=r"qwen3_moe config: .*max_window.*Give layer_types"):
        declare({**config, "max_window_layers": 47})
    types = ["full_attention"] * 47 + ["sliding_attention"] * 47
    states = kept({**config, "max_window_layers": 47, "layer_types": types})
    assert [n for n, (state,) in states.items() if state.window] == [*range(47, 94)]
