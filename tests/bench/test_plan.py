"""A plan that is known for layouts of the same shape, against one that is made anew."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.plan import plan
from disagg.plan_cache import PlanCache
from kvpool import MLAPool, Shard
from tests.bench.test_pools import LAYERS, dsv4


def mla(layers, rank=0, size=1):
    return MLAPool(
        layers=layers,
        total_kv_layers=LAYERS,
        num_pages=100,
        page_size=64,
        packing="bf16",
        device="meta",
        shard=Shard(rank, size),
    )


CASES = {
    "dsv4": lambda: ([dsv4()], dsv4()),
    "mla tp8 pp2": lambda: (
        [mla(layers, rank, 8) for layers in (range(31), range(31, LAYERS)) for rank in range(8)],
        mla(range(LAYERS)),
    ),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_plan_for_another_life_of_a_prefill(paired, make):
    sources, dest = make()
    first = [pool.layout for pool in sources]
    second = [replace(layout, generation="another life") for layout in first]
    cache = PlanCache()
    cache.plan(first, dest.layout)
    paired(lambda: cache.plan(second, dest.layout), lambda: plan(second, dest.layout))
    assert cache.misses == 1 and cache.hits
