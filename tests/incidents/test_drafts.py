"""A target and its draft, of any two kinds of pool, move together byte-exact into other shards,
pages and placements.
"""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from disagg.plan import IncompatibleLayouts, plan
from kvpool import LayoutError, Shard
from tests.oracle import hand_off, merged, state
from tests.pools import dsv4, hybrid, hybrid_nsa, mha, mla, nsa, swa

MANY = {"num_pages": 30, "num_window_pages": 35, "num_slots": 4}
KINDS = {"mha": mha, "mla": mla, "nsa": nsa, "swa": swa, "hybrid": hybrid, "dsv4": dsv4}
WINDOWED = {"swa", "dsv4"}
PAIRS = list(product(KINDS, KINDS))

pairs = pytest.mark.parametrize(("target", "draft"), PAIRS, ids=["-".join(pair) for pair in PAIRS])


def same(kind, **more):
    """Pools whose spaces equal those of other kinds of the same sizes."""
    numbers = {"page_size": 8, **({"window_page_size": 4} if kind in WINDOWED else {})}
    return KINDS[kind](**{**MANY, **numbers, **more})


def other(kind, **more):
    """Pools whose spaces all differ from those of `same`."""
    numbers = {
        "page_size": 24,
        **({"window_page_size": 3, "window": 5} if kind in WINDOWED else {}),
    }
    return KINDS[kind](**{**MANY, **numbers, **more})


DRAFT = {"owner": "draft", "layers": [2, 3]}
PREFILL = {"placement": "layer"}
DECODE = {"placement": "page", "page_size": 16}


@pairs
def test_pools_of_one_page_size_share_their_ids(target, draft):
    both = merged(same(target), same(draft, **DRAFT))
    assert not any(space.name.startswith("draft") for space in both.layout.spaces)
    kinds = {same(kind).layout.spaces for kind in (target, draft)}
    assert set(both.layout.spaces) == {space for spaces in kinds for space in spaces}


@pairs
def test_pools_whose_spaces_differ_are_refused_unless_they_have_own_spaces(target, draft):
    one = same(target)
    two = other(draft, **DRAFT)
    common = {s.name for s in one.layout.spaces} & {s.name for s in two.layout.spaces}
    assert common - {"state", "ring"}
    with pytest.raises(LayoutError, match=r"space (kv|swa): .* cannot share ids\. Build both"):
        merged(one, two)
    both = merged(one, other(draft, own_spaces=True, **DRAFT))
    mine = {space.name for space in both.layout.spaces if space.name.startswith("draft.")}
    assert mine == {f"draft.{space.name}" for space in two.layout.spaces}
    lent = {space.ids for space in both.layout.spaces if space.name in mine} - {None}
    assert lent == ({"draft.kv", "draft.ring"} if draft == "dsv4" else set())


@pairs
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_a_draft_that_shares_ids_moves_with_its_target(target, draft, prefill, decode):
    def both(sides, **more):
        return [
            merged(same(target, shard=shard, **more), same(draft, shard=shard, **DRAFT, **more))
            for shard in sides
        ]

    sources = both([Shard(rank, prefill) for rank in range(prefill)], **PREFILL)
    for dest in both([Shard(rank, decode) for rank in range(decode)], **DECODE):
        transfer, _ = hand_off(sources, dest, 29)
        assert (transfer.missing, transfer.unsent) == ((), ())


@pairs
@pytest.mark.parametrize("tokens", [1, 16, 29])
def test_a_draft_with_ids_of_its_own_moves_with_its_target(target, draft, tokens):
    own = {"own_spaces": True, **DRAFT}
    sources = [
        merged(same(target, shard=shard), same(draft, shard=shard, page_size=24, **own))
        for shard in (Shard(0, 2), Shard(1, 2))
    ]
    dest = merged(same(target, **DECODE), same(draft, page_size=40, **own))
    hand_off(sources, dest, tokens)


@pytest.mark.parametrize("there", [True, False])
def test_own_ids_on_one_side_and_shared_ids_on_the_other(there):
    """Regions are paired by key, whichever id list they use."""
    source = merged(nsa(**MANY), mla(**MANY, **DRAFT, own_spaces=there))
    dest = merged(nsa(**MANY, page_size=3), mla(**MANY, **DRAFT, page_size=3, own_spaces=not there))
    hand_off([source], dest, 29)


@pytest.mark.parametrize("packing", ["fp8", "bf16"])
@pytest.mark.parametrize("placement", ["layer", "page"])
def test_a_draft_with_index_keys_moves_from_both_sides(packing, placement):
    """sglang#23539."""

    def both(**more):
        draft = nsa(**MANY, owner="draft", layers=[61], index_layers=None, packing=packing, **more)
        return merged(nsa(**MANY, packing=packing, **more), draft)

    dest = both(placement=placement, page_size=3)
    hand_off([both()], dest, 29)
    moved = {region.role for region in dest.layout.regions if region.owner == "draft"}
    scales = {"latent.scale"} if packing == "fp8" else set()
    assert moved == {"latent", "rope", "index_key", "index_key.scale"} | scales


@pairs
def test_a_draft_on_decode_only_is_refused_unless_allowed_by_name(target, draft):
    """sglang#23539."""
    source = same(target)
    dest = merged(same(target, **DECODE), same(draft, **DRAFT, **DECODE))
    keys = {region.key for region in dest.layout.regions if region.owner == "draft"}
    with pytest.raises(IncompatibleLayouts) as refused:
        plan([source.layout], dest.layout)
    assert {(r.owner, r.layer, r.role) for r in refused.value.reasons} == keys
    assert "draft layer" in str(refused.value) and "allow_missing" in str(refused.value)
    with pytest.raises(IncompatibleLayouts):
        plan([source.layout], dest.layout, allow_missing={"draft1", "target"})
    transfer, _ = hand_off([source], dest, 29, allow_missing={"draft"})
    assert set(transfer.missing) == keys


def test_a_draft_whose_target_is_allowed_to_be_missing_is_still_needed_whole():
    """A draft that one source has is not missing: a forgotten stage stays refused."""
    source = merged(mla(**MANY), nsa(**MANY, owner="draft", layers=[1]))
    dest = merged(mla(**MANY), nsa(**MANY, owner="draft", layers=[1, 3]))
    with pytest.raises(IncompatibleLayouts, match="draft layer 3 index_key"):
        plan([source.layout], dest.layout, allow_missing={"draft"})


@pairs
def test_a_draft_on_prefill_only_is_not_sent(target, draft):
    source = merged(same(target), same(draft, **DRAFT))
    transfer, _ = hand_off([source], same(target, **DECODE), 29)
    assert {owner for owner, _, _ in transfer.unsent} == {"draft"}


CUTS = {"PP1": (0, 8), "PP2": (0, 4, 8), "uneven PP2": (0, 5, 8), "PP4": (0, 2, 4, 6, 8)}
MODELS = {
    "mla": (mla, {}),
    "mha": (mha, {}),
    "nsa": (nsa, {"index_layers": (1, 3, 4)}),
    "swa": (swa, {"window_layers": range(0, 8, 2), "window_page_size": 4}),
    "hybrid": (hybrid_nsa, {"linear_layers": (0, 1, 2, 4, 5, 6), "index_layers": [3, 7]}),
    "dsv4": (dsv4, {"compress_ratios": (0, 2, 8, 2, 0, 0, 8, 2)}),
}


@pytest.mark.parametrize("prefill", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("decode", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("model", MODELS)
def test_a_draft_beside_the_last_stage_moves_over_pipeline_stages(model, prefill, decode):
    """sglang#33497."""
    build, given = MODELS[model]
    common = {**MANY, "page_size": 8, "total_kv_layers": 8, **given}

    def stages(cuts, **more):
        last = nsa(**{**MANY, "page_size": 8, "owner": "draft", "layers": [8], **more})
        for start, stop in pairwise(cuts):
            stage = build(**{**common, "layers": range(start, stop), **more})
            yield merged(stage, last) if stop == 8 else state(stage)

    sources = list(stages(prefill))
    for dest in stages(decode, page_size=16, placement="page"):
        hand_off(sources, dest, 29)


@pytest.mark.parametrize("prefill", [(0, 2, 4), (0, 1, 2, 3, 4), (0, 3, 4)])
@pytest.mark.parametrize("decode", [(0, 4), (0, 1, 4)])
@pytest.mark.parametrize("draft", ["mha", "nsa", "hybrid", "dsv4"])
def test_a_draft_that_is_cut_into_stages_itself_moves_too(draft, prefill, decode):
    """sglang#33497."""

    def stages(cuts, **more):
        for start, stop in pairwise(cuts):
            held = {**MANY, "page_size": 8, "layers": range(start, stop), **more}
            apart = {"owner": "draft", "total_kv_layers": 4}
            yield merged(mla(total_kv_layers=4, **held), KINDS[draft](**held, **apart))

    sources = list(stages(prefill))
    for dest in stages(decode, page_size=16):
        hand_off(sources, dest, 29)


def test_a_stage_without_the_draft_that_decode_needs_is_named():
    """sglang#33497."""
    sources = [mla(layers=[0, 1], **MANY), mla(layers=[2, 3], **MANY)]
    dest = merged(mla(**MANY), mla(**MANY, owner="draft", layers=[4]))
    with pytest.raises(IncompatibleLayouts, match="draft layer 4 latent"):
        plan([source.layout for source in sources], dest.layout)
