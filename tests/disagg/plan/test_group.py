"""Members of a group come to one table, ask no more ranks than they need, and read every byte."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from disagg.plan import Group, IncompatibleLayouts, plan
from disagg.plan.cache import PlanCache
from kvpool import PoolLayout
from kvpool.item import Cell, Repeat
from kvpool.layout.formats import Shard
from tests.disagg.plan.test_cache import same
from tests.disagg.plan.test_geometry import geometries
from tests.oracle import built, hand_off
from tests.pools import mha, mla, swa


def layouts(pools):
    return tuple(pool.layout for pool in pools)


def sharded(tp, build=mha, **options):
    """The layouts of `tp` ranks that share the heads; of MLA they are replicas."""
    pools = (build(shard=Shard(rank, tp), device="meta", **options) for rank in range(tp))
    return layouts(pools)


def members(sources, dests, **options):
    made = enumerate(dests)
    return [plan(sources, each, group=Group(dests, n), **options) for n, each in made]


def asked(plans):
    """What each member asks, with how many do, once all are seen to say the same."""
    askers = Counter(source for each in plans for source in each.asks)
    for each in plans:
        assert set(each.contributors()) <= each.asks.keys()
        assert each.asks == {source: askers[source] for source in each.asks}
    assert set(askers) == set(range(len(plans[0].sources)))
    return [[*each.asks] for each in plans]


def held(model, side, stage, rank):
    """The layers and heads of a rank, as its pool was made."""
    heads = range(1)
    if model.kind == "mha":
        first = rank * model.heads // side.tp
        heads = range(first, first + max(1, model.heads // side.tp))
    return {(layer, head) for layer in range(*side.cuts[stage : stage + 2]) for head in heads}


@settings(max_examples=60)
@given(geometries(layers=6, heads=8, dim=3, pp=2, tp=8, page=5), st.integers(1, 9))
def test_every_byte_of_every_member_is_right_and_few_ranks_are_asked(geometry, tokens):
    model, source, dest, _ = geometry
    pools = [source.pool(model, *rank, tokens) for rank in source.ranks()]
    into = [dest.pool(model, *rank, tokens) for rank in dest.ranks()]
    plans = [
        hand_off(pools, pool, tokens, group=Group(layouts(into), number))[0]
        for number, pool in enumerate(into)
    ]
    theirs = [held(model, source, *rank) for rank in source.ranks()]
    ours = [held(model, dest, *rank) for rank in dest.ranks()]
    share = [{s for s, there in enumerate(theirs) if there & here} for here in ours]
    table = asked(plans)
    for number, (mine, may) in enumerate(zip(table, share)):
        read = set(plans[number].contributors())
        assert read <= may
        idle = {s for s in mine if s not in read}
        assert not any(s in other.contributors() for s in idle for other in plans)
        assert all(s % len(into) == number for s in idle)
    alone = Counter(what for there in theirs for what in there)
    if max(alone.values()) == 1:  # no replicas: who shares bytes reads them
        assert [set(each.contributors()) for each in plans] == share
    if model.kind == "mla" and len(source.cuts) == len(dest.cuts) == 2:
        assert sum(map(len, table)) == max(source.tp, dest.tp)


@pytest.mark.parametrize(
    ("sources", "dests", "table"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (3, 2, [[0], [1, 2]]),
        (2, 3, [[0], [0], [1]]),
        (1, 3, [[0], [0], [0]]),
    ],
)
def test_members_take_replicas_in_turn(sources, dests, table):
    plans = members(sharded(sources, mla), sharded(dests, mla))
    assert asked(plans) == [each.contributors() for each in plans] == table


@pytest.mark.parametrize(
    ("sources", "dests", "heads", "table"),
    [
        (4, 2, 4, [[0, 1], [2, 3]]),
        (2, 4, 4, [[0], [0], [1], [1]]),
        (4, 4, 4, [[0], [1], [2], [3]]),
        (8, 2, 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (4, 2, 2, [[0, 1], [2, 3]]),  # each member reads from both replicas of its head
    ],
)
def test_members_ask_and_read_those_that_hold_their_heads(sources, dests, heads, table):
    plans = members(sharded(sources, num_kv_heads=heads), sharded(dests, num_kv_heads=heads))
    assert asked(plans) == table
    if heads == 2:
        assert [each.contributors() for each in plans] == table


def test_a_rank_that_nobody_reads_is_asked_by_one_member():
    sources = sharded(9, mla, layers=[0])
    plans = members(sources, sharded(2, mla, layers=[0]))
    assert [each.contributors() for each in plans] == [[0], [4]]
    assert asked(plans) == [[0, 2, 6, 8], [1, 3, 4, 5, 7]]
    assert {n for each in plans for n in each.asks.values()} == {1}


def test_a_group_of_one_reads_as_a_destination_alone_does():
    sources, (dest,) = sharded(3, mla), sharded(1, mla)
    alone, grouped = plan(sources, dest), plan(sources, dest, group=Group((dest,), 0))
    assert same(replace(grouped, asks={}), alone)
    assert grouped.asks == {0: 1, 1: 1, 2: 1}
    assert alone.asks == {}


def test_stages_of_decode_ask_their_stages():
    whole = {"layers": range(4), "device": "meta"}
    halves = tuple(mla(**whole | {"layers": part}).layout for part in (range(2), range(2, 4)))
    plans = members(tuple(mla(**whole).layout for _ in range(2)), halves)
    assert asked(plans) == [[0], [1]]
    assert asked(members(halves, halves)) == [[0], [1]]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (lambda: Group((), 0), "`layouts` are those of all members"),
        (lambda: Group(sharded(2), 2), r"member 2 of 2 layouts: give a number from 0 to 1\."),
        (
            lambda: plan(sharded(1), sharded(2)[1], group=Group(sharded(2), 0)),
            "layout 0 is not like that of member 0, which this rank is",
        ),
    ],
)
def test_a_group_that_cannot_be_is_refused(given, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        given()


def test_members_of_different_roles_ask_the_stages_that_hold_theirs():
    """Windows on the first stage, none on the last, where a draft is too."""
    build = swa.but(window_layers=(0, 1), device="meta")
    first, last = (build(layers=range(*bounds)).layout for bounds in ((0, 2), (2, 4)))
    last = PoolLayout.merge(last, mla(owner="draft", layers=[9], device="meta").layout)
    assert asked(members((first, last), (first, last))) == [[0], [1]]


def test_a_member_that_reads_nothing_asks_one_rank_all_the_same():
    """Its rooms end as the others do."""
    (source,), draft = sharded(1), mla(owner="draft", layers=[9], device="meta").layout
    plans = members([source], (source, draft, draft), allow_missing={"draft"})
    assert asked(plans) == [[0], [0], [0]]
    assert [each.contributors() for each in plans] == [[0], [], []]


def test_what_another_member_cannot_read_is_refused_here_too_with_its_number():
    sources, dests = sharded(1, mla), (*sharded(1, mla), *sharded(2, mla, packing="f32"))
    said = []
    for number, dest in enumerate(dests):
        with pytest.raises(IncompatibleLayouts) as refused:
            plan(sources, dest, group=Group(dests, number))
        said.append(str(refused.value))
    assert said[0].startswith("2 reasons.\n  target layers 0-3 latent: on decode rank 1-2 of its")
    assert said[1] == said[2]
    assert "latent: bfloat16 on prefill, float32 on decode." in said[1]


def test_members_must_be_told_the_same_of_what_may_be_missing():
    sources, dests = sharded(1), sharded(2)
    drafts = tuple(
        PoolLayout.merge(each, mla(owner="draft", layers=[9], device="meta").layout)
        for each in dests
    )
    with pytest.raises(IncompatibleLayouts, match="draft layer 9 latent: prefill offers no such"):
        members(sources, drafts)
    assert asked(members(sources, drafts, allow_missing={"draft"})) == [[0], [0]]


def test_a_cached_plan_has_the_table_of_its_member():
    cache = PlanCache()
    for life in range(2):
        sources, dests = sharded(4, mla), sharded(2, mla)
        for number, dest in enumerate(dests):
            group = Group(dests, number)
            assert same(cache.plan(sources, dest, group), plan(sources, dest, group=group))
        assert same(cache.plan(sources, dests[0]), plan(sources, dests[0]))
        assert (cache.hits, cache.misses) == (3 * life, 3)
    cache.plan(sources, dests[0], Group((*dests, dests[0]), 0))
    assert cache.misses == 4


def test_sources_whose_cells_are_cut_for_one_member_only_are_shared_out_all_the_same():
    """A member with a `dim` axis in place of a cell: sources are cut for it, not for the other."""
    cell = Repeat("entry", 2, Cell("latent", 4, "bf16"))
    axis = Repeat("entry", 2, Repeat("dim", 4, Cell("latent", 1, "bf16")))
    sources = layouts(built([(0, "kv", 5, cell)], page=2) for _ in range(2))
    dests = tuple(built([(0, "kv", 5, each)], page=2).layout for each in (cell, axis))
    assert asked(members(sources, dests)) == [[0], [1]]
