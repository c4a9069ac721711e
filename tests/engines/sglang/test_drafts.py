"""What SGLang's draft models keep moves with a request, through SGLang's queues and our KV manager,
sender and receiver; every byte is compared with SGLang's own indexing of its pools.

SGLang's CPU build runs no draft: none of its attention backends for one is torch's own, and those
for a CPU (intel_amx) need sgl_kernel.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from disagg.connectors.sglang.metadata import DRAFT
from tests.engines.sglang import oracle, queues, sides
from tests.engines.sglang.pairings import WINDOW, side
from tests.engines.sglang.queues import DECODE_ROW, PREFILL_ROW, Engine, Model

TOKENS, PAGES = 83, 24
ROPE = {"rope_theta": 1e4}
ALONE = "a draft model"
"""It reads tokens only: no hidden state comes with the first of them."""
EITHER = {"prefill": (True, False), "decode": (False, True), "both": (True, True)}


@pytest.fixture(autouse=True)
def one_rank():
    with sides.alone():
        yield


def mtp(target: Any, page: int) -> Any:
    """The draft of a hybrid: one layer of attention, and its target's slots by name."""
    more = {}
    if target.use_mla:
        more = {"use_mla": True, "kv_lora_rank": 32, "qk_rope_head_dim": 8}
    return memory_pool.HybridLinearKVPool(
        size=sides.size(page),
        dtype=torch.bfloat16,
        page_size=page,
        head_num=target.head_num,
        head_dim=8,
        full_attention_layer_ids=[0],
        mamba_pool=target.mamba_pool,
        device="cpu",
        **more,
    )


def windowed(page: int, layer: int) -> Any:
    """A module whose layer has a window, and is addressed as layers without one are."""
    pool = SWAKVPool(
        size=sides.size(page),
        size_swa=sides.size(page),
        page_size=page,
        dtype=torch.float16,
        head_num=4,
        head_dim=64,
        swa_attention_layer_ids=[layer],
        full_attention_layer_ids=[],
        token_to_kv_pool_class=memory_pool.MHATokenToKVPool,
        device="cpu",
        enable_memory_saver=False,
    )
    pool.swa_uses_full_indices = True
    return pool


def modules(target: Any, page: int) -> list[Any]:
    return [sides.mha(page, layers=1) for _ in range(3)]


Drafts = Callable[[Any, int], list[Any]]
MODELS: dict[str, tuple[Callable[[int], Any], Drafts, int]] = {  # target, draft, the draft's heads
    "eagle": (sides.mha, lambda _, page: [sides.mha(page, heads=2, layers=1)], 2),
    "eagle 3, latents": (sides.mla, lambda _, page: [sides.mha(page, layers=1)], 4),
    "mtp, latents": (sides.mla, lambda _, page: [sides.mla(page, layers=1)], 1),
    "mtp, three modules": (sides.mha, modules, 4),
    "mtp, windows": (sides.swa, lambda _, page: [windowed(page, n) for n in range(2)], 4),
    "mtp, window pages": (sides.swa, lambda _, page: [sides.swa(page, layers=2)], 4),
    "mtp, gated delta net": (sides.hybrid, lambda target, page: [mtp(target, page)], 4),
    "mtp, kimi": (
        lambda page: sides.hybrid(page, kind="kda", full="mla"),
        lambda target, page: [mtp(target, page)],
        1,
    ),
    ALONE: (sides.mha, lambda _, page: [sides.mha(page, layers=2, dim=16)], 4),
}


def engine(name: str, seed: int, page: int, drafts: bool) -> Engine:
    """One rank, whose draft has been filled too."""
    make, draft, heads = MODELS[name]
    target = make(page)
    pools = draft(target, page) if drafts else []
    rank = side(target, seed, TOKENS, PAGES, window=WINDOW if "window" in name else None)
    rank = rank._replace(draft=next(iter(pools), None), modules=tuple(pools[1:]))
    oracle.fill(rank, seed)
    layers = 8 if hasattr(target, "mamba_pool") else 4
    model = Model(heads=heads, hidden=64, fields=ROPE) if drafts else None
    kind = "STANDALONE" if name == ALONE else "EAGLE"
    return Engine(stages=[[rank]], model=Model(layers=layers), draft=model, speculation=kind)


def check_metadata(there: Any, here: Any, before: dict[str, torch.Tensor], who: str) -> None:
    """Decode's row has prefill's values, and no other row has changed. `before`: decode's. `who`
    has a draft that reads hidden states.
    """
    for name, sent in queues.tensors_of(there.metadata_buffers).items():
        got, expected = getattr(here.metadata_buffers, name), before[name].clone()
        if name not in DRAFT or who == "both":
            expected[DECODE_ROW] = sent[PREFILL_ROW]
        elif who == "decode":
            expected[DECODE_ROW] = 0
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), name


@pytest.mark.parametrize("who", EITHER)
@pytest.mark.parametrize("name", MODELS)
def test_a_request_moves_with_its_draft_and_first_hidden_state(name, who, monkeypatch, caplog):
    missing = ["draft"] if who == "decode" else []
    monkeypatch.setenv(
        "KVPOOL_SGLANG", json.dumps({"verify": "checksum", "allow_missing": missing})
    )
    source, dest = (engine(name, n, 16 * n, drafts) for n, drafts in enumerate(EITHER[who], 1))
    with queues.pair(source, dest) as pair:
        rows = {n: t.clone() for n, t in queues.tensors_of(pair[1][0].metadata_buffers).items()}
        held = [tensor.clone() for tensor in oracle.memory(dest.sides[0])]
        assert queues.transfer(source, dest, pair, chunk=2) == []
        assert oracle.assert_handed_over(source.sides, dest.sides[0], held, missing)
        assert ("a prefill has no draft" in caplog.text) == (who == "decode")
        check_metadata(pair[0][0], pair[1][0], rows, "none" if name == ALONE else who)


def refused(source: Engine, dest: Engine) -> str:
    with queues.pair(source, dest) as pair:
        held = [tensor.clone() for tensor in oracle.memory(dest.sides[0])]
        reasons = queues.transfer(source, dest, pair)
        assert all(map(torch.equal, held, oracle.memory(dest.sides[0])))
    return " ".join(reasons)


def test_a_draft_that_prefill_lacks_is_refused_unless_it_may_be_missing():
    pair = [engine("mtp, three modules", n, 16, drafts) for n, drafts in enumerate((False, True))]
    assert "draft layers 0-2 k: prefill offers no such region" in refused(*pair)


def test_fewer_modules_on_prefill_are_refused():
    pair = [engine("mtp, three modules", n, 16, True) for n in range(2)]
    (first,) = pair[0].sides
    fewer = Engine(stages=[[first._replace(modules=first.modules[:1])]], draft=pair[0].draft)
    assert "draft layer 2 k: prefill offers no such region" in refused(fewer, pair[1])


@pytest.mark.parametrize(
    ("other", "topk", "name"),
    [
        (Model(hidden=128, fields=ROPE), 1, "draft.hidden_size"),
        (Model(hidden=64, fields={"rope_theta": 5e5}), 1, "draft.rope_theta"),
        (Model(hidden=64, fields=ROPE), 4, "draft.proposals"),
    ],
)
def test_another_draft_is_refused_by_name(other, topk, name):
    pair = [engine("eagle", n, 16, True) for n in range(2)]
    another = Engine(stages=pair[0].stages, draft=other, topk=topk)
    assert name in refused(another, pair[1])


def test_heads_of_a_draft_that_is_divided_among_more_ranks_than_its_target_are_missed():
    """With data-parallel attention, SGLang divides some drafts among ranks of other requests."""
    pair = [engine("eagle", n, 16, True) for n in range(2)]
    group = SimpleNamespace(rank_in_group=1, world_size=2)
    half = Engine(stages=pair[0].stages, draft=pair[0].draft, group=group)
    assert "draft layer 0 k" in refused(half, pair[1])
