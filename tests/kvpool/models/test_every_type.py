"""Every causal-LM type of transformers: the declared pool holds what transformers' own model of it
caches, element by element, and a model over it computes the same bits.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # noqa: E402

from kvpool import Allocator  # noqa: E402
from kvpool.integrations.transformers import PoolCache, pool_for  # noqa: E402
from kvpool.layout.dtypes import ITEMSIZE  # noqa: E402
from kvpool.models import REFUSED, declare, declare_draft, known, shipped  # noqa: E402
from kvpool.models.families import DRAFTS, FAMILIES, WRAPPERS  # noqa: E402
from tests.kvpool.models.configs import FEW, config_of  # noqa: E402
from tests.kvpool.models.table import AS_TEXT, main  # noqa: E402
from tests.kvpool.models.tiny import TEXTS, TYPES, kept, own_cache, run, tiny  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = 21
DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
DECLARED = [name for name in TYPES if name in (*FAMILIES, *WRAPPERS)]
RUN = [*(name for name in DECLARED if name not in AS_TEXT), *TEXTS]
# one of each pool, kind of layers and rule; all with --long
QUICK = (
    *("bailing_hybrid", "dots3_note_text", "falcon", "gemma2", "gemma4_text", "glm_moe_dsa"),
    *("gpt2", "gpt_oss", "kimi_linear", "glm5_next_text", "longcat_flash", "mistral_large4_text"),
    *("llama4_text", "inkling_text", "mimo_v2_flash", "minimax_m3_vl_text", "modernbert-decoder"),
    *("nemotron_h", "qwen2", "qwen3_next", "qwen3_vl_text", "zaya"),
)
TRIED = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in RUN]


def prompt():
    return torch.randint(1, 128, (1, PROMPT), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", TRIED)
def test_a_model_over_a_declared_pool_caches_and_computes_the_same(name):
    model = tiny(name)
    theirs = own_cache(model)
    run(model, theirs, prompt(), (PROMPT - 1, 1))
    pool = pool_for(
        model.config, dtype="f32", page_size=4, num_pages=20, num_window_pages=20, num_slots=4
    )
    spaces = pool.layout.space_by_name
    unread = int(name != "zaya")
    for number in pool.layers:
        full = swa = tokens = once = 0
        for region in (r for r in pool.layout.regions if r.layer == number):
            space = spaces[pool.layout.buffer_of(region).space]
            count = region.nbytes // ITEMSIZE[region.dtype]
            if space.per_request:
                once += count
                continue
            count //= region.axis("entry").size
            tokens = space.window or tokens
            full, swa = full + count * space.grows, swa + count * (not space.grows)
        assert (full, swa, tokens, once) == kept(theirs, number, PROMPT, unread), f"layer {number}"
    for chunks in ((PROMPT - 1, 1), (5, 7, 1, 7, 1)):
        ours = PoolCache.new(pool, Allocator(pool))
        reference = run(model, own_cache(model), prompt(), chunks)
        for step, (a, b) in enumerate(zip(run(model, ours, prompt(), chunks), reference)):
            assert torch.equal(a, b), f"chunk {step} of {chunks}"
        del ours


# no model of them keeps the keys of a text: encoders, models of images and of audio
OTHER = {"embedding_gemma2_text", "kyutai_speech_to_text", "sam3_lite_text", "speech_to_text"}
OTHER |= {"pp_formulanet_text", "qwen3_omni_moe_talker_text", "t5gemma2_text"}


def test_every_text_type_of_this_transformers_is_declared_or_refused_by_name():
    names = {name for name in CONFIG_MAPPING_NAMES if name.endswith("_text")} | {*TYPES}
    assert names - OTHER - {*known(), *REFUSED} == set()
    assert {*known()} & {*REFUSED} == set()


def test_the_document_names_the_types_of_this_transformers():
    assert DOCUMENT.read_text() == main(), "python -m tests.kvpool.models.table > docs/models.md"


# what a declared pool holds of deepseek_v4, and what configs of transformers say

TOKENS, WINDOW = 9, 5
V4 = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
V4 |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}
V4 |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
V4 |= {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4, "qk_rope_head_dim": 8}
V4 |= {"sliding_window": WINDOW, "q_lora_rank": 8, "o_lora_rank": 8, "o_groups": 2}
V4 |= {"compress_ratios": [0, 4, 128, 4], "num_nextn_predict_layers": 1}


def elements(layer: Any) -> dict[str, int]:
    """Numbers that a cache layer keeps, by the pool's space: of a token or an entry."""
    counts = {"swa": layer.keys.shape[1] * layer.keys.shape[3]}  # one vector is key and value
    compressed = getattr(layer, "compressed_kv", None)
    if compressed is not None:
        name = "c4" if "indexer" in compressed else "c128"
        counts[name] = sum(x.shape[-1] for x in compressed.values())
        windows = [*layer.buffer_kv.values(), *layer.buffer_gate.values()]
        counts[f"{name}.ring"] = sum(x.shape[-1] for x in windows)
    return counts


def test_a_declared_pool_holds_what_deepseek_v4_caches():
    """For all other types, see above."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("deepseek_v4", **V4)
    net = transformers.AutoModelForCausalLM.from_config(config).eval()
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        net(torch.arange(3, 3 + TOKENS)[None], past_key_values=cache, use_cache=True)
    declared = declare(config.to_dict())
    layout = declared.build(dtype="f32", index_packing="f32", **FEW).layout
    assert declared.layers == tuple(range(len(cache.layers)))
    for number, layer in enumerate(cache.layers):
        assert layer.keys.equal(layer.values)
        counts: Counter[str] = Counter()
        for region in (r for r in layout.regions if r.layer == number):
            count = region.nbytes // ITEMSIZE[region.dtype] // region.axis("entry").size
            counts[layout.space_of(region).name] += count
        assert counts == elements(layer), f"layer {number}"


@pytest.mark.parametrize("name", shipped())
def test_a_published_config_says_the_same_as_transformers_writes_of_it(name):
    raw = config_of(name)
    written = transformers.AutoConfig.for_model(**raw).to_dict()
    assert declare(written) == declare(raw)
    assert declare_draft(written) == declare_draft(raw)


UNEVEN = "96 heads do not divide a hidden size of 4096"
OWN_DEFAULTS = {  # of fields that must be given, or that contradict each other
    "emu3_text_model": "known to transformers as a part of emu3",
    "glm4_moe": UNEVEN,
    "glm4v_moe_text": UNEVEN,
    "qwen3_omni_moe_text": "28 heads do not divide a hidden size of 2048",
    "lfm2_moe": "its layer_types must be given",
}


@pytest.mark.parametrize("model", sorted({*known()} - {*OWN_DEFAULTS}))
def test_the_defaults_of_transformers_are_declared(model):
    config = transformers.AutoConfig.for_model(model)
    layers = len(transformers.DynamicCache(config=config).layers)
    assert declare(config.to_dict()).layers == tuple(range(layers))
    if model in DRAFTS:
        draft = declare_draft(config.to_dict())
        assert draft is None or draft.layers == (layers,)
        assert (draft is not None) == (model in ("deepseek_v3", "deepseek_v4"))
