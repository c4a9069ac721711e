"""Host work that is the same on every device, beside plain Python or a new plan: plans, and binding
of one request in shuffled pages.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from itertools import repeat

import numpy as np
import pytest

from disagg.plan import plan
from disagg.plan.cache import PlanCache
from kvpool import DSv4Pool, MHAPool, MLAPool, PoolLayout, RequestAddress, Span
from kvpool.layout.formats import Shard
from kvpool.models import declare, declare_draft

LAYERS, PAGE, V4_PAGE = 61, 64, 256
RATIOS = [128, 128, *[4, 128] * 29, 4]
MANY = 512
"""Ranks of prefill, a multiple of 64."""


def tuples(source, dest, ids):
    """A tuple (source, destination, length) for each buffer and item; `ids` are both sides' block
    tables.
    """
    rows = []
    for from_, to in zip(source.buffers, dest.buffers):
        lists = (
            side[layout.space_by_name[buffer.space].id_list]
            for side, layout, buffer in zip(ids, (source, dest), (from_, to))
        )
        for src, dst in zip(*lists):
            ends = from_.base + src * from_.item_bytes, to.base + dst * to.item_bytes
            rows.append((*ends, to.item_bytes))
    return rows


def regions(sources, dest):
    """A tuple (rank, source, destination, length) for each region of each rank that `dest` has
    too: the same names, one by one. Shards are not looked at, and nothing is joined or checked.
    """
    by_key = {region.key: region for region in dest.regions}
    rows = []
    for rank, layout in enumerate(sources):
        for region in layout.regions:
            other = by_key.get(region.key)
            if other is not None:
                src = layout.buffer_by_name[region.buffer].base + region.offset
                dst = dest.buffer_by_name[other.buffer].base + other.offset
                rows.append((rank, src, dst, other.nbytes))
    return rows


def times(calls, work):
    """Calls `work` so often."""
    return lambda: [work() for _ in repeat(None, calls)]


def layout_of(kind, layers, total=LAYERS, **more):
    options = {"num_pages": 8192, "page_size": PAGE, "dtype": "bf16", "device": "meta", **more}
    return kind(layers=layers, total_kv_layers=total, **options).layout


def dsv4():
    """DeepSeek-V4 of 61 layers."""
    sizes = {"page_size": V4_PAGE, "num_pages": 2049, "num_window_pages": 1024, "num_slots": 257}
    kinds = {"compress_ratios": RATIOS, "packing": "fp8", "dtype": None}
    return layout_of(DSv4Pool, range(LAYERS), **sizes, **kinds)


def parsed(layout):
    """A layout as a peer reads it."""
    return PoolLayout.from_msgpack(layout.to_msgpack())


def as_parsed(sources, dest):
    """Layouts in which nothing has been looked up since they were read."""
    return list(map(copy, sources)), copy(dest)


def mla():
    """DeepSeek-V3's pool on both sides."""
    return [layout_of(MLAPool, range(LAYERS))], layout_of(MLAPool, range(LAYERS))


def deepseek(ranks):
    """DeepSeek-V3.2 with its draft: ranks of prefill that are replicas, and one of decode."""
    declared = declare("deepseek_v32"), declare_draft("deepseek_v32")
    pools = (part.build(num_pages=8192, packing="fp8", device="meta") for part in declared)
    layout = parsed(PoolLayout.merge(*(pool.layout for pool in pools)))
    return [copy(layout) for _ in range(ranks)], copy(layout)


def heads(ranks):
    """Stages of ten layers, of 64 ranks with a head each, and one of four ranks of decode."""
    layers = range(ranks // 64 * 10)
    shape = {"total": len(layers), "num_kv_heads": 64, "head_dim": 128}
    sources = [
        layout_of(MHAPool, layers[first : first + 10], shard=Shard(rank, 64), **shape)
        for first in layers[::10]
        for rank in range(64)
    ]
    dest = layout_of(MHAPool, layers, shard=Shard(0, 4), **shape)
    return list(map(parsed, sources)), parsed(dest)


def sharded():
    """Sixteen ranks of prefill in two stages, and one of decode."""
    stages = range(31), range(31, LAYERS)
    ranks = [layout_of(MLAPool, part, shard=Shard(n, 8)) for part in stages for n in range(8)]
    return ranks, layout_of(MLAPool, range(LAYERS))


def test_plan_of_mla_beside_a_request_of_plain_python(paired):
    (source,), dest = mla()
    reference = partial(tuples, source, dest, page_ids(2048))
    paired(lambda: plan([source], dest), reference)


@pytest.mark.parametrize(
    "sides", [partial(deepseek, 8), partial(deepseek, MANY), partial(heads, MANY)],
    ids=["replicas, 8", f"replicas, {MANY}", f"no two alike, {MANY}"],
)  # fmt: skip
def test_new_plan(paired, sides, timed):
    """Of layouts that have just been read; the reference finds the regions of all ranks."""
    sources, dest = sides() if timed else sides.func(64)
    paired(lambda: plan(*as_parsed(sources, dest)), partial(regions, sources, dest))


@pytest.mark.parametrize(
    "sides",
    [lambda: ([dsv4()], dsv4()), sharded, *(partial(deepseek, n) for n in (8, MANY))],
    ids=["DSv4", "MLA from TP8 x PP2", "replicas, 8", f"replicas, {MANY}"],
)
def test_known_shape_beside_a_new_plan(paired, sides, timed):
    """At other pointers; times are of a hundred plans."""
    sources, dest = sides()
    cache = PlanCache()
    cache.plan(sources, dest)
    others = [parsed(replace(layout, generation="another life")) for layout in sources]
    here = parsed(dest)
    calls = 100 if timed else 1
    known = times(calls, lambda: cache.plan(others, here))
    paired(known, times(calls, lambda: plan(*as_parsed(others, here))), rounds=3)
    assert cache.hits


@pytest.mark.parametrize("pages", [1, 2048])
def test_bind_mla(paired, pages):
    (source,), dest = mla()
    ids = page_ids(pages)
    addresses = [RequestAddress(pages * PAGE, {"kv": Span(side["kv"])}) for side in ids]
    bind(paired, source, dest, addresses, calls=100 if pages == 1 else 1)


def test_bind_dsv4(paired, timed):
    """Compressed latents and index keys, window latents, rings."""
    tokens, addresses = (131_072 if timed else 4096), []
    for ids, window, ring in zip(page_ids(tokens // V4_PAGE), ([7, 3], [2, 9]), (2, 5)):
        spans = {"kv": Span(ids["kv"]), "ring": Span([ring])}
        spans["swa"] = Span(window, tokens // 128 - 2)
        addresses.append(RequestAddress(tokens, spans))
    bind(paired, dsv4(), dsv4(), addresses)


def page_ids(pages):
    """Pages in any order, on both sides."""
    random = np.random.default_rng(0)
    return [{"kv": (1 + random.permutation(2048)[:pages]).tolist()} for _ in range(2)]


def bind(paired, source, dest, addresses, calls=1):
    transfer = plan([source], dest)
    ids = [{name: span.ids.tolist() for name, span in a.spans.items()} for a in addresses]
    reference = times(calls, partial(tuples, source, dest, ids))
    paired(times(calls, lambda: transfer.bind(0, *addresses)), reference)
