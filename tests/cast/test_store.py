"""Rows that another engine has stored in another format."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.store import Store
from disagg.store.floors import open_floor
from disagg.store.upkeep.compare import compare, of_ranks
from disagg.store.upkeep.inventory import take
from kvpool.layout.formats import Shard
from tests import oracle
from tests.cast.test_pools import built, hand_over, pairs
from tests.disagg.store.stores import CHUNK, fresh, got, put, stores
from tests.pools import mha

TOKENS = 3 * CHUNK
PROMPT = np.random.default_rng(7).integers(0, 1000, TOKENS)
MANY = {"num_pages": 40, "num_window_pages": 40}


def pool_of(packing):
    return built(mha, packing, num_pages=40)


def by_store(planned, sources, tables, dest, table, chunks, most):
    """Stored by who has them, found and read by who converts."""
    url, (chunk,) = fresh(), chunks
    with stores(url, sources) as writers:
        for store, there in zip(writers, tables):
            put(store, PROMPT, there)
        with Store(url, dest.layout, chunk_tokens=CHUNK) as plain:
            assert (plain.lookup(PROMPT) == 0) == (planned.cast is not None)
        with Store(url, dest.layout, chunk_tokens=CHUNK, cast=True) as reader:
            assert reader.lookup([*PROMPT, 5]) == TOKENS
            assert got(reader, PROMPT, table, chunk) is None


@pytest.mark.parametrize(("build", "source", "dest"), [*pairs()])
def test_any_pair_of_packings(build, source, dest):
    more = {name: size for name, size in MANY.items() if name in build.arguments}
    first, *others = (built(build, packing, **more) for packing in (source, dest, dest))
    hand_over([first], *others, TOKENS, by=by_store)


@pytest.mark.parametrize("start", [0, CHUNK, CHUNK + 5])
def test_ranks_pages_and_a_prefix_of_its_own(start):
    sizes = {"layers": range(3), "num_kv_heads": 4, "num_pages": 40}
    sources = [
        built(mha, "bf16", page_size=4, order="hnd", shard=Shard(rank, 4), **sizes)
        for rank in range(4)
    ]
    for rank in range(2):
        dest, want = (
            built(mha, "fp8", page_size=12, shard=Shard(rank, 2), **sizes) for _ in range(2)
        )
        hand_over(sources, dest, want, TOKENS, start=start, by=by_store)


def test_what_is_there_as_it_is_needed_is_not_converted():
    """Another engine has stored the same prompt in this one's format, after who has not."""
    url, given, own, dest = fresh(), *(pool_of(each) for each in ("bf16", "fp8", "fp8"))
    for seed, pool in enumerate((given, own)):
        with Store(url, pool.layout, chunk_tokens=CHUNK) as store:
            put(store, PROMPT, oracle.filled(pool, TOKENS, seed))
    with Store(url, dest.layout, chunk_tokens=CHUNK, cast=True) as reader:
        oracle.blank(dest)
        table = oracle.place(dest, TOKENS, 1)
        assert got(reader, PROMPT, table) is None
        oracle.assert_holds(dest, table)


def test_roles_that_may_not_be_converted_are_not_found():
    url, given, dest = fresh(), pool_of("bf16"), pool_of("fp8")
    with Store(url, given.layout, chunk_tokens=CHUNK) as store:
        put(store, PROMPT, oracle.filled(given, TOKENS))
    with Store(url, dest.layout, chunk_tokens=CHUNK, cast=["k"]) as reader:
        assert reader.lookup(PROMPT) == 0
        (why,) = reader.stats().reasons.values()
        assert "layers 0-3 v: bfloat16 on prefill, float8_e4m3fn on decode" in why


def test_what_an_operator_is_told():
    url, pools = fresh(), [pool_of("bf16"), pool_of("fp8")]
    for pool in pools:
        with Store(url, pool.layout, chunk_tokens=CHUNK) as store:
            put(store, PROMPT, oracle.filled(pool, TOKENS))
    held = take(open_floor(url))
    assert len(held.namespaces) == 2 and not held.foreign.objects
    given, wanted = (of_ranks("", [("", pool.layout)], {}, CHUNK) for pool in pools)
    told = compare(given, wanted)
    assert not told.shares(True) and told.converts(True) and told.converts(False)
    other = built(mha, "fp8", head_dim=32, v_head_dim=64)
    assert not compare(given, of_ranks("", [("", other.layout)], {}, CHUNK)).converts(True)
