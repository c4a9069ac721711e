"""What a store holds is listed, drawn, checked and removed alike on every floor."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.store import Store
from disagg.store.floors import open_floor
from disagg.store.upkeep.check import check_all
from disagg.store.upkeep.collect import choose, remove
from disagg.store.upkeep.inventory import take
from disagg.store.upkeep.tree import chunks_of, read_forest, runs
from kvpool import Shard
from tests import oracle
from tests.disagg.store.stores import CHUNK, put, stores
from tests.pools import mha

TOKENS = np.random.default_rng(2).integers(0, 900, 3 * CHUNK)


@pytest.fixture
def written(floor_url, space):
    """A prompt of three chunks by two ranks, of a model that no other test has."""
    pools = [mha(num_pages=40, shard=Shard(rank, 2)) for rank in range(2)]
    with stores(floor_url, pools, conventions={"model": space}) as writing:
        for store, pool in zip(writing, pools):
            put(store, TOKENS, oracle.filled(pool, len(TOKENS)))
        namespace, keys = writing[0].namespace, writing[0].keys(TOKENS).keys
    floor = open_floor(floor_url)
    yield floor, namespace, keys
    floor.delete([entry.name for entry in floor.list(namespace)])
    floor.close()


def test_every_floor_is_listed_and_checked(written):
    floor, namespace, keys = written
    held = take(floor, namespace).namespaces[namespace]
    assert held.keys == {*keys} and len(held.geometries) == 1
    assert held.amount(kind="full").objects == 6
    verdicts = [*check_all(floor, floor.list(namespace), {namespace: held})]
    assert [verdict.state for verdict in verdicts] == ["sound"] * 7
    (entry, *_) = (one for one in floor.list(namespace) if one.name.endswith("1.full"))
    with floor.read(entry.name, [(0, entry.size)]) as (data,):
        damaged = bytearray(data)
    damaged[-1] ^= 4
    floor.put(entry.name, [bytes(damaged)])
    bad = [v for v in check_all(floor, floor.list(namespace), {namespace: held}) if v.why]
    assert [(v.name, v.state) for v in bad] == [(entry.name, "damaged")]


def test_every_floor_has_trees_and_loses_the_deepest_chunk_first(written, floor_url):
    floor, namespace, keys = written
    forest = read_forest(floor, chunks_of(floor.list(namespace)))
    (root,) = forest.roots
    (run,) = runs(root)
    assert [chunk.key for chunk in run.chunks] == [*keys]
    assert all(len(chunk.names) == 2 for chunk in run.chunks) and forest.lost == ()
    removal = choose(forest, keep=run.nbytes - 1)
    assert [chunk.key for chunk in removal.chunks] == [keys[2]]
    remove(floor, removal.chunks)
    pool = mha(num_pages=40)
    conventions = next(iter(take(floor, namespace).namespaces[namespace].geometries.values()))
    with Store(
        floor_url, pool.layout, chunk_tokens=CHUNK, conventions=conventions.conventions
    ) as store:
        assert store.namespace == namespace
        assert store.lookup(TOKENS) == 2 * CHUNK
