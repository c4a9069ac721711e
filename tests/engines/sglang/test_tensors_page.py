"""docs/tensors.md: its calls, on the tensors of SGLang's real pools, give the regions that the
connector reads of them.
"""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from kvpool.layout import PoolLayout, Space
from tests.engines.sglang import sides
from tests.engines.sglang.oracle import Side
from tests.kvpool.layout.test_engine_tensors import CALLS, forms

LAYERS = 4
ROWS = [  # state, pool, and its tensors in the order of the page's rows, by role where it says so
    ("K and V", lambda: sides.mha(16), lambda pool: [pool.k_buffer, pool.v_buffer]),
    ("K and V, hnd", lambda: sides.mha(16), lambda pool: [pool.k_buffer, pool.v_buffer]),
    ("K and V, NPU", lambda: sides.npu_mha(), lambda pool: [[pool.k_buffer], [pool.v_buffer]]),
    ("latent and rope", lambda: sides.dsa(fp8=False), lambda pool: [pool.kv_buffer]),
    ("latent and rope, fp8", lambda: sides.dsa(), lambda pool: [pool.kv_buffer]),
    ("index keys", lambda: sides.dsa(), lambda pool: [pool.index_k_with_scale_buffer]),
]


@pytest.mark.parametrize(("state", "make", "held"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_of_the_page_describes_sglangs_own_tensors(state, make, held, monkeypatch):
    if state.endswith("hnd"):
        monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    with sides.alone():
        pool = make()
        side = Side(pool, sides.request(pool.page_size, 40, 1, sides.PAGES))
        known = sides.described(side, 8).layout
    ((shape, _, call),) = forms()["SGLang", state]
    pages = pool.size // pool.page_size + 1
    sizes = {"N": pool.page_size, "B": pages, "T": pages * pool.page_size, "L": LAYERS}
    sizes |= {"H": getattr(pool, "head_num", 1), "D": getattr(pool, "head_dim", 1)}
    parts = []
    for role, buffers in zip("kv", held(pool)):
        for layer, tensor in enumerate(buffers):
            assert list(tensor.shape) == eval(shape, dict(sizes))
            parts.append(eval(call, CALLS | sizes | {"t": tensor, "l": layer, "role": role}))
    page = PoolLayout.of(*parts, spaces=[Space("kv", entries_per_item=pool.page_size)])
    assert page.regions
    for region in page.regions:
        same = known.region_by_key[region.key]
        ours, theirs = page.buffer_of(region), known.buffer_of(same)
        assert ours.base + region.offset == theirs.base + same.offset
        assert (ours.item_stride, ours.items) == (theirs.item_stride, theirs.items)
        assert (region.axes, region.width) == (same.axes, same.width)
