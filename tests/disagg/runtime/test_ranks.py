"""The hand-off between ranks that hold different things, over engine `local`, with digests: to
decode ranks that know their group, and between pipeline stages whose layers are of different kinds.
There no rank has every role, and some of prefill have nothing that a decode rank needs.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from disagg.plan import Group, IncompatibleLayouts
from kvpool.layout.formats import Shard
from tests.disagg.runtime.sides import endpoints, hand_over
from tests.disagg.runtime.test_context_parallel import state as interleaved
from tests.disagg.waiting import until
from tests.oracle import merged, place, state
from tests.pools import hybrid, mha, mla, swa

TOKENS = 21
EDGES = [0, 13, TOKENS]
BOTH = {"num_kv_heads": 4, "num_pages": 17, "page_size": 4}
WINDOWS_FIRST = swa.but(window_layers=(0, 1))
"""Layers 0 and 1 have a window, 2 and 3 have none: PP 2 cuts between the kinds."""


def stages(build):
    """Pools of two pipeline stages, of two layers each."""
    return [
        build(layers=layers, num_pages=40, num_window_pages=40) for layers in (range(2), (2, 3))
    ]


def side(build, tp, **options):
    return [build(shard=Shard(rank, tp), **options) for rank in range(tp)]


def group(holders, number):
    return Group(tuple(state(each).layout for each in holders), number)


CASES = {
    "TP4 to TP2": (side(mha, 4, **BOTH), side(mha, 2, **BOTH), [[0, 1], [2, 3]]),
    "TP2 to TP4": (side(mha, 2, **BOTH), side(mha, 4, **BOTH), [[0], [0], [1], [1]]),
    "4 replicas to 2": (side(mla, 4), side(mla, 2), [[0, 1], [2, 3]]),
    "2 replicas to 3": (side(mla, 2), side(mla, 3), [[0], [0], [1]]),
    "9 replicas to 2": (side(mla, 9), side(mla, 2), [[0, 1, 2, 3, 8], [4, 5, 6, 7]]),
    "stages to ranks": (
        [mha(layers=range(2), **BOTH), mha(layers=range(2, 4), **BOTH)],
        side(mha, 2, **BOTH),
        [[0, 1], [0, 1]],
    ),
    "positions to positions": (
        [interleaved(8, rank, 3) for rank in range(3)],
        [interleaved(8, rank, 3) for rank in range(3)],
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_all_members_read_all_their_bytes_and_all_ranks_are_released(case):
    sources, dests, table = CASES[case]
    links, _ = hand_over(
        sources, dests, EDGES, readers=partial(group, dests), verify="checksum", aux={"token": 7}
    )
    assert table is None or [[*link.asks] for link in links] == table


def test_a_group_with_another_layout_than_the_endpoint_is_refused():
    _, dests, _ = CASES["TP4 to TP2"]
    with pytest.raises(ValueError, match="layout 1 is not like that of member 1, which this rank"):
        DecodeEndpoint(dests[0].layout, create_engine("local"), ranks=group(dests, 1))


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
@pytest.mark.parametrize("build", [WINDOWS_FIRST, hybrid.but(linear_layers=(0, 1))])
def test_a_stage_reads_from_a_prefill_whose_other_stage_has_no_role_of_it(build, by_layer):
    sources, dests = stages(build), stages(build)
    theirs, ours = ({r.role for r in pool.layout.regions} for pool in (sources[1], dests[0]))
    assert theirs.isdisjoint(ours)
    hand_over(sources, dests, EDGES, by_layer=by_layer, verify="checksum")


def test_what_no_rank_holds_is_refused_on_decode_and_on_every_rank_with_all_reasons():
    sources = stages(WINDOWS_FIRST)
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
        for first, last in (stages(WINDOWS_FIRST), stages(WINDOWS_FIRST))
    )
    hand_over(sources, dests, EDGES, readers=partial(group, dests), verify="checksum")


def test_a_member_of_a_group_that_reads_nothing_succeeds_with_the_others():
    draft = mla(owner="draft", layers=[4], total_kv_layers=5, num_pages=40)
    dests = [mha(num_pages=40), draft]
    with ExitStack() as stack:
        (prefill,) = endpoints(stack, PrefillEndpoint, [mha(num_pages=40)])
        options = {"allow_missing": {"draft"}}
        decodes = [
            *endpoints(stack, DecodeEndpoint, dests[:1], ranks=group(dests, 0), **options),
            *endpoints(stack, DecodeEndpoint, dests[1:], ranks=group(dests, 1), **options),
        ]
        for decode, dest in zip(decodes, dests):
            decode.connect([prefill.address], timeout=30)
            decode.receive("r", place(dest, TOKENS))
        prefill.send("r", place(dests[0], TOKENS))
        assert [each.wait("r", 30) for each in (*decodes, prefill)] == [KVPoll.Success] * 3
