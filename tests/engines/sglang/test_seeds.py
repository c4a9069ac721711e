"""Hand-overs that are wrong, refused, or a branch of their own in SGLang's transports, between its
real pools.
"""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from disagg import IncompatibleLayouts
from tests.engines.sglang import sides
from tests.engines.sglang.oracle import Side
from tests.engines.sglang.sides import PAGES, described, hand_over, request, state_types

TOKENS, WINDOW = 150, 40
RATIOS = [0, 4, 128, 4, 128, 0]


@pytest.fixture(autouse=True)
def one_rank():
    with sides.alone():
        yield


def side(pool, seed, tokens=TOKENS, **more):
    return Side(pool, request(pool.page_size, tokens, seed, PAGES, slot=seed % 5 + 1), **more)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_draft_with_index_keys_of_its_own_on_both_sides(stages):
    """Seed 1: the state of an MTP layer is rows and index keys too."""
    whole = side(sides.dsa(), 9, draft=sides.dsa(layers=1))
    held = 4 // stages
    ranks = [side(sides.dsa(layers=held, start=n * held), n) for n in range(stages)]
    ranks[-1] = ranks[-1]._replace(draft=sides.dsa(layers=1))
    assert state_types(whole) == ["dsa"]
    moved = hand_over(ranks, [whole], layers=4)
    assert moved == TOKENS * 5 * (656 + 132)


@pytest.mark.parametrize("tokens", [5, 130, 256, 259, 700])
@pytest.mark.parametrize("engine", ["local", "mooncake"])
def test_deepseek_v4_with_longer_rings_on_decode(tokens, engine):
    """Seed 2: only decode speculates, so that a token is elsewhere in its rings; its draft has a
    window that prefill does not.
    """
    pair = [
        Side(sides.dsv4(RATIOS, drafts=drafts), request(256, tokens, drafts, 8, row=drafts + 1))
        for drafts in (0, 3)
    ]
    rings = [
        [space.steps for space in described(each, 6).layout.spaces if "ring" in space.name]
        for each in pair
    ]
    assert rings == [[8, 128], [16, 256]]
    assert hand_over(pair[:1], pair[1:], layers=6, engine=engine)


def test_deepseek_v4_with_a_draft_on_both_sides():
    pair = [
        Side(sides.dsv4(RATIOS, drafts=3), request(256, 300, n, 8, row=n + 1), sides.dsv4([0]))
        for n in range(2)
    ]
    assert state_types(pair[0]) == ["swa", "c128_state", "swa"]
    assert hand_over(pair[:1], pair[1:], layers=6)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_several_kinds_of_state_in_one_pool(shape):
    """Seed 3: slots of linear attention, latents, and index keys."""

    def ranks(count, seed):
        pools = [sides.hybrid(64, ranks=count, full="dsa") for _ in range(count)]
        return [side(pool, seed + n, rank=n, ranks=count) for n, pool in enumerate(pools)]

    there, here = ranks(shape[0], 1), ranks(shape[1], 7)
    assert state_types(there[0]) == ["mamba", "dsa"]
    assert hand_over(there, here)


def test_several_kinds_of_state_in_a_pool_of_windows():
    """Seed 3: windows, and scales of either sub-pool."""
    pair = [
        side(sides.swa(page, inner="MHATokenToKVPoolMXFP8"), page, window=WINDOW)
        for page in (16, 32)
    ]
    assert state_types(pair[0]) == ["swa", "block_scale", "block_scale_swa"]
    assert hand_over(pair[:1], pair[1:])


def test_npu_latents_under_a_pipeline_with_a_draft_on_decode_only():
    """Seed 4: latents, ropes and index keys in tensors of their own, two stages, and a layer that
    only decode has.
    """
    stages = [side(sides.npu_mla(layers=2, start=2 * n), n) for n in range(2)]
    whole = side(sides.npu_mla(32), 5, draft=sides.npu_mla(32, layers=1))
    assert hand_over(stages, [whole], layers=4, allow_missing={"draft"})
    with pytest.raises(IncompatibleLayouts, match="draft layer 0 latent"):
        hand_over(stages, [whole], layers=4)


@pytest.mark.parametrize("pages", [(16, 16), (16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize("longer", ["prefill", "decode", "both", "neither"])
def test_lists_of_a_windows_pages_that_differ_in_length(longer, pages):
    """Seed 5: one side lists a page more, before the window."""
    pair = []
    for seed, (who, page) in enumerate(zip(("prefill", "decode"), pages)):
        first = (TOKENS - WINDOW) // page - (longer in (who, "both"))
        pool = sides.swa(page)
        ask = request(page, TOKENS, seed, PAGES, first=first)
        pair.append(Side(pool, ask, window=WINDOW))
    assert hand_over(pair[:1], pair[1:])
