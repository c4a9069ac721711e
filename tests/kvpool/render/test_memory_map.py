"""Look-ups of bytes against a painting of the item and against the formula."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import assume, given, strategies as st

from kvpool import DSv4Pool, MHAPool, NSAPool, Shard
from kvpool.item import Cell, item_bytes, item_regions
from kvpool.layout import Axis, Buffer, LayoutError, PoolLayout, Region, Space
from kvpool.render.memory_map import ByteLocation, where
from tests.kvpool.layout.test_template import paint, templates

COMMON = {"num_pages": 3, "page_size": 64, "device": "meta"}
SLOT = Space("state", "slot")


def layout_of(template, name="b"):
    """Slots whose items look like a template."""
    size = item_bytes(template)
    regions = item_regions(template, owner="target", layer=3, buffer=name)
    return PoolLayout((Buffer(name, "state", 0, size, size, 2),), regions, (SLOT,), 4)


def seen(place):
    """A place as `paint` writes it, its steps in any order."""
    if place is None:
        return None
    steps = zip((axis.name for axis in place.region.axes), place.steps)
    return place.region.role, frozenset(steps), place.byte


@given(templates())
def test_where_is_what_a_painting_of_the_item_shows(template):
    layout = layout_of(template)
    painted = [byte and (byte[0], frozenset(byte[1]), byte[2]) for byte in paint(template)]
    places = [where(layout, "b", byte) for byte in range(len(painted))]
    assert [seen(place) for place in places] == painted


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 20)), max_size=4),
    st.integers(1, 3),
    st.integers(0, 5),
)
def test_where_inverts_the_formula_also_for_axes_that_interlock(grid, width, offset):
    axes = tuple(Axis(f"a{n}", size, stride) for n, (size, stride) in enumerate(grid))
    region = Region("target", 0, "k", "b", offset, "uint8", axes, width)
    try:
        layout = PoolLayout((Buffer("b", "state", 0, 300, 300, 2),), (region,), (SLOT,), 1)
    except LayoutError:
        assume(False)
    expected = {}
    for steps in product(*(range(axis.size) for axis in axes)):
        at = offset + sum(step * axis.stride for step, axis in zip(steps, axes))
        expected |= {at + byte: ByteLocation(region, steps, byte) for byte in range(width)}
    assert {byte: place for byte in range(300) if (place := where(layout, "b", byte))} == expected


@pytest.mark.parametrize(
    ("buffer", "byte", "says"),
    [
        ("index_key", 8_444, "63, byte 0"),
        ("index_key", 8_191, "63, byte 127"),
        ("kv", 5 * 656 + 527, "5, byte 15"),
        ("k", 2 * 512 + 256, "k, entry 2, head 7, byte 0 of 256"),
    ],
)
def test_a_byte_location_reads_with_the_steps_of_the_model(buffer, byte, says):
    pool = NSAPool(layers=[0], packing="fp8", **COMMON)
    if buffer == "k":
        heads = {"num_kv_heads": 8, "head_dim": 128, "dtype": "bf16", "shard": Shard(3, 4)}
        pool = MHAPool(layers=[0], **heads, **COMMON)
    assert says in str(where(pool.layout, f"target.{buffer}.0", byte))


def test_the_spare_bytes_of_a_deepseek_v4_page_are_of_no_region():
    sizes = COMMON | {"page_size": 256, "num_window_pages": 3, "num_slots": 3}
    layout = DSv4Pool(layers=[0], compress_ratios=[4], packing="fp8", **sizes).layout
    spare = [36_864 + 8 * entry + 7 for entry in range(64)]
    for byte in (*spare, *range(37_376, 37_440)):
        assert where(layout, "target.c4.latent.0", byte) is None


@pytest.mark.parametrize(
    ("buffer", "byte", "error", "says"),
    [
        ("c", 0, KeyError, r"buffer 'c': not in this layout \(it has b\)"),
        ("b", 4, IndexError, "buffer b: byte 4 of items of 4"),
        ("b", -1, IndexError, "byte -1 of items of 4"),
    ],
)
def test_what_is_not_there_is_refused_by_name(buffer, byte, error, says):
    with pytest.raises(error, match=says):
        where(layout_of(Cell("k", 2, "bf16")), buffer, byte)
