"""Which bytes of a layout's memory are somebody else's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvpool import MHAPool
from kvpool.layout import Buffer, PoolLayout, Region, Space
from tests.pools import CLASSES
from tests.slices import models, sides

SLOT = Space("s", "slot", reserved=0)


def foreign(layout, first, end):
    """Whether each byte from pointer `first` to `end` is foreign, asked one by one."""
    bytes_ = np.arange(first, end, dtype=np.int64)
    return layout.foreign_bytes.among(bytes_, bytes_ + 1)


@settings(max_examples=300)
@given(st.data())
def test_a_range_is_foreign_where_one_byte_is_neither_described_nor_declared_padding(data):
    model = data.draw(models())
    side = data.draw(sides(model, 2, data.draw(st.integers(1, 9))))
    clear = side.described() | side.declared()
    ends = data.draw(st.lists(st.tuples(*[st.integers(0, clear.size)] * 2), max_size=20))
    starts, stops = (np.array(each, dtype=np.int64) for each in zip((0, 1), *map(sorted, ends)))
    base = side.raw.ctypes.data
    found = side.layout.foreign_bytes.among(base + starts, base + stops)
    assert found.tolist() == [not clear[a:b].all() for a, b in zip(starts, stops)]
    assert (foreign(side.layout, base, base + clear.size) == ~clear).all()


@pytest.mark.parametrize("build", CLASSES.values(), ids=list(CLASSES))
def test_the_memory_of_a_pool_s_buffers_is_its_own(build):
    layout = build(num_pages=9, device="meta").layout
    for buffer in layout.buffers:
        starts = buffer.base + np.arange(buffer.items) * buffer.item_stride
        assert not layout.foreign_bytes.among(starts, starts + buffer.item_bytes).any()


def test_pages_of_all_layers_are_one_stretch():
    numbers = {"num_kv_heads": 2, "head_dim": 8, "dtype": "bf16", "num_pages": 9, "page_size": 4}
    for placement in ("page", "stack"):
        pool = MHAPool(layers=range(3), **numbers, placement=placement, device="meta")
        assert not foreign(pool.layout, 0, 9 * 6 * 4 * 2 * 8 * 2).any()


def test_buffers_of_two_spaces_may_interleave():
    spaces = SLOT, Space("t", "slot", reserved=0)
    for items in (3, 2):
        buffers = Buffer("a", "s", 100, 10, 4, 3), Buffer("b", "t", 106, 10, 2, items, padding=True)
        regions = (Region("target", 0, "k", "a", 1, "uint8", (), 3),)
        layout = PoolLayout(buffers, regions, spaces, 1)
        clear = {101, 102, 103, 106, 107, 111, 112, 113, 116, 117, 121, 122, 123}
        if items == 3:
            clear |= {126, 127}
        assert {90 + int(n) for n in np.flatnonzero(~foreign(layout, 90, 140))} == clear


def test_bytes_between_buffers_are_foreign_and_touching_buffers_have_none_between():
    buffers = [
        Buffer(f"b{n}", "s", base, 8, 8, 2, padding=True) for n, base in enumerate((0, 16, 33))
    ]
    layout = PoolLayout(tuple(buffers), (), (SLOT,), 0)
    starts, ends = np.array([0, 31, 0, 33, 40, 5, 60]), np.array([32, 33, 34, 49, 50, 5, 60])
    found = layout.foreign_bytes.among(starts, ends).tolist()
    assert found == [False, True, True, False, True, False, False]


def test_a_layout_without_buffers_describes_nothing():
    layout = PoolLayout((), (), (), 0)
    assert layout.foreign_bytes.among(np.array([0, 5]), np.array([1, 5])).tolist() == [True, False]
