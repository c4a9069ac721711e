"""The hand-off between pipeline stages whose layers are of different kinds: no rank holds every
role of the model, and some ranks of prefill hold nothing that a decode rank needs.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.plan import Group, IncompatibleLayouts
from kvpool.layout.formats import Shard
from tests.disagg.runtime.sides import endpoints, hand_over
from tests.disagg.waiting import until
from tests.oracle import merged, place, state
from tests.pools import hybrid, mha, mla, swa

TOKENS = 21
EDGES = [0, 13, TOKENS]
FIRST, LAST = range(2), range(2, 4)
WINDOWS_FIRST = swa.but(window_layers=(0, 1))
"""Layers 0 and 1 have a window, 2 and 3 have none: PP 2 cuts between the kinds."""


def stages(build, cuts, tp=1):
    """Pools of all ranks, stage by stage."""
    build = build.but(num_pages=40, num_window_pages=40)
    return [
        build(layers=range(*bounds), shard=Shard(rank, tp))
        for bounds in zip((0, *cuts), (*cuts, 4))
        for rank in range(tp)
    ]


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
@pytest.mark.parametrize("build", [WINDOWS_FIRST, hybrid.but(linear_layers=(0, 1))])
def test_a_stage_reads_from_a_prefill_whose_other_stage_has_no_role_of_it(build, by_layer):
    sources, dests = stages(build, (2,)), stages(build, (2,))
    theirs, ours = ({r.role for r in pool.layout.regions} for pool in (sources[1], dests[0]))
    assert theirs.isdisjoint(ours)
    hand_over(sources, dests, EDGES, by_layer=by_layer, verify="checksum")


def test_what_no_rank_holds_is_refused_on_decode_and_on_every_rank_with_all_reasons():
    sources = stages(WINDOWS_FIRST, (2,))
    dest = WINDOWS_FIRST(layers=range(1, 5), total_kv_layers=5, page_size=4)
    with ExitStack() as stack:
        prefills = endpoints(stack, PrefillEndpoint, sources)
        (decode,) = endpoints(stack, DecodeEndpoint, [dest])
        with pytest.raises(IncompatibleLayouts) as refused:
            decode.connect([each.address for each in prefills], timeout=30)
        assert "target layer 4 k: prefill offers no such region (it holds layers 2-3)" in str(
            refused.value
        )
        for prefill in prefills:
            until(prefill, prefill.refusals)
            assert prefill.refusals() == [" ".join(str(refused.value).split())]


def test_a_draft_that_prefill_holds_on_a_rank_of_its_own_in_another_form_is_not_missing():
    """No rank of prefill shares a role of the draft, and one has its owner."""
    draft = {"owner": "draft", "layers": [4], "total_kv_layers": 5, "num_pages": 40}
    sources = [mha(num_pages=40), mha(**draft)]
    dest = merged(mha(num_pages=40), mla(**draft))
    with ExitStack() as stack:
        prefills = endpoints(stack, PrefillEndpoint, sources)
        (decode,) = endpoints(stack, DecodeEndpoint, [dest], allow_missing={"draft"})
        with pytest.raises(IncompatibleLayouts, match="draft layer 4 latent: prefill offers no"):
            decode.connect([each.address for each in prefills], timeout=30)


def test_a_rank_that_holds_only_a_draft_is_released_by_a_decode_without_one():
    draft = mha(owner="draft", layers=[4], total_kv_layers=5, num_pages=40)
    hand_over([mla(num_pages=40), draft], [mla(num_pages=40)], EDGES, verify="checksum")


def test_a_group_of_stages_one_of_which_has_a_draft_reads_all_of_both_and_asks_few():
    draft = {"owner": "draft", "layers": [4], "total_kv_layers": 5, "num_pages": 40}
    sources, dests = (
        [first, merged(last, mha(**draft))]
        for first, last in (stages(WINDOWS_FIRST, (2,)), stages(WINDOWS_FIRST, (2,)))
    )
    layouts = tuple(state(each).layout for each in dests)
    hand_over(sources, dests, EDGES, readers=partial(Group, layouts), verify="checksum")


def test_a_member_of_a_group_that_reads_nothing_succeeds_with_the_others():
    draft = mla(owner="draft", layers=[4], total_kv_layers=5, num_pages=40)
    dests = [mha(num_pages=40), draft]
    group = partial(Group, tuple(each.layout for each in dests))
    with ExitStack() as stack:
        (prefill,) = endpoints(stack, PrefillEndpoint, [mha(num_pages=40)])
        options = {"allow_missing": {"draft"}}
        decodes = [
            *endpoints(stack, DecodeEndpoint, dests[:1], ranks=group(0), **options),
            *endpoints(stack, DecodeEndpoint, dests[1:], ranks=group(1), **options),
        ]
        for decode, dest in zip(decodes, dests):
            decode.connect([prefill.address], timeout=30)
            decode.receive("r", place(dest, TOKENS))
        prefill.send("r", place(dests[0], TOKENS))
        assert [each.wait("r", 30) for each in (*decodes, prefill)] == [KVPoll.Success] * 3
