"""A plan binds some layers of a request, or what its number of tokens does not decide: parts of
positions and layers add up to the whole.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from disagg.plan import Count, plan
from disagg.plan.cache import PlanCache
from kvpool import PoolLayout, RequestAddress
from kvpool.describe import describe, describe_buffer
from kvpool.layout import Space
from kvpool.layout.formats import Shard
from tests import oracle
from tests.disagg.plan.test_packed import cache
from tests.pools import CLASSES, PACKED, mla

TOKENS, ROOM = 21, 30
MANY = {"num_pages": 14, "num_window_pages": 24}
POOLS = {**CLASSES, "dsv4 fp8": PACKED["dsv4 fp8"], "hybrid nsa fp8": PACKED["hybrid nsa fp8"]}
STAGES = ({"layers": range(3)}, {"layers": range(3, 4)})

# options of each rank of prefill, and those of decode
SHAPES = {
    "equal": ([{}], {}),
    "by page": ([{"placement": "page"}], {"placement": "page"}),
    "by page to by layer": ([{"placement": "page"}], {}),
    "TP 2 to 1": ([{"shard": Shard(rank, 2)} for rank in range(2)], {}),
    "TP 2 to 1 by page": (
        [{"shard": Shard(rank, 2), "placement": "page"} for rank in range(2)],
        {"placement": "page"},
    ),
    "PP 2 to 1": ([{**each, "total_kv_layers": 4} for each in STAGES], {}),
    "PP 2 to 1 by page": (
        [{**each, "total_kv_layers": 4, "placement": "page"} for each in STAGES],
        {"placement": "page"},
    ),
}


def cut(data, stop, what):
    """A partition of 0 to `stop` into ranges."""
    edges = sorted(data.draw(st.sets(st.integers(1, stop - 1)), label=what))
    return [range(low, high) for low, high in zip([0, *edges], [*edges, stop])]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pool", POOLS)
@settings(max_examples=8)
@given(data=st.data())
def test_any_parts_of_positions_and_layers_move_each_byte_once(pool, shape, data):
    there, here = SHAPES[shape]
    sources = [POOLS[pool].but(**MANY, **options)() for options in there]
    dest = POOLS[pool].but(**MANY, **here)()
    layers = 1 + max(region.layer for region in dest.layout.regions)
    chunks = cut(data, TOKENS, "chunks")
    parts = [
        (tokens, part)
        for tokens in chunks
        for part in data.draw(st.permutations(cut(data, layers, "layers")), label="order")
    ]
    tables, address = oracle.staged(sources, dest, TOKENS)
    made = plan([source.layout for source in sources], dest.layout)
    moved = np.zeros(2, dtype=np.int64)
    for number, (tokens, some) in enumerate(parts):
        for batch in made.bind_all(tables, address, tokens=tokens, layers=some):
            oracle.apply(batch, sources, dest)
            moved[0] += batch.total
        if number == 0:  # nothing of another layer is written
            oracle.assert_holds(oracle.of_layers(dest, some), address, tokens)
    oracle.assert_holds(dest, address)
    for tokens in chunks:
        moved[1] += sum(b.total for b in made.bind_all(tables, address, tokens=tokens))
    tail = sum(region.nbytes for region in dest.layout.regions)  # last pages may move whole
    assert moved[0] <= moved[1] + tail, "parts move more than chunks of all layers"


def test_layers_of_a_draft_are_chosen_by_their_owner():
    pools = [mla.but(owner=owner, layers=range(2)) for owner in ("target", "draft")]
    sources, dests = ([build() for build in pools] for _ in range(2))
    source, dest = oracle.merged(*sources), oracle.merged(*dests)
    made = plan([source.layout], dest.layout)
    for owner, held in zip(("target", "draft"), dests):
        (table,), address = oracle.staged([source], dest, 9)
        (batch,) = made.bind_all([table], address, layers=range(9), owner=owner)
        oracle.apply(batch, [source], dest)
        for pool in dests:
            if pool is held:
                oracle.assert_holds(pool, address)
            else:
                assert (oracle.state(pool).memory[0] == oracle.DEST).all()
    assert made.contributors(range(1, 5), "draft") == [0]
    assert made.contributors(range(2, 5), "draft") == made.contributors(range(2), "eagle") == []


def test_contributors_of_layers_are_the_ranks_that_hold_them():
    stages = [mla.but(layers=part, total_kv_layers=4)() for part in (range(3), range(3, 4))]
    dest = mla.but(layers=range(4))()
    made = plan([stage.layout for stage in stages], dest.layout)
    assert [made.contributors(range(n, n + 1)) for n in range(5)] == [[0], [0], [0], [1], []]
    assert made.contributors(range(2, 4)) == [0, 1]


def test_a_cached_plan_binds_the_layers_of_other_memory():
    build = mla.but(layers=range(4), placement="page", num_pages=12)
    cache = PlanCache()
    cache.plan([build().layout], build().layout)
    source, dest = build(), build()
    made = cache.plan([source.layout], dest.layout)
    assert cache.hits == 1
    (table,), address = oracle.staged([source], dest, TOKENS)
    for layer in range(4):
        batch = made.bind(0, table, address, layers=range(layer, layer + 1))
        oracle.apply(batch, [source], dest)
    oracle.assert_holds(dest, address)


def test_layers_in_one_buffer_of_an_engine_are_moved_one_by_one():
    def side():
        tensor = torch.zeros(9, 4, 3, 8, dtype=torch.uint8)  # item, entry, layer, byte
        dims = ("item", "entry", "dim")
        buffer = describe_buffer(tensor, ("item", "entry", "layer", "dim"), name="kv")
        seen = [
            describe(tensor[:, :, n], dims, role="latent", layer=n, buffer=buffer) for n in range(3)
        ]
        regions = tuple(region for each in seen for region in each.regions)
        layout = PoolLayout((buffer,), regions, (Space("kv", entries_per_item=4),), 3)
        views = {("target", n, "latent"): tensor[:, :, n].numpy() for n in range(3)}
        return oracle.State(layout, [tensor.numpy().reshape(-1)], views)

    source, dest = side(), side()
    (table,), address = oracle.staged([source], dest, 11)
    made = plan([source.layout], dest.layout)
    for layer in (2, 0, 1):
        batch = made.bind(0, table, address, layers=range(layer, layer + 1))
        assert batch.total == 11 * 8
        oracle.apply(batch, [source], dest)
    oracle.assert_holds(dest, address)


HOLDERS = {
    **{name: CLASSES[name].but(**MANY) for name in ("mha", "swa", "hybrid", "dsv4")},
    "packed": cache,
    "packed window": lambda: cache(window=5),
}


@pytest.mark.parametrize("cuts", [(0, 21), (0, 8, 21), (0, 7, 16, 20, 21)], ids=str)
@pytest.mark.parametrize("name", HOLDERS)
def test_what_the_number_decides_is_bound_after_all_else_and_nothing_twice(name, cuts):
    source, dest = HOLDERS[name](), HOLDERS[name]()
    (theirs,), _ = oracle.staged([source], dest, TOKENS)
    ours = oracle.place(dest, ROOM)
    made = plan([source.layout], dest.layout)
    real = RequestAddress(TOKENS, ours.spans)
    parts = []
    for start, stop in pairwise(cuts):
        now = RequestAddress(stop, theirs.spans)
        parts.append((now, ours, range(start, stop), Count.UNKNOWN))
    parts.append((theirs, real, range(TOKENS), Count.LEARNED))
    written = []
    for here, there, tokens, count in parts:
        batch = made.bind(0, here, there, tokens=tokens, count=count)
        oracle.apply(batch, [source], dest)
        written += [np.arange(at, at + size) for at, size in zip(batch.dst, batch.nbytes)]
        assert batch.runs == 0 or made.needs_count(0) or count is Count.UNKNOWN
    oracle.assert_holds(dest, real)
    bytes_written = np.concatenate(written)
    assert np.unique(bytes_written).size == bytes_written.size
