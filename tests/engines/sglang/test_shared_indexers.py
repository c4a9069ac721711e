"""DSA whose layers share an indexer (GLM-5): SGLang's pools keep index keys of the layers that have
one, by its own reading of the model's configuration. What a drafter starts from comes along.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.configs.model_config import dsa_layer_skips_topk
from sglang.srt.disaggregation.utils import MetadataBuffers, get_dsa_seed_metadata_dim
from sglang.srt.speculative import eagle_disaggregation

from disagg.connectors.conventions import conventions
from disagg.connectors.sglang.metadata import read_row, write_row
from disagg.connectors.source import FIRST_TOKEN
from disagg.plan import IncompatibleLayouts, plan
from tests.engines.sglang import sides
from tests.engines.sglang.pairings import side
from tests.engines.sglang.sides import described, hand_over

LAYERS, TOKENS = 8, 150
WHOLE, HALVES, QUARTERS = (0, 8), (0, 3, 8), (0, 2, 4, 6, 8)
GLM5 = SimpleNamespace(
    architectures=["GlmMoeDsaForCausalLM"], index_topk=64, num_hidden_layers=LAYERS,
    index_share_for_mtp_iteration=True,
)  # fmt: skip
FORMS = {
    "pattern": ({"index_topk_pattern": "FSSSFSSS"}, {0, 4}),
    "every fourth": ({"index_topk_freq": 4}, {0, 1, 5}),
    "every fourth behind three": (
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {0, 1, 2, 6},
    ),
    "types": ({"indexer_types": ["full", "shared"] * 4}, {0, 2, 4, 6}),
    "of LongCat": ({"cli_factor": 2}, {0, 2, 4, 6}),
    "of DeepSeek-V3.2": ({}, {*range(LAYERS)}),
}


@pytest.fixture(autouse=True)
def one_rank():
    with sides.alone():
        yield


def stages(config, borders, seed, fp8=False):
    """A rank of each stage. One without any indexer has no index keys at all."""
    made = []
    for start, end in pairwise(borders):
        shared = [n for n in range(end - start) if dsa_layer_skips_topk(config, start + n)]
        made.append(side(sides.dsa(end - start, start, fp8, shared), seed, TOKENS))
    return made


def config_of(form):
    return SimpleNamespace(**vars(GLM5), **FORMS[form][0])


@pytest.mark.parametrize("form", FORMS)
def test_layers_with_an_indexer_have_index_keys(form):
    (whole,) = stages(config_of(form), WHOLE, 1)
    layout = described(whole, LAYERS).layout
    assert {r.layer for r in layout.regions if r.role == "latent"} == {*range(LAYERS)}
    for role in ("index_key", "index_key.scale"):
        assert {r.layer for r in layout.regions if r.role == role} == FORMS[form][1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("there", "here"), [(WHOLE, WHOLE), (QUARTERS, HALVES), (WHOLE, QUARTERS)], ids=str
)
def test_a_request_moves_between_stages(form, there, here):
    config = config_of(form)
    pair = stages(config, there, 1, fp8=True), stages(config, here, 2, fp8=True)
    assert hand_over(*pair, layers=LAYERS)


def test_a_draft_has_an_indexer_of_its_own():
    config = config_of("pattern")
    pair = [stages(config, borders, n) for n, borders in enumerate((HALVES, WHOLE))]
    for ranks in pair:
        ranks[-1] = ranks[-1]._replace(draft=sides.dsa(1, fp8=False))
    assert hand_over(*pair, layers=LAYERS)


def test_layers_of_a_hybrid_share_an_indexer():
    pair = [side(sides.hybrid(64, full="dsa", layers=12, skip=(7,)), n, TOKENS) for n in range(2)]
    keys = {r.layer for r in described(pair[0], 12).layout.regions if r.role == "index_key"}
    assert keys == {3, 11}
    assert hand_over(pair[:1], pair[1:], layers=12)


def test_another_pattern_is_refused_by_layer_or_by_its_name():
    config, other = (config_of(form) for form in ("pattern", "types"))
    there, here = (described(stages(one, WHOLE, 1)[0], LAYERS).layout for one in (config, other))
    words = r"target layers 2, 6 index_key: prefill offers no such region \(it holds layers 0, 4\)"
    with pytest.raises(IncompatibleLayouts, match=words):
        plan([there], here)
    assert plan([here], there)  # prefill has more: only the model's configuration tells
    pattern = {"index_topk_pattern": "FFFFFSSS"}
    same, differs = (conventions({**vars(config), **more}) for more in ({}, pattern))
    assert {name for name in same if same[name] != differs[name]} == {"index_topk_pattern"}


# the seeds of a drafter: positions of the prompt that its first step looks at


def buffers(config):
    more = {"max_sampling_mask_tokens": 8, "hidden_size": 16, "hidden_states_dtype": torch.float32}
    width = get_dsa_seed_metadata_dim(config)
    return MetadataBuffers(4, output_dsa_topk_indices_dim=width, **more)


def told(prefill, row, room, seeds):
    """A request's row, as SGLang's prefill writes it; without seeds, it does not speculate."""
    counts = dict.fromkeys(("", "_device", "_host", "_storage"), 0)
    drafted = (
        {} if seeds is None else {"output_topk_p": torch.ones(1), "output_topk_index": seeds[:1]}
    )
    request = SimpleNamespace(
        metadata_buffer_index=row, output_ids=[7], bootstrap_room=room, return_logprob=False,
        return_sampling_mask=False, get_mm_token_counts=lambda: (0, 0, 0),
        hidden_states_tensor=None if seeds is None else torch.ones(16),
        output_dsa_topk_indices=seeds,
        **{f"cached_tokens{name}": count for name, count in counts.items()}, **drafted,
    )  # fmt: skip
    prefill.set_buf(request)
    return read_row(prefill, row, drafts=seeds is not None)


def seeds_of(decode, row):
    return decode.get_buf(row)[-2]


def test_seeds_come_with_the_row_of_their_request():
    prefill, decode = buffers(GLM5), buffers(GLM5)
    seeds = torch.arange(64, dtype=torch.int32).flip(0)
    write_row(decode, 2, 5, told(prefill, 1, 5, seeds), drafts=True)
    assert torch.equal(seeds_of(decode, 2), seeds)
    assert (seeds_of(decode, 1) == -1).all()


@pytest.mark.parametrize("prefill", ["without a draft", "of a release without seeds", "of vLLM"])
def test_a_row_without_seeds_has_none_of_the_request_before(prefill):
    """SGLang's decode takes a row of values below 0 for none, and computes seeds of its own."""
    decode, drafting = buffers(GLM5), buffers(GLM5)
    write_row(decode, 2, 5, told(drafting, 0, 5, torch.arange(64, dtype=torch.int32)), drafts=True)
    other = buffers(GLM5 if prefill == "without a draft" else SimpleNamespace())
    values = {FIRST_TOKEN: 7} if prefill == "of vLLM" else told(other, 3, 6, None)
    write_row(decode, 2, 6, values, drafts=True)
    assert (seeds_of(decode, 2) == -1).all()
    assert decode.get_buf(2)[-1][0] == 6


def test_seeds_are_positions_which_decode_finds_in_its_own_pages(monkeypatch):
    """So they mean the same in pages of any size."""
    decode = buffers(GLM5)
    positions = torch.tensor([5, 149, 0] + [-1] * 61, dtype=torch.int32)
    write_row(decode, 1, 5, told(buffers(GLM5), 0, 5, positions), drafts=True)
    slots = torch.randperm(512, generator=torch.Generator().manual_seed(1)) + 1
    table = torch.zeros((2, 512), dtype=torch.int32)
    table[1] = slots
    request = SimpleNamespace(
        output_topk_p=torch.ones(1), output_topk_index=torch.ones(1),
        hidden_states_tensor=torch.ones(16), output_dsa_topk_indices=seeds_of(decode, 1),
    )  # fmt: skip
    batch = SimpleNamespace(
        reqs=[request], device="cpu", seq_lens=torch.tensor([TOKENS]), enable_overlap=False,
        req_pool_indices=torch.tensor([1]), model_config=SimpleNamespace(hf_config=GLM5),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
    )  # fmt: skip
    spec = SimpleNamespace(
        speculative_eagle_topk=1, enable_multi_layer_eagle=False,
        speculative_use_rejection_sampling=False,
    )  # fmt: skip
    monkeypatch.setattr(eagle_disaggregation, "get_spec", lambda: spec)
    monkeypatch.setattr(
        eagle_disaggregation, "async_h2d_stack", lambda tensors, device: torch.stack(tensors)
    )
    monkeypatch.setattr(
        eagle_disaggregation, "should_remap_pd_dsa_seed_to_local_slots", lambda: True
    )
    built = eagle_disaggregation.build_eagle_disagg_draft_input(batch, torch.tensor([7]), None)
    assert built.dsa_topk_indices[0, :3].tolist() == slots[[5, 149, 0]].tolist()
    assert (built.dsa_topk_indices[0, 3:] == -1).all()
