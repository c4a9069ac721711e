"""The hand-off to decode ranks that know their group, over engine `local`, with digests."""

from __future__ import annotations

from functools import partial

import pytest

from disagg import DecodeEndpoint, Group, create_engine
from kvpool.layout.formats import Shard
from tests.disagg.runtime.sides import hand_over
from tests.disagg.runtime.test_context_parallel import state
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


def test_a_group_with_another_layout_than_the_endpoint_is_refused():
    _, dests, _ = CASES["TP4 to TP2"]
    with pytest.raises(ValueError, match="layout 1 is not like that of member 1, which this rank"):
        DecodeEndpoint(dests[0].layout, create_engine("local"), ranks=group(dests, 1))
