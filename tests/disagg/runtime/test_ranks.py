"""The hand-off between ranks that hold different things, over engine `local`, with digests: that
share out positions, to decode ranks that know their group, and between pipeline stages whose layers
are of different kinds. There no rank has every role, and some of prefill have nothing that a decode
rank needs.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from disagg.plan import Group, IncompatibleLayouts
from kvpool.item import Cell, Repeat, Seq
from kvpool.layout import Interleave, Space
from kvpool.layout.formats import Shard
from tests.disagg.runtime.sides import arrives, endpoints, hand_over
from tests.disagg.waiting import until
from tests.oracle import blank, built, filled, merged, packed, place, state
from tests.pools import hybrid, mha, mla, swa

POSITIONS, LAYERS, ITEMS = 101, 2, 40
ROW = 12  # bytes of an entry
CUTS = ([0, POSITIONS], [0, 3, 40, POSITIONS], [16, 50, 70, POSITIONS])


def interleaved(size, rank, ranks, page=8):
    """Latents of two layers, of which a rank holds some positions, and index keys that each rank
    holds of all, in pages of the same ids.
    """
    spaces = [
        Space("kv", "paged", page, interleave=Interleave(size, rank, ranks)),
        Space("index", "paged", page * ranks, ids="kv"),
    ]
    row = Repeat("entry", page, Seq(Cell("latent", 4, "bf16"), Cell("rope", 2, "bf16")))
    keys = Repeat("entry", page * ranks, Cell("index_key", 3, "uint8"))
    parts = [(layer, "kv", ITEMS, row) for layer in range(LAYERS)]
    return built([*parts, (0, "index", ITEMS, keys)], spaces)


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize(
    ("sources", "dests", "cuts"),
    [(2, 1, CUTS[0]), (1, 2, CUTS[1]), (2, 3, CUTS[2]), (3, 3, CUTS[1])],
)
def test_ranks_of_prefill_hand_over_to_other_ranks(sources, dests, size, cuts):
    theirs = [interleaved(size, rank, sources) for rank in range(sources)]
    ours = [interleaved(size, rank, dests) for rank in range(dests)]
    start, edges = cuts[0], [0, *cuts[1:]]
    _, read = hand_over(theirs, ours, edges, start=start, verify="checksum")
    # each row is one rank's, each index key every rank's
    assert read == (POSITIONS - start) * (LAYERS * ROW + dests * 3)


def test_equal_ranks_read_from_their_like_and_wait_for_all():
    """Nothing of it is read from rank 0, which must say all the same that it has computed it."""
    theirs = [interleaved(4, rank, 2) for rank in range(2)]
    dest = interleaved(4, 1, 2)
    tables = [filled(each, POSITIONS, seed) for seed, each in enumerate(theirs)]
    blank(dest)
    with ExitStack() as stack:
        prefills = endpoints(stack, PrefillEndpoint, theirs)
        (decode,) = endpoints(stack, DecodeEndpoint, [dest], verify="checksum")
        decode.connect([prefill.address for prefill in prefills], timeout=30)
        decode.receive("r", table := place(dest, POSITIONS, 9))
        prefills[1].send("r", tables[1])
        until(decode, lambda: decode.metrics("r").bytes_moved and not decode.reading("r"))
        with pytest.raises(TimeoutError, match="chunks from position 0 on, of rank 0 of prefill"):
            decode.wait("r", 0.1)
        prefills[0].send("r", tables[0])
        arrives(decode, "r", dest, table)


def test_a_digest_names_the_position_in_the_request():
    """A byte of decode's memory that changes after it was read from rank 1 of 2."""
    theirs = [interleaved(8, rank, 2) for rank in range(2)]
    dest = interleaved(1, 2, 3)
    tables = [filled(each, POSITIONS, seed) for seed, each in enumerate(theirs)]
    table = place(dest, POSITIONS, 9)
    position = 59  # of prefill's rank 1 (56 to 63), and of decode's rank 2 of 3
    with ExitStack() as stack:
        prefills = endpoints(stack, PrefillEndpoint, theirs)
        (decode,) = endpoints(stack, DecodeEndpoint, [dest], verify="checksum")
        decode.connect([prefill.address for prefill in prefills], timeout=30)
        decode.receive("r", table)
        for prefill, each in zip(prefills, tables):
            prefill.send("r", each, tokens=range(96), last=False)
        until(decode, lambda: decode.metrics("r").bytes_moved == 32 * LAYERS * ROW + 96 * 3)
        page, step = divmod(packed(dest.layout.space_by_name["kv"], POSITIONS)[position], 8)
        dest.views["target", 1, "latent"][table.spans["kv"].ids[page], step, 0] ^= 1
        for prefill, each in zip(prefills, tables):
            prefill.send("r", each)
        assert decode.wait("r", 30) is KVPoll.Failed
        said = str(decode.failure("r"))
        assert "what was read differs from what rank 1 of prefill" in said
        assert said.endswith(f"target layer 1 latent: position {position} differs.")


# groups and stages

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
