"""Digests of a request in shuffled pages, against one copy of the same bytes."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.digest.digest import digests, pieces
from disagg.plan import plan
from kvpool import MHAPool, RequestAddress, Span

PAGES, PAGE, LAYERS = 128, 64, 4


@pytest.mark.parametrize(("heads", "dim"), [(1, 512), (8, 64)])
def test_digest_rows_of_many_heads(paired, heads, dim):
    pool = MHAPool(
        layers=range(LAYERS),
        num_pages=2 * PAGES,
        page_size=PAGE,
        num_kv_heads=heads,
        head_dim=dim,
        dtype="f16",
    )
    random = np.random.default_rng(0)
    pool._slab.random_()
    ids = 1 + random.permutation(2 * PAGES - 1)[:PAGES]
    address = RequestAddress(PAGES * PAGE, {"kv": Span(ids)})
    given = pieces(plan([pool.layout], pool.layout), 0, range(PAGES * PAGE), PAGES * PAGE)
    memory = [pool.view(role, layer).numpy() for role in "kv" for layer in range(LAYERS)]

    def ours():
        for _ in digests(pool.layout, address, given):
            pass

    paired(ours, lambda: [part[ids] for part in memory])
