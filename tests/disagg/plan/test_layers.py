"""A plan binds some layers of a request: parts of positions and layers add up to the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from disagg.plan import plan
from disagg.plan.cache import PlanCache
from kvpool import PoolLayout, RequestAddress, Span
from kvpool.describe import describe, describe_buffer
from kvpool.layout import Space
from kvpool.layout.formats import Shard
from tests import oracle
from tests.pools import CLASSES, PACKED, mla

TOKENS = 21
MANY = {"num_pages": 12, "num_window_pages": 16}
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
    tables = [oracle.place(source, TOKENS, seed) for seed, source in enumerate(sources, 1)]
    address = oracle.place(dest, TOKENS, 0)
    for source, table in zip(sources, tables):
        oracle.fill(source, table)
    oracle.blank(dest)
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
    table, address = oracle.place(source, 9, 1), oracle.place(dest, 9, 2)
    made = plan([source.layout], dest.layout)
    for owner, held in zip(("target", "draft"), dests):
        oracle.fill(source, table)
        oracle.blank(dest)
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


def test_all_layers_side_by_side_stay_one_run_and_each_layer_is_one():
    build = mla.but(layers=range(4), placement="page", num_pages=12)
    made = plan([build().layout], build().layout)
    table, address = (
        RequestAddress(12, {"kv": Span(np.array(ids))}) for ids in ((2, 9, 4), (7, 3, 5))
    )
    row = 4 * 24 * 2
    assert made.bind(0, table, address).nbytes.tolist() == [4 * row] * 3
    assert made.bind(0, table, address, layers=range(1, 2)).nbytes.tolist() == [row] * 3


def test_a_cached_plan_binds_the_layers_of_other_memory():
    build = mla.but(layers=range(4), placement="page", num_pages=12)
    cache = PlanCache()
    cache.plan([build().layout], build().layout)
    source, dest = build(), build()
    made = cache.plan([source.layout], dest.layout)
    assert cache.hits == 1
    table, address = oracle.place(source, TOKENS, 1), oracle.place(dest, TOKENS, 2)
    oracle.fill(source, table)
    oracle.blank(dest)
    for layer in range(4):
        batch = made.bind(0, table, address, layers=range(layer, layer + 1))
        oracle.apply(batch, [source], dest)
    oracle.assert_holds(dest, address)


def test_layers_in_one_buffer_of_an_engine_are_moved_one_by_one():
    import torch

    def side(seed):
        tensor = torch.zeros(9, 4, 3, 8, dtype=torch.uint8)  # item, entry, layer, byte
        dims = ("item", "entry", "dim")
        buffer = describe_buffer(tensor, ("item", "entry", "layer", "dim"), name="kv")
        seen = [
            describe(tensor[:, :, n], dims, role="latent", layer=n, buffer=buffer) for n in range(3)
        ]
        regions = tuple(region for each in seen for region in each.regions)
        layout = PoolLayout((buffer,), regions, (Space("kv", entries_per_item=4),), 3)
        views = {("target", n, "latent"): tensor[:, :, n].numpy() for n in range(3)}
        held = oracle.State(layout, [tensor.numpy().reshape(-1)], views)
        return held, oracle.place(held, 11, seed)

    (source, table), (dest, address) = side(1), side(2)
    oracle.fill(source, table)
    oracle.blank(dest)
    made = plan([source.layout], dest.layout)
    for layer in (2, 0, 1):
        batch = made.bind(0, table, address, layers=range(layer, layer + 1))
        assert batch.total == 11 * 8
        oracle.apply(batch, [source], dest)
    oracle.assert_holds(dest, address)
