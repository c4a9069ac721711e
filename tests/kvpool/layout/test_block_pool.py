"""Spaces whose ids come from one block pool, and buffers that lie over one another for it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvpool import Allocator
from kvpool.item import Cell, Repeat
from kvpool.layout import Buffer, LayoutError, PoolLayout, Region, Slab, Space
from kvpool.pools.base import KVPool
from kvpool.pools.placement import BufferSpec
from kvpool.render.html import html
from kvpool.render.svg import svg
from kvpool.render.text import space_words
from tests.kvpool.layout.test_codec import both

KV = Space("kv", block_pool="blocks")
SWA = Space("swa", window=8, block_pool="blocks")
STATE = Space("state", "slot", block_pool="blocks")
SPACES = (KV, SWA, STATE)


def buffer(space, base=0, nbytes=32, stride=64, items=4, name=None, **more):
    return Buffer(name or f"{space}.{base}", space, base, stride, nbytes, items, **more)


def layout(*buffers, spaces=SPACES, regions=()):
    return PoolLayout(buffers, regions, spaces, 1)


def hybrid():
    """Two layers of kv, one of swa and a state, from byte 0 of one block of 64 bytes."""
    parts = buffer("kv", 0), buffer("kv", 32), buffer("swa", 0, 48), buffer("state", 0, 64)
    regions = [
        Region("target", number, "k", each.name, 0, "uint8", (), 8)
        for number, each in enumerate(parts)
    ]
    return layout(*parts, regions=regions)


# what may lie over one another


def shared_bytes(one, two):
    """Pairs of items, one of each buffer, that share a byte."""
    covers = [
        {b.base + i * b.item_stride + at: i for i in range(b.items) for at in range(b.item_bytes)}
        for b in (one, two)
    ]
    return {(covers[0][at], covers[1][at]) for at in covers[0].keys() & covers[1].keys()}


def legal(found, spaces):
    """Whether no byte is of two buffers but those of one item of two id lists of one pool."""
    by_name = {space.name: space for space in spaces}
    lists = {space.name: by_name[space.ids or space.name] for space in spaces}
    for one, two in combinations(found, 2):
        shared, ids = shared_bytes(one, two), [lists[each.space] for each in (one, two)]
        pooled = ids[0].block_pool is not None and ids[0].block_pool == ids[1].block_pool
        if shared and (ids[0] == ids[1] or not pooled or any(i != j for i, j in shared)):
            return False
    return True


@settings(max_examples=400)
@given(st.data())
def test_buffers_are_taken_if_what_they_share_is_one_item_of_two_lists_of_one_pool(data):
    pools = st.sampled_from(("blocks", "blocks", "other", None))
    spaces = [Space(name, reserved=0, block_pool=data.draw(pools)) for name in "abc"]
    spaces.append(Space("d", reserved=0, ids="a"))
    stride = data.draw(st.integers(4, 12))
    even = data.draw(st.booleans())
    items = data.draw(st.integers(1, 3))
    found = [
        Buffer(
            f"b{number}",
            data.draw(st.sampled_from("abcd")),
            data.draw(st.integers(0, stride - 1 if even else 40)),
            stride if even else data.draw(st.sampled_from((stride, stride + 1))),
            data.draw(st.integers(1, 4)),
            items,
        )
        for number in range(data.draw(st.integers(1, 4)))
    ]
    first = min(each.base for each in found)
    one_block = even and all(b.base + b.item_bytes <= first + stride for b in found)
    try:
        PoolLayout(tuple(found), (), tuple(spaces), 0)
    except LayoutError as refused:
        assert "lies inside buffer" in str(refused)
        assert not (one_block and legal(found, spaces))
    else:
        assert legal(found, spaces)


def test_an_overlap_of_two_spaces_is_refused_with_the_way_out():
    apart = tuple(replace(space, block_pool=None) for space in SPACES)
    says = (
        r"buffer swa.16: base 16 lies inside buffer kv.0 \(0 to 224.*only one of spaces kv and swa "
        r"at a time, give both the same block_pool"
    )
    for spaces in (apart, (KV, apart[1], apart[2]), (KV, replace(SWA, block_pool="other"))):
        with pytest.raises(LayoutError, match=says):
            layout(buffer("kv"), buffer("swa", 16), spaces=spaces)
    layout(buffer("kv"), buffer("swa", 16))


@pytest.mark.parametrize(
    "other",
    [
        buffer("swa", 48),  # into the next item
        buffer("swa", stride=96),
        buffer("swa", 16, 64),
        buffer("swa", 64),  # item 0 over item 1
    ],
)
def test_blocks_lie_over_one_another_item_over_item_only(other):
    says = r"of one block pool lie over one another item i over item i only: at one stride"
    with pytest.raises(LayoutError, match=says):
        layout(buffer("kv"), other)


def test_buffers_whose_items_an_id_has_both_of_do_not_overlap():
    shares = Space("c4", ids="kv")
    for space in ("kv", "c4"):
        with pytest.raises(LayoutError, match=r"lies inside.*An id of kv is an item of both"):
            layout(buffer("kv"), buffer(space, 16), buffer("swa"), spaces=(*SPACES, shares))
        # also where a buffer of another space lies over both
        with pytest.raises(LayoutError, match="An id of kv is an item of both"):
            layout(buffer("kv"), buffer("swa", 0, 64), buffer(space, 31), spaces=(*SPACES, shares))
    layout(buffer("kv"), buffer("c4", 32), buffer("swa", 0, 64), spaces=(*SPACES, shares))


def test_a_buffer_behind_a_short_one_may_still_lie_in_a_long_one():
    found = buffer("kv", 0, 40), buffer("swa", 8, 8), buffer("state", 24, 8)
    layout(*found)
    says = r"buffer state.24: base 24 lies inside buffer kv.0"
    with pytest.raises(LayoutError, match=says):
        layout(*found, spaces=(KV, SWA, replace(STATE, block_pool=None)))


def test_regions_of_one_item_still_do_not_overlap():
    regions = [
        Region("target", 0, role, "kv.0", at, "uint8", (), 8) for role, at in (("k", 0), ("v", 7))
    ]
    with pytest.raises(LayoutError, match="overlaps target layer 0"):
        layout(buffer("kv"), regions=regions)


@pytest.mark.parametrize(
    ("spaces", "buffers", "says"),
    [
        (
            (KV, SWA),
            (buffer("kv"), buffer("swa", items=5)),
            r"block pool blocks: buffer swa.0 of space swa has items 5, buffer kv.0 of space kv 4",
        ),
        (
            (KV, Space("c4", ids="kv"), SWA),
            (buffer("swa"), buffer("c4", 300, items=3)),
            r"block pool blocks: buffer c4.300 of space c4 has items 3",
        ),
        (
            (KV, replace(SWA, reserved=2)),
            (),
            r"block pool blocks: space swa has reserved 2, space kv 1\..*all the same reserved",
        ),
    ],
)
def test_spaces_of_one_block_pool_have_the_same_ids(spaces, buffers, says):
    with pytest.raises(LayoutError, match=says):
        layout(*buffers, spaces=spaces)


def test_a_space_that_shares_ids_has_no_block_pool_of_its_own():
    with pytest.raises(LayoutError, match=r"space c4: its ids are those of space kv: give that"):
        Space("c4", ids="kv", block_pool="blocks")
    with pytest.raises(LayoutError, match="space kv block_pool: a name of 1 to"):
        Space("kv", block_pool="")


# what follows from it


def test_the_lists_of_a_pool_are_named():
    spaces = (*SPACES, Space("c4", ids="kv"), Space("ring", block_pool="two"), Space("own"))
    found = layout(spaces=spaces).block_pools
    assert found == {"blocks": ("kv", "swa", "state"), "two": ("ring",)}


def test_memory_of_a_block_pool_is_registered_once():
    assert hybrid().slabs() == [Slab(0, 256)]
    assert layout(buffer("kv", 0, 64), buffer("swa", 8, 8)).slabs() == [Slab(0, 256)]


@settings(max_examples=200)
@given(st.data())
def test_a_byte_is_foreign_that_no_space_of_the_pool_claims(data):
    stride, items = data.draw(st.integers(8, 20)), data.draw(st.integers(1, 4))
    clear, buffers, regions = set(), [], []
    base = data.draw(st.integers(0, 9))
    for number, space in enumerate("abc"):
        within = data.draw(st.integers(0, stride - 1))
        size, padding = data.draw(st.integers(1, stride - within)), data.draw(st.booleans())
        held = f"{space}{number}"
        buffers.append(Buffer(held, space, base + within, stride, size, items, "cpu", padding))
        first = data.draw(st.integers(0, size - 1))
        width = data.draw(st.integers(1, size - first))
        regions.append(Region("target", number, "k", held, first, "uint8", (), width))
        taken = range(size) if padding else range(first, first + width)
        clear |= {base + i * stride + within + at for i in range(items) for at in taken}
    spaces = tuple(Space(name, "slot", reserved=0, block_pool="blocks") for name in "abc")
    made = PoolLayout(tuple(buffers), tuple(regions), spaces, 3)
    end = base + (items + 1) * stride
    starts, stops = np.triu_indices(end + 2, 1)
    found = made.foreign_bytes.among(starts, stops)
    foreign = np.cumsum([0, *(at not in clear for at in range(end + 2))])
    assert (found == (foreign[stops] > foreign[starts])).all()


@both
def test_a_layout_with_a_block_pool_travels(write, read, encode):
    assert read(write(hybrid())) == hybrid()


@both
def test_a_space_that_does_not_say_so_has_ids_of_its_own(write, read, encode):
    plain = json.loads(layout(buffer("kv")).to_json())
    for space in plain["spaces"]:
        del space["block_pool"]
    assert {space.block_pool for space in read(encode(plain)).spaces} == {None}


def test_a_merge_keeps_the_block_pool():
    whole, other = hybrid(), layout(buffer("kv", 1024, name="d"))
    merged = PoolLayout.merge(whole, other)
    assert merged.block_pools == whole.block_pools
    with pytest.raises(LayoutError, match=r"space kv: .*cannot share ids"):
        PoolLayout.merge(whole, layout(buffer("kv", 1024), spaces=[replace(KV, block_pool=None)]))


class Pooled(KVPool):
    """A pool of our own whose spaces say that they take their ids from one pool of blocks."""

    def declare(self):
        for space in ("kv", "swa"):
            item = Repeat("entry", self.page_size, Cell(f"{space}.k", 4, "bf16"))
            yield BufferSpec(space, layers=self.layers, space=space, item=item)

    def spaces(self):
        yield Space("kv", entries_per_item=self.page_size, block_pool="blocks")
        yield Space("swa", entries_per_item=self.page_size, block_pool="blocks")


def test_spaces_of_a_draft_s_own_have_a_block_pool_of_its_own():
    common = {"layers": [0], "num_pages": 5, "page_size": 4, "dtype": "bf16"}
    own = Pooled(**common, owner="draft", own_spaces=True).layout
    assert own.block_pools == {"draft.blocks": ("draft.kv", "draft.swa")}
    assert Pooled(**common).layout.block_pools == {"blocks": ("kv", "swa")}


def test_an_allocator_refuses_what_it_has_no_single_free_list_for():
    pool = Pooled(layers=[0], num_pages=5, page_size=4, dtype="bf16")
    with pytest.raises(ValueError, match=r"spaces kv, swa take their ids from block pool blocks"):
        Allocator(pool)


def test_pictures_and_text_name_the_pool_and_the_spaces_that_lie_over_one_another():
    assert space_words(SWA).endswith("window 8, ids from block pool blocks")
    for draw in (svg, html):
        text = draw(hybrid())
        assert "block pool blocks" in text
        assert "in the same memory as kv, state" in text  # swa
        assert "in the same memory as" not in draw(layout(buffer("kv"), buffer("swa", 32)))
