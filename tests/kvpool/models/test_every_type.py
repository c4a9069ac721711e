"""Every causal-LM type of transformers: the declared pool holds what transformers caches, and a
model over it computes the same bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # noqa: E402

from kvpool import Allocator  # noqa: E402
from kvpool.integrations.transformers import PoolCache, pool_for  # noqa: E402
from kvpool.layout.dtypes import ITEMSIZE  # noqa: E402
from kvpool.models import REFUSED, known  # noqa: E402
from kvpool.models.families import FAMILIES, WRAPPERS  # noqa: E402
from tests.kvpool.models.table import AS_TEXT, main  # noqa: E402
from tests.kvpool.models.tiny import TEXTS, TYPES, kept, own_cache, run, tiny  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = 21
DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
DECLARED = [name for name in TYPES if name in (*FAMILIES, *WRAPPERS)]
RUN = [*(name for name in DECLARED if name not in AS_TEXT), *TEXTS]
# one of each pool, kind of layers and rule; all with --long
FEW = (
    "bailing_hybrid",
    "dots3_note_text",
    "falcon",
    "gemma2",
    "gemma4_text",
    "glm_moe_dsa",
    "gpt2",
    "gpt_oss",
    "kimi_linear",
    "glm5_next_text",
    "longcat_flash",
    "mistral_large4_text",
    "llama4_text",
    "inkling_text",
    "mimo_v2_flash",
    "minimax_m3_vl_text",
    "modernbert-decoder",
    "nemotron_h",
    "qwen2",
    "qwen3_next",
    "qwen3_vl_text",
    "zaya",
)
TRIED = [pytest.param(name, marks=() if name in FEW else pytest.mark.long) for name in RUN]


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
    kind = PoolCache
    if name == "minimax":
        from kvpool.integrations.minimax import MiniMaxPoolCache as kind
    for chunks in ((PROMPT - 1, 1), (5, 7, 1, 7, 1)):
        ours = kind.new(pool, Allocator(pool))
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
