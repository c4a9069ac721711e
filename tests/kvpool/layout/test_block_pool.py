"""Spaces whose ids come from one block pool, and buffers that lie over one another for it: items
over items, or blocks of several items over blocks.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvpool import Allocator
from kvpool.item import Cell, Repeat
from kvpool.layout import Buffer, LayoutError, PoolLayout, Region, Slab, Space
from kvpool.layout.formats import BufferSpec
from kvpool.pools.base import KVPool
from kvpool.render.html import html
from kvpool.render.svg import svg
from kvpool.render.text import space_words

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


def shared_blocks(one, two, size, other):
    """Pairs of blocks of `size` and `other` items, one of each buffer, that share a byte."""
    covers = [
        {
            b.base + i * b.item_stride + at: i // n
            for i in range(b.items)
            for at in range(b.item_bytes)
        }
        for b, n in ((one, size), (two, other))
    ]
    return {(covers[0][at], covers[1][at]) for at in covers[0].keys() & covers[1].keys()}


def block_end(buffer, size):
    """The pointer after block 0."""
    return buffer.base + (size - 1) * buffer.item_stride + buffer.item_bytes


def legal(found, spaces, *, apart=False):
    """Whether no byte is of two buffers but those of one block of two id lists of one pool; with
    `apart`, and blocks of other lists do not interleave within a block.
    """
    by_name = {space.name: space for space in spaces}
    lists = {space.name: by_name[space.ids or space.name] for space in spaces}
    for one, two in combinations(sorted(found, key=lambda b: b.base), 2):
        ids = [lists[each.space] for each in (one, two)]
        shared = shared_blocks(one, two, *(each.items_per_block for each in ids))
        pooled = ids[0].block_pool is not None and ids[0].block_pool == ids[1].block_pool
        if shared and (ids[0] == ids[1] or not pooled or any(i != j for i, j in shared)):
            return False
        if apart and not pooled and two.base < block_end(one, ids[0].items_per_block):
            return False
    return True


@settings(max_examples=600)
@given(st.data())
def test_buffers_are_taken_if_what_they_share_is_one_block_of_two_lists_of_one_pool(data):
    pools = st.sampled_from(("blocks", "blocks", "other", None))
    spaces = []
    for name in "abc":
        pool = data.draw(pools)
        size = 1 if pool is None else data.draw(st.sampled_from((1, 1, 2, 3)))
        spaces.append(Space(name, reserved=0, block_pool=pool, items_per_block=size))
    spaces.append(Space("d", reserved=0, ids="a"))
    sizes = dict(zip("abcd", (s.items_per_block for s in (*spaces[:3], spaces[0]))))
    block = data.draw(st.sampled_from((6, 12, 18)))
    even = data.draw(st.booleans())
    blocks = data.draw(st.integers(1, 3))
    found = []
    for number in range(data.draw(st.integers(1, 4))):
        space = data.draw(st.sampled_from("abcd"))
        stride = block // sizes[space] + (0 if even else data.draw(st.integers(0, 1)))
        base = data.draw(st.integers(0, block - 1 if even else 40))
        width = data.draw(st.integers(1, min(4, stride)))
        found.append(Buffer(f"b{number}", space, base, stride, width, blocks * sizes[space]))
    first = min(each.base for each in found)
    one_block = even and all(block_end(b, sizes[b.space]) <= first + block for b in found)
    try:
        PoolLayout(tuple(found), (), tuple(spaces), 0)
    except LayoutError as refused:
        assert "lies inside buffer" in str(refused)
        assert not (one_block and legal(found, spaces, apart=True))
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


# blocks of several items

CUT = Space("kv", reserved=4, block_pool="blocks", items_per_block=4)
CUTS = (CUT, SWA, STATE)


def cut(base=0, nbytes=8, stride=16, blocks=4, **more):
    """Four items a block of 64 bytes."""
    return buffer("kv", base, nbytes, stride, 4 * blocks, **more)


@pytest.mark.parametrize(
    ("other", "there", "here"),
    [
        (buffer("swa", 48), 64, 64),  # its block ends in the next
        (buffer("swa", 64), 64, 64),  # block 0 over block 1
        (buffer("swa", 16, 8, 16), 64, 16),  # item over item, but block 1 over block 0
        (buffer("swa", 0, 32, 48), 64, 48),
    ],
)
def test_blocks_of_several_items_lie_over_one_another_block_over_block_only(other, there, here):
    says = (
        r"inside buffer kv.0 \(0 to 248, items of 8 every 16, 4 a block\). Buffers of one block "
        rf"pool .*block b over block b only.*; blocks are {there} bytes apart there, {here} here"
    )
    with pytest.raises(LayoutError, match=says):
        layout(cut(), other, spaces=CUTS)


@pytest.mark.parametrize(
    ("spaces", "buffers", "says"),
    [
        ((replace(CUT, reserved=1),), (), r"space kv has reserved 1, but a block is 4 items of"),
        ((CUT,), (buffer("kv", items=18),), r"kv.0 of space kv has items 18, but a block is 4 it"),
        (
            (SWA, replace(CUT, reserved=8)),
            (),
            r"blocks: space kv has reserved 8 \(2 blocks\), space swa 1\. A block can be",
        ),
        (
            (CUT, SWA),
            (cut(), buffer("swa", 300, items=16)),
            r"swa.300 of space swa has items 16, buffer kv.0 of space kv 16 \(4 blocks\)",
        ),
        (
            (KV, SWA),
            (buffer("kv"), buffer("swa", items=5)),
            r"block pool blocks: buffer swa.0 of space swa has items 5, buffer kv.0 of space kv 4",
        ),
        (
            (KV, replace(SWA, reserved=2)),
            (),
            r"block pool blocks: space swa has reserved 2, space kv 1\..*the same reserved, in blo",
        ),
    ],
)
def test_spaces_of_one_block_pool_have_the_same_ids_and_blocks(spaces, buffers, says):
    with pytest.raises(LayoutError, match=says):
        layout(*buffers, spaces=spaces)


def test_a_space_that_shares_ids_has_the_items_a_block_of_those():
    shares = Space("c4", ids="kv", reserved=4)
    found = layout(cut(0), buffer("c4", 8, 8, 16, 16), buffer("swa", 0, 64), spaces=(*CUTS, shares))
    assert [found.items_per_block(each) for each in found.buffers] == [4, 4, 1]
    with pytest.raises(LayoutError, match=r"c4.8: base 8 lies inside.*4 a block\). An id of kv is"):
        layout(cut(0), buffer("c4", 8, 8, 32, 16), spaces=(*CUTS, shares))


@pytest.mark.parametrize("size", [0, -1, 4097])
def test_a_block_is_a_number_of_items(size):
    with pytest.raises(LayoutError, match=rf"space kv items_per_block: 1 to 4096, got {size}"):
        Space("kv", block_pool="blocks", items_per_block=size)


@pytest.mark.parametrize("more", [{}, {"ids": "other"}])
def test_only_blocks_of_a_pool_are_several_items(more):
    with pytest.raises(LayoutError, match=r"space kv: items_per_block 2 without a block_pool"):
        Space("kv", items_per_block=2, **more)


def test_a_space_that_shares_ids_has_no_block_pool_of_its_own():
    with pytest.raises(LayoutError, match=r"space c4: its ids are those of space kv: give that"):
        Space("c4", ids="kv", block_pool="blocks")
    with pytest.raises(LayoutError, match="space kv block_pool: a name of 1 to"):
        Space("kv", block_pool="")


# what follows from it


def test_memory_of_a_block_pool_is_registered_once():
    assert hybrid().slabs() == [Slab(0, 256)]
    assert layout(buffer("kv", 0, 64), buffer("swa", 8, 8)).slabs() == [Slab(0, 256)]


@settings(max_examples=200)
@given(st.data())
def test_no_range_is_covered_with_a_byte_that_no_space_of_the_pool_claims(data):
    block, blocks = data.draw(st.sampled_from((12, 18, 24))), data.draw(st.integers(1, 4))
    clear, buffers, regions, spaces = set(), [], [], []
    base = data.draw(st.integers(0, 9))
    for number, space in enumerate("abc"):
        cut = data.draw(st.sampled_from((1, 1, 2, 3)))
        stride, items = block // cut, blocks * cut
        within = data.draw(st.integers(0, stride - 1))
        size, padding = data.draw(st.integers(1, stride - within)), data.draw(st.booleans())
        held = f"{space}{number}"
        buffers.append(Buffer(held, space, base + within, stride, size, items, "cpu", padding))
        spaces.append(Space(space, "slot", reserved=0, block_pool="blocks", items_per_block=cut))
        first = data.draw(st.integers(0, size - 1))
        width = data.draw(st.integers(1, size - first))
        regions.append(Region("target", number, "k", held, first, "uint8", (), width))
        taken = range(size) if padding else range(first, first + width)
        clear |= {base + i * stride + within + at for i in range(items) for at in taken}
    made = PoolLayout(tuple(buffers), tuple(regions), tuple(spaces), 3)
    end = base + (blocks + 1) * block
    starts, stops = np.triu_indices(end + 2, 1)
    foreign = np.cumsum([0, *(at not in clear for at in range(end + 2))])
    assert not (made.covers(starts, stops) & (foreign[stops] > foreign[starts])).any()


def test_a_merge_keeps_the_block_pool():
    whole, other = hybrid(), layout(buffer("kv", 1024, name="d"))
    merged = PoolLayout.merge(whole, other)
    assert merged.block_pools == whole.block_pools
    with pytest.raises(LayoutError, match=r"space kv: .*cannot share ids"):
        PoolLayout.merge(whole, layout(buffer("kv", 1024), spaces=[replace(KV, block_pool=None)]))


class Pooled(KVPool):
    """A pool of our own whose spaces say that they take their ids from one pool of blocks."""

    cut = 1
    others = ("swa",)

    def declare(self):
        for space in ("kv", *self.others):
            item = Repeat("entry", self.page_size, Cell(f"{space}.k", 4, "bf16"))
            yield BufferSpec(space, layers=self.layers, space=space, item=item)

    def spaces(self):
        for space in ("kv", *self.others):
            yield Space(
                space, "paged", self.page_size, reserved=self.cut, block_pool="blocks",
                items_per_block=self.cut,
            )  # fmt: skip


def test_spaces_of_a_draft_s_own_have_a_block_pool_of_its_own():
    common = {"layers": [0], "num_pages": 5, "page_size": 4, "dtype": "bf16"}
    own = Pooled(**common, owner="draft", own_spaces=True, total_kv_layers=1).layout
    assert own.block_pools == {"draft.blocks": ("draft.kv", "draft.swa")}
    assert Pooled(**common).layout.block_pools == {"blocks": ("kv", "swa")}


def test_an_allocator_takes_the_ids_of_a_block_pool_from_one_free_list():
    alloc = Allocator(Pooled(layers=[0], num_pages=5, page_size=4, dtype="bf16"))
    address = [alloc.new_request(), alloc.new_request()]
    for request in address:
        alloc.extend(request, 3)
    held = [span.ids.tolist() for each in address for span in each.address().spans.values()]
    assert sorted(held) == [[1], [2], [3], [4]] and alloc.free_items("swa") == 0


class Cut(Pooled):
    """One space, of whose pages two are a block."""

    cut = 2
    others = ()


def test_an_allocator_refuses_blocks_of_several_items():
    pool = Cut(layers=[0], num_pages=6, page_size=4, dtype="bf16")
    with pytest.raises(ValueError, match=r"space kv: a block of block pool blocks is 2 items, but"):
        Allocator(pool)


def test_pictures_and_text_name_the_pool_of_blocks():
    assert space_words(SWA).endswith("window 8, ids from block pool blocks")
    assert space_words(CUT).endswith("ids from block pool blocks (4 items a block)")
    for draw in (svg, html):
        assert "block pool blocks" in draw(hybrid())
