"""Explanations: how bytes travel, in how many runs, and why."""

from __future__ import annotations

import pytest

from disagg.plan import plan
from kvpool import PoolLayout, Shard, declare
from tests import pools

SIZES = {"num_pages": 99, "page_size": 16, "device": "meta"}
mha, mla = pools.mha.but(**SIZES), pools.mla.but(**SIZES)
LARGER = "items of 16 entries on the source, 64 on the destination"
HND = "entry before head on the source, head before entry"
SHARDS = "head: 2 of 4 on the source, 4 on the destination"


@pytest.mark.parametrize(
    ("sources", "dest", "how", "why", "runs"),
    [
        ([mla()], mla(), "direct", "whole items", 4 * 64),
        ([mla(placement="page")], mla(placement="page"), "direct", "whole items", 64),
        ([mla()], mla(placement="page"), "direct", "whole items, among other regions", 4 * 64),
        ([mla()], mla(page_size=64), "direct", LARGER, 4 * 64),
        ([mha()], mha(order="hnd"), "strided", HND, None),
        ([mha(order="hnd")], mha(order="hnd", page_size=8), "strided", "items of 16 entries", None),
        ([mha(shard=Shard(rank, 2)) for rank in range(2)], mha(), "resharded", SHARDS, None),
    ],
)
def test_how_and_why(sources, dest, how, why, runs):
    dest = dest.layout
    made = plan([source.layout for source in sources], dest)
    told = made.explain(tokens=1024)
    assert {row.how for row in told.rows} == {how}
    assert all(why in row.why for row in told.rows), told
    assert told.nbytes == 1024 * sum(region.nbytes for region in dest.regions) // (
        dest.spaces[0].entries_per_item
    )
    assert runs is None or told.runs == runs
    assert how in str(told)


def test_roles_that_share_runs_share_a_row():
    told = plan([mla().layout], mla().layout).explain()
    assert [(row.roles, row.layers) for row in told.rows] == [(("latent", "rope"), (0, 1, 2, 3))]


def test_missing_and_unsent_regions_have_rows():
    target, draft = mla().layout, mla(layers=[0], owner="draft", total_kv_layers=1).layout
    both = PoolLayout.merge(target, draft)
    missing = plan([target], both, allow_missing={"draft"}).explain()
    assert [(row.owner, row.how) for row in missing.rows[1:]] == [("draft", "missing")] * 2
    unsent = plan([both], target).explain()
    assert [(row.owner, row.how) for row in unsent.rows[1:]] == [("draft", "unsent")] * 2


def test_an_item_of_one_entry_has_no_order_to_differ_in():
    """Of every 128 tokens DeepSeek-V4 keeps one: pages of 128 hold one entry, of 256 two."""
    items = {"num_pages": 9, "num_window_pages": 9, "num_slots": 9, "device": "meta"}
    model = declare("deepseek_v4")
    source, dest = (
        model.build(packing="fp8", page_size=size, **items).layout for size in (128, 256)
    )
    reasons = {row.roles[0]: row.why for row in plan([source], dest).explain().rows}
    assert reasons["c128.latent"] == "items of 1 entries on the source, 2 on the destination"
