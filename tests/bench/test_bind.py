"""Binding 61 layers x 2048 fragmented pages, against a builder of Python tuples."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.plan import plan
from kvpool import MLAPool, RequestAddress, Span

LAYERS, PAGES, PAGE = 61, 2048, 64


@pytest.fixture(scope="module")
def sides():
    """DeepSeek-V3's pool on both sides, without memory, and one request in shuffled pages."""
    pools = [
        MLAPool(
            layers=range(LAYERS), num_pages=3 * PAGES, page_size=PAGE, dtype="bf16", device="meta"
        )
        for _ in range(2)
    ]
    random = np.random.default_rng(0)
    ids = [1 + random.permutation(3 * PAGES - 1)[:PAGES] for _ in pools]
    return pools, ids


def tuples(pools, ids):
    """What a builder does that makes one tuple a descriptor."""
    source, dest = (pool.layout.buffers for pool in pools)
    found = []
    for there, here in zip(source, dest):
        for src, dst in zip(*ids):
            found.append(
                (
                    there.base + src * there.item_bytes,
                    here.base + dst * here.item_bytes,
                    here.item_bytes,
                )
            )
    return found


@pytest.mark.parametrize("calls", [1, 50], ids=["single", "sustained"])
def test_bind_61_layers_x_2048_pages(paired, sides, calls):
    pools, ids = sides
    made = plan([pools[0].layout], pools[1].layout)
    addresses = [RequestAddress(PAGES * PAGE, {"kv": Span(each)}) for each in ids]
    lists = [each.tolist() for each in ids]
    expected = sorted(tuples(pools, lists))
    batch = made.bind(0, *addresses)
    assert sorted(zip(*(column.tolist() for column in batch))) == expected
    paired(lambda: made.bind(0, *addresses), lambda: tuples(pools, lists), calls=calls)


def test_plan_of_61_layers(paired, sides):
    """A plan is made once per pair of peers; the reference is one request of the tuple builder."""
    pools, ids = sides
    lists = [each.tolist() for each in ids]
    made = plan([pools[0].layout], pools[1].layout)
    assert len(made.routes) == 1 and made.contributors() == [0]
    paired(lambda: plan([pools[0].layout], pools[1].layout), lambda: tuples(pools, lists))
