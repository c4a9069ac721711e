"""Which bytes of a layout's memory are somebody else's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvpool import MHAPool
from kvpool.layout import Buffer, PoolLayout, Space
from tests.pools import CLASSES
from tests.slices import models, sides

SLOT = Space("s", "slot", reserved=0)


@settings(max_examples=200)
@given(st.data())
def test_a_range_with_a_foreign_byte_is_never_covered(data):
    model = data.draw(models())
    side = data.draw(sides(model, 2, data.draw(st.integers(1, 9))))
    clear = side.described() | side.declared()
    ends = data.draw(st.lists(st.tuples(*[st.integers(0, clear.size)] * 2), max_size=20))
    starts, stops = (np.array(each, dtype=np.int64) for each in zip((0, 1), *map(sorted, ends)))
    base = side.raw.ctypes.data
    covered = side.layout.covers(base + starts, base + stops)
    assert all(clear[a:b].all() for a, b in zip(starts[covered], stops[covered]))


@pytest.mark.parametrize("build", CLASSES.values(), ids=list(CLASSES))
def test_the_memory_of_a_pool_s_buffers_is_its_own(build):
    layout = build(num_pages=9, device="meta").layout
    for buffer in layout.buffers:
        starts = buffer.base + np.arange(buffer.items) * buffer.item_stride
        assert layout.covers(starts, starts + buffer.item_bytes).all()


def test_pages_of_all_layers_are_one_stretch():
    numbers = {"num_kv_heads": 2, "head_dim": 8, "dtype": "bf16", "num_pages": 9, "page_size": 4}
    for placement in ("page", "stack"):
        pool = MHAPool(layers=range(3), **numbers, placement=placement, device="meta")
        end = np.array([9 * 6 * 4 * 2 * 8 * 2])
        assert pool.layout.covers(0 * end, end) and not pool.layout.covers(0 * end, end + 1)


def test_bytes_between_buffers_are_foreign_and_touching_buffers_have_none_between():
    buffers = [
        Buffer(f"b{n}", "s", base, 8, 8, 2, padding=True) for n, base in enumerate((0, 16, 33))
    ]
    layout = PoolLayout(tuple(buffers), (), (SLOT,), 0)
    starts, ends = np.array([0, 31, 0, 33, 40, 5, 60]), np.array([32, 33, 34, 49, 50, 5, 60])
    covered = layout.covers(starts, ends).tolist()
    assert covered == [True, False, False, True, False, True, False]
    assert not PoolLayout((), (), (), 0).covers(starts, ends).any()
