"""Rows of pools in one format, handed over to pools in another."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from disagg.plan import IncompatibleLayouts, plan
from kvpool.layout.formats import Shard
from tests import oracle
from tests.cast.rows import bytes_of, move, names, read, spots, write
from tests.pools import CLASSES, mha

PACKINGS = "bf16", "f32", "fp8", "mxfp8", "e4m3"


def built(build, packing, **more):
    """A pool, or None if the family has no such packing."""
    try:
        return build.but(packing=packing, dtype=None, **more)()
    except ValueError:
        return None


def pairs():
    """Families, and two packings that they have."""
    for name, build in CLASSES.items():
        known = [packing for packing in PACKINGS if built(build, packing) is not None]
        for source, dest in permutations(known, 2):
            yield pytest.param(build, source, dest, id=f"{name} {source} to {dest}")


def rows_for(pool, key, tokens, rng):
    """Values of a whole model's rows, some of them large, small or zero."""
    region = pool.layout.region_by_key[key]
    space = pool.layout.space_of(region)
    entries = max(1, int(space.written(tokens))) if space.has_entries else 1
    shape = [entries, *(axis.total for axis in region.inner_axes)]
    elements = pool.view(key[2], key[1]).shape[-1]
    rows = rng.standard_normal([*shape, elements]) * np.exp2(rng.integers(-8, 8, [*shape, 1]))
    rows[rng.random(rows.shape) < 0.05] = 0
    return rows.astype(np.float32)


def stored(pool, key, table=None):
    """All bytes of a region."""
    return pool.view(key[2], key[1]).contiguous().view(torch.uint8).numpy()


def live(pool, key, table):
    """Those of a request's entries."""
    _, items, steps = spots(pool, key, table)
    return bytes_of(pool, key)[items, steps]


def hand_over(
    sources,
    dest,
    want,
    tokens,
    *,
    start=0,
    edges=(),
    most=1 << 16,
    seed=0,
    by=move,
    everywhere=True,
):
    """Every row that decode stores is what its format makes of the value that prefill's has, and
    (`everywhere`) no other byte has changed. `by` moves them.
    """
    rng = np.random.default_rng(seed)
    planned = plan([source.layout for source in sources], dest.layout, cast=True)
    tables = [oracle.filled(source, tokens, seed + n) for n, source in enumerate(sources)]
    table = oracle.place(dest, tokens, seed + 9)
    for pool in (dest, want):
        oracle.blank(pool)
    values = {}
    for key in names(sources[0]):
        values[key] = rows_for(sources[0], key, tokens, rng)
        for source, there in zip(sources, tables):
            if key in source.layout.region_by_key:
                write(source, key, there, values[key])
    marks = [start, *edges, tokens]
    chunks = [range(first, last) for first, last in pairwise(marks)]
    by(planned, sources, tables, dest, table, chunks, most)
    arrival = planned.cast.arrival if planned.cast else None
    for key in names(dest):
        if arrival is None or key not in arrival.conversions:
            continue
        whole = np.zeros_like(values[key])
        for source, there in zip(sources, tables):
            entries, held = read(source, key, there)
            axes = source.layout.region_by_key[key].inner_axes
            place = (entries, *(slice(axis.start, axis.stop) for axis in axes))
            whole[place] = held
        write(want, key, table, whole, start)
    converted = arrival.converted if arrival else set()
    for key in dest.layout.region_by_key:
        if key in converted:
            held = stored if everywhere else live
            mine, theirs = (held(pool, key, table) for pool in (dest, want))
            assert np.array_equal(mine, theirs), key
    return planned


@pytest.mark.parametrize(("build", "source", "dest"), [*pairs()])
def test_any_pair_of_packings(build, source, dest):
    pools = (built(build, packing) for packing in (source, dest, dest))
    first, *others = pools
    hand_over([first], *others, 12)


@st.composite
def geometries(draw):
    """Both sides of a hand-over: packings, pages, orders, ranks; and what is handed over how."""
    heads = draw(st.sampled_from([1, 2, 4]))
    source, dest = draw(st.permutations(PACKINGS))[:2]
    ranks = [draw(st.sampled_from([n for n in (1, 2, 4) if n <= heads])) for _ in range(2)]
    pages = [draw(st.sampled_from([1, 2, 8, 16])) for _ in range(2)]
    orders = [draw(st.sampled_from(["nhd", "hnd"])) for _ in range(2)]
    tokens = draw(st.integers(1, 40))
    start = draw(st.integers(0, tokens - 1))
    edges = sorted(draw(st.sets(st.integers(start + 1, tokens), max_size=2)) - {tokens})
    most = draw(st.sampled_from([1 << 15, 1 << 18]))
    return heads, (source, dest), ranks, pages, orders, (tokens, start, edges), most


@given(geometry=geometries(), seed=st.integers(0, 1 << 16))
def test_any_geometry(geometry, seed):
    heads, packings, ranks, pages, orders, (tokens, start, edges), most = geometry

    def pools(side, rank=None):
        each = range(ranks[side]) if rank is None else [rank]
        return [
            mha.but(
                packing=packings[side],
                dtype=None,
                layers=range(3),
                num_kv_heads=heads,
                head_dim=32,
                v_head_dim=64,
                page_size=pages[side],
                num_pages=2 + -(-tokens // pages[side]),
                order=orders[side],
                shard=Shard(number, ranks[side]),
            )()
            for number in each
        ]

    sources = pools(0)
    for rank in range(ranks[1]):
        (dest,), (want,) = pools(1, rank), pools(1, rank)
        hand_over(sources, dest, want, tokens, start=start, edges=edges, most=most, seed=seed)


def test_roles_that_may_be_converted_are_a_list_and_others_are_still_told_how():
    """With some roles allowed, the others' reasons are as they are without any."""
    source, dest = built(mha, "bf16"), built(mha, "fp8")
    with pytest.raises(ValueError, match="cast='prefill': True, False, or a list of roles"):
        plan([source.layout], dest.layout, cast="prefill")
    reasons = {}
    for cast in (False, ["k"]):
        with pytest.raises(IncompatibleLayouts) as refused:
            plan([source.layout], dest.layout, cast=cast)
        reasons[bool(cast)] = {(r.role, r.sentence) for r in refused.value.reasons}
    assert {role for role, _ in reasons[False]} == {"k", "v"}
    assert reasons[True] == {(role, text) for role, text in reasons[False] if role == "v"}
    assert all(text.endswith("cast=True.") for _, text in reasons[True])
