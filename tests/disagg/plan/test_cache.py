"""A cached plan equals a new one."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from disagg.plan import IncompatibleLayouts, plan
from disagg.plan.cache import PlanCache
from kvpool import PoolLayout
from kvpool.item import Cell, Repeat
from tests.disagg.digest.test_digest import CASES, TOKENS, ranks
from tests.disagg.plan.test_geometry import geometries, pools_of
from tests.disagg.plan.test_plan import npu_style
from tests.oracle import apply, assert_holds, built, staged
from tests.pools import mha, mla


def same(one, other) -> bool:
    """Whether all fields are equal, arrays included."""
    if is_dataclass(one) and type(one) is type(other):
        compared = (f.name for f in fields(one) if not f.name.startswith("_"))
        return all(same(getattr(one, name), getattr(other, name)) for name in compared)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


def layouts(pools):
    return [pool.layout for pool in pools]


def hit(cache, sources, dest):
    """The cached plan between them."""
    before = cache.hits, cache.misses
    found = cache.plan(layouts(sources), dest.layout)
    assert (cache.hits, cache.misses) == (before[0] + 1, before[1])
    return found


def restarts(make, count=2):
    """The same sides with other memory."""
    found = [make() for _ in range(count)]
    bases = {b.base for sources, dest in found for b in dest.layout.buffers}
    assert len(bases) == sum(len(dest.layout.buffers) for _, dest in found)
    return found


@pytest.mark.parametrize("case", CASES)
def test_restarts_of_any_two_pools_hit_with_an_equal_plan(case):
    build, source, dest = CASES[case]
    cache = PlanCache()
    first, second = restarts(lambda: (ranks(build, **source), ranks(build, **dest)[0]))
    made = cache.plan(layouts(first[0]), first[1].layout)
    assert same(made, plan(layouts(first[0]), first[1].layout))
    assert same(hit(cache, *second), plan(layouts(second[0]), second[1].layout))


@settings(max_examples=60)
@given(geometries(layers=6, pp=3, page=20))
def test_restarts_of_any_geometry_hit_with_an_equal_plan(geometry):
    cache = PlanCache()
    first, second = restarts(lambda: pools_of(geometry, 1))
    cache.plan(layouts(first[0]), first[1].layout)
    assert same(hit(cache, *second), plan(layouts(second[0]), second[1].layout))


def test_restarts_of_stacked_tensors_hit_with_an_equal_plan():
    def stacked(page):
        return npu_style([0, 1, 2], 12, page, (16, 8))

    cache = PlanCache()
    first, second = restarts(lambda: ([stacked(4)], stacked(6)))
    cache.plan(layouts(first[0]), first[1].layout)
    assert same(hit(cache, *second), plan(layouts(second[0]), second[1].layout))


@pytest.mark.parametrize("case", ["mha: order and tp", "dsv4: page placement", "hybrid: taps"])
def test_bytes_are_exact_after_restarts(case):
    build, source, dest = CASES[case]
    cache = PlanCache()
    for life in range(5):
        sources, into = ranks(build, **source), ranks(build, **dest)[0]
        made = cache.plan(layouts(sources), into.layout)
        assert (cache.hits, cache.misses) == (life, 1)
        there, here = staged(sources, into, TOKENS, seed=10 * life)
        for batch in made.bind_all(there, here):
            apply(batch, sources, into)
        assert_holds(into, here)


def moved(layout: PoolLayout, bases: dict[str, int]) -> PoolLayout:
    buffers = (replace(b, base=bases.get(b.name, b.base)) for b in layout.buffers)
    return replace(layout, buffers=tuple(buffers))


def test_buffers_that_are_no_longer_side_by_side_are_a_miss():
    source, dest = (mla(placement="page", device="meta").layout for _ in range(2))
    first, second, *_ = dest.buffers
    apart = moved(dest, {b.name: n << 30 for n, b in enumerate(dest.buffers)})
    crossed = moved(dest, {first.name: second.base, second.name: first.base})
    assert len({each.fingerprint() for each in (dest, apart, crossed)}) == 3
    cache = PlanCache()
    for number, layout in enumerate((dest, apart, crossed), 1):
        for where in (0, 1 << 40):
            other = moved(layout, {b.name: b.base + where for b in layout.buffers})
            assert same(cache.plan([source], other), plan([source], other))
        assert (cache.hits, cache.misses) == (number, number)


def test_the_order_and_number_of_sources_are_part_of_the_key():
    sources, dest = layouts(ranks(mha, tp=2)), mha().layout
    cache = PlanCache()
    for some in (sources, sources[::-1], [*sources, mha().layout]):
        assert same(cache.plan(some, dest), plan(some, dest))
    assert (cache.hits, cache.misses) == (0, 3)


def test_the_generation_of_a_hit_is_the_new_one():
    cache, dest = PlanCache(), mla().layout
    for generation in ("one", "two"):
        source = replace(mla().layout, generation=generation)
        assert cache.plan([source], dest).sources == (source,)
    assert (cache.hits, cache.misses) == (1, 1)


def test_a_refusal_is_raised_each_time_and_not_cached():
    cache, dest = PlanCache(), mla(packing="f32").layout
    for _ in range(2):
        with pytest.raises(IncompatibleLayouts, match="target layers 0-3 latent: bfloat16 on pre"):
            cache.plan([mla().layout], dest)
    assert (cache.hits, cache.misses) == (0, 2)


@given(st.lists(st.integers(0, 5), max_size=30))
def test_the_plans_used_last_are_kept(asked):
    dest = SMALL[0]
    cache, kept, hits = PlanCache(capacity=3), [], 0
    for number in asked:
        made = cache.plan([SMALL[number]], dest)
        assert made.sources == (SMALL[number],)
        hits += number in kept
        kept = [*(n for n in kept if n != number), number][-3:]
    assert (cache.hits, cache.misses) == (hits, len(asked) - hits)


SMALL = [
    built([(0, "kv", 5 + n, Repeat("entry", 2, Cell("latent", 4, "bf16")))], page=2).layout
    for n in range(6)
]
