"""A request of DeepSeek-V4 moves between SGLang's pools of it: ranks, stages, page sizes, rings."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang.srt.mem_cache import deepseek_v4_memory_pool as v4

from tests.engines.sglang import sides
from tests.engines.sglang.pairings import RATIOS, side
from tests.engines.sglang.sides import described, hand_over

WHOLE, HALVES, THIRDS = (0, 6), (0, 3, 6), (0, 1, 4, 6)
"""Borders of stages. The first of the thirds compresses nothing."""
EDGES = [3, 128, 257, 300]


@pytest.fixture(autouse=True)
def one_rank():
    with sides.alone():
        yield


def stages(borders, seed, tokens, *, ranks=1, page=256, drafts=0, draft=False):
    """Ranks of stages, all of a request of theirs; `draft`: one with the last stage."""
    made = []
    for start, end in pairwise(borders):
        for rank in range(ranks):
            pool = sides.dsv4(RATIOS, page, drafts, start, end, pages=2 + 1024 // page)
            one = side(pool, seed, tokens, 2 + 1024 // page, row=seed % 4, rank=rank, ranks=ranks)
            if draft and end == len(RATIOS):
                one = one._replace(draft=sides.dsv4([0], page, pages=2 + 1024 // page))
            made.append(one)
    return made


@pytest.mark.parametrize("tokens", [3, 257])
@pytest.mark.parametrize(
    ("there", "here"),
    [(HALVES, WHOLE), (WHOLE, HALVES), (HALVES, THIRDS), (THIRDS, WHOLE)],
    ids=str,
)
def test_stages(there, here, tokens):
    assert hand_over(stages(there, 1, tokens), stages(here, 2, tokens), layers=6)


@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2), (2, 2), (4, 2)])
def test_ranks_of_tensor_parallelism_hold_the_same(there, here):
    pair = stages(WHOLE, 1, 300, ranks=there), stages(WHOLE, 2, 300, ranks=here)
    assert hand_over(*pair, layers=6)


def test_ranks_of_stages_with_a_draft_on_the_last():
    pair = stages(HALVES, 1, 300, ranks=2, draft=True), stages(WHOLE, 2, 300, draft=True)
    assert hand_over(*pair, layers=6)


@pytest.mark.parametrize("tokens", EDGES)
@pytest.mark.parametrize(("there", "here", "drafts"), [(256, 128, 0), (128, 256, 3), (512, 256, 3)])
def test_page_sizes(there, here, drafts, tokens):
    """With `drafts` decode's rings are longer: those of pages (4) and those of requests (128)."""
    pair = stages(WHOLE, 1, tokens, page=there), stages(WHOLE, 2, tokens, page=here, drafts=drafts)
    assert hand_over(*pair, layers=6)


@pytest.mark.parametrize("tokens", [257, 300])
@pytest.mark.parametrize("direct", [0, 1], ids=["prefill", "decode"])
def test_windows_in_pages_of_a_kernel(tokens, direct, monkeypatch):
    """On SM120 a kernel reads windows in pages of 64, which SGLang lists in pages of 256."""
    pair = []
    for number in range(2):
        kernel = SimpleNamespace(is_sm120=number == direct)
        monkeypatch.setenv("SGLANG_OPT_SM120_DIRECT_SWA_KV", "1")
        monkeypatch.setattr(v4, "get_platform", lambda kernel=kernel: kernel)
        pair.append(stages(WHOLE, number + 1, tokens))
    sizes = {
        space.entries_per_item
        for (one,) in pair
        for space in described(one, 6).layout.spaces
        if space.name == "swa"
    }
    assert sizes == {64, 256}
    assert hand_over(*pair, layers=6)
