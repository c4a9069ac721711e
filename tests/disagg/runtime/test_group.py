"""The hand-off to decode ranks that know their group, over engine `local`, with digests."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import pytest

from disagg import DecodeEndpoint, Group, KVPoll, PrefillEndpoint, create_engine
from disagg.plan import IncompatibleLayouts
from kvpool.layout.formats import Shard
from tests.disagg.runtime.sides import connected, endpoints, hand_over
from tests.disagg.runtime.test_context_parallel import state
from tests.oracle import place
from tests.pools import mha, mla

TOKENS, CUT = 21, 13
BOTH = {"num_kv_heads": 4, "num_pages": 17, "page_size": 4}


def side(build, tp, **options):
    return [build(shard=Shard(rank, tp), **options) for rank in range(tp)]


def group(holders, number):
    return Group(tuple(each.layout for each in holders), number)


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
        [state(8, rank, 3) for rank in range(3)],
        [state(8, rank, 3) for rank in range(3)],
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_all_members_read_all_their_bytes_and_all_ranks_are_released(case):
    sources, dests, table = CASES[case]
    links, _ = hand_over(
        sources,
        dests,
        [0, CUT, TOKENS],
        readers=partial(group, dests),
        verify="checksum",
        aux={"token": 7},
    )
    assert table is None or [[*link.asks] for link in links] == table


def test_a_member_that_aborts_leaves_no_room_open_on_any_side():
    sources, dests, _ = CASES["TP2 to TP4"]
    with ExitStack() as stack:
        prefills = endpoints(stack, PrefillEndpoint, sources)
        decodes = []
        for number, dest in enumerate(dests):
            decodes += endpoints(stack, DecodeEndpoint, [dest], ranks=group(dests, number))
            decodes[-1].connect([each.address for each in prefills], timeout=30)
            decodes[-1].receive("r", place(dest, TOKENS, number))
        decodes[0].abort("r", "gave up")
        prefills[0].wait("r", 30)
        for prefill, each in zip(prefills, sources):
            prefill.send("r", place(each, TOKENS))
        ends = [each.wait("r", 30) for each in (*decodes, *prefills)]
    failed, success = KVPoll.Failed, KVPoll.Success
    # ranks 0 and 1 of decode read from rank 0 of prefill, the others from rank 1
    assert ends == [failed, failed, success, success, failed, success]


def test_a_group_with_another_layout_than_the_endpoint_is_refused():
    _, dests, _ = CASES["TP4 to TP2"]
    with pytest.raises(ValueError, match="layout 1 is not like that of member 1, which this rank"):
        DecodeEndpoint(dests[0].layout, create_engine("local"), ranks=group(dests, 1))


def test_a_link_that_another_member_cannot_read_from_is_refused_by_name():
    source, dest = mla(), mla()
    dests = [dest, mla(packing="f32")]
    with (
        pytest.raises(IncompatibleLayouts, match="on decode rank 1 of its group: bfloat16"),
        connected(source, dest, ranks=group(dests, 0)),
    ):
        pass
