"""All kinds of a pool in blocks of equal bytes: what a block is, which layers share one, and what
fits.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvpool import Allocator, LayoutError, OutOfPages, Space
from kvpool.item import Cell, Repeat
from kvpool.layout import PoolLayout
from kvpool.layout.formats import BufferSpec
from kvpool.pools.base import KVPool
from kvpool.pools.budget import needed_items, pages_of_tokens
from kvpool.pools.placement import MAX_GROUPS, groups_of
from tests.pools import CLASSES, dsv4, every_packing, hybrid, mla, swa

BLOCKS = {"placement": "block", "num_pages": 40}


def stretches(layout: PoolLayout) -> dict[str, list[tuple[int, int]]]:
    """Bytes of block 0 that each id list uses, by list, buffer by buffer."""
    base = min(buffer.base for buffer in layout.buffers)
    found: dict[str, list[tuple[int, int]]] = {}
    for buffer in layout.buffers:
        at = buffer.base - base
        ids = layout.space_by_name[buffer.space].id_list
        found.setdefault(ids, []).append((at, at + buffer.item_bytes))
    return found


@every_packing
def test_a_block_is_what_the_largest_group_needs_and_lists_lie_over_one_another(build):
    pool = build(**BLOCKS)
    pool.check_integrity()
    layout = pool.layout
    (block,) = {buffer.item_stride for buffer in layout.buffers}
    ends = []
    for used in stretches(layout).values():
        used.sort()
        assert used[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(used))
        ends.append(used[-1][1])
    assert max(ends) <= block < max(ends) + 8  # rounded up to the largest element
    assert {buffer.items for buffer in layout.buffers} == {40}
    assert 40 * block <= pool.nbytes < 40 * block + pool.device.alignment
    (lists,) = layout.block_pools.values()
    assert set(stretches(layout)) <= set(lists) and len(layout.slabs()) == 1


@every_packing
def test_regions_are_those_of_the_static_pool(build):
    static, blocks = build(device="meta").layout, build(**BLOCKS, device="meta").layout
    assert {r.key: r for r in static.regions} == {r.key: r for r in blocks.regions}
    for region in static.regions:
        one, other = static.space_of(region), blocks.space_of(region)
        plain = {"name": "any", "ids": None, "block_pool": None}
        assert replace(one, **plain) == replace(other, **plain)


def waste(sizes: list[list[int]], cuts: list[tuple[int, ...]]) -> tuple[float, int]:
    """The largest part of an id list's blocks that is padding, and the groups in all."""
    groups = [
        [sum(each[a:b]) for a, b in zip((0, *cut), (*cut, len(each)))]
        for each, cut in zip(sizes, cuts)
    ]
    block = max(max(each) for each in groups)
    return max(1 - sum(e) / (len(e) * block) for e in groups), sum(map(len, groups))


def all_cuts(count: int) -> list[tuple[int, ...]]:
    return [cut for n in range(count) for cut in combinations(range(1, count), n)]


@settings(max_examples=80)
@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=3))
def test_no_other_groups_of_layers_waste_less(sizes):
    """Beside every way to cut two lists, and the ways of a third that has few layers."""
    sizes = [each[:3] if n == 2 else each for n, each in enumerate(sizes)]
    found = groups_of([dict(enumerate(each)) for each in sizes])
    cuts = [tuple(np.cumsum([len(group) for group in each])[:-1].tolist()) for each in found]
    for each, groups in zip(sizes, found):  # every layer once, in order
        assert [layer for group in groups for layer in sorted(group)] == [*range(len(each))]
    ways = [[]]
    for each in sizes:
        ways = [[*way, cut] for way in ways for cut in all_cuts(len(each))]
    least = min(waste(sizes, way)[0] for way in ways)
    assert round(waste(sizes, cuts)[0], 2) <= round(least, 2) + 1e-9


def test_groups_of_five_waste_less_than_groups_of_ten():
    """Gemma 3 27B: 52 windows beside 10 full layers. Ten a block leave 8 of 60 places empty."""
    windows, full = groups_of([dict.fromkeys(range(52), 4), dict.fromkeys(range(52, 62), 4)])
    assert [len(group) for group in windows] == [5] * 10 + [2]
    assert [len(group) for group in full] == [5, 5]


def test_groups_are_few_where_layers_are_many():
    found = groups_of([dict.fromkeys(range(300), 7), {300: 900, 301: 900}])
    assert sum(map(len, found)) <= MAX_GROUPS
    assert [len(g) for g in groups_of([{n: 1 << n} for n in range(40)])] == [1] * 40


@pytest.mark.parametrize("build", [swa, hybrid, dsv4])
@pytest.mark.parametrize("pages", [1, 3])
def test_needed_items_are_enough_for_so_many_requests(build, pages):
    probe = build(**BLOCKS, device="meta")
    items = needed_items(probe.layout.spaces, 4, 4 * pages, 1)
    assert set(items) == {"num_pages"}
    alloc = Allocator(build(**{**BLOCKS, **items}))
    requests = [alloc.new_request() for _ in range(4)]
    for _ in range(pages * probe.page_size):
        alloc.extend_batch(requests, 1)
    fewer = build(**{**BLOCKS, "num_pages": items["num_pages"] - 1}, device="meta")
    assert pages_of_tokens([fewer], fewer.num_pages, 4) == 4 * pages - 1


@pytest.mark.parametrize("build", [swa, hybrid, dsv4])
def test_one_kind_takes_what_another_leaves(build):
    alloc = Allocator(build(**BLOCKS))
    request = alloc.new_request()
    (lists,) = alloc.layout.block_pools.values()
    assert alloc.free_pages == 39 // sum(alloc.layout.space_by_name[n].grows for n in lists)
    tokens = 0
    with pytest.raises(OutOfPages, match=r"block pool blocks: \d+ more items \(.*kv 1.*\) are ne"):
        for _ in range(9999):
            alloc.extend(request, 1)
            tokens += 1
    alloc.check_integrity()
    held = sum(span.ids.size for span in request.address().spans.values())
    assert request.num_tokens == tokens
    assert {alloc.free_items(name) for name in lists} == {39 - held}
    alloc.free(request)
    assert {alloc.free_items(name) for name in lists} == {39}


def test_bytes_per_token_count_blocks_whole():
    pool = hybrid(**BLOCKS, device="meta")
    (block,) = {buffer.item_stride for buffer in pool.layout.buffers}
    assert pool.bytes_per_token == block / 4  # one group of full layers, pages of 4
    assert mla(**BLOCKS).bytes_per_token == mla().bytes_per_token


def test_a_draft_shares_ids_with_a_target_of_the_same_placement_only():
    target = swa(layers=[0, 1], **BLOCKS)
    Allocator(target, mla(owner="draft", layers=[4], **BLOCKS))
    Allocator(target, mla(owner="draft", layers=[4], own_spaces=True))
    says = re.escape("the same page sizes, windows, rings and block pools, or the draft with own_")
    with pytest.raises(LayoutError, match=says):
        Allocator(target, mla(owner="draft", layers=[4]))


class Pooled(KVPool):
    """A pool whose space says itself where its ids come from."""

    def declare(self):
        yield BufferSpec(
            "k", self.layers, "kv", Repeat("entry", self.page_size, Cell("k", 1, "uint8"))
        )

    def spaces(self):
        yield Space("kv", entries_per_item=self.page_size, block_pool="mine")


def test_a_space_has_one_block_pool():
    with pytest.raises(LayoutError, match=r"space kv: block pool mine, but with placement='block'"):
        Pooled(layers=[0], page_size=4, dtype="bf16", **BLOCKS)


def test_space_of_names_the_group_of_a_layer():
    pool = swa(**BLOCKS)
    names = {role: pool.space_of(role, n).name for n, role in ((1, "k"), (3, "v"), (0, "swa.rope"))}
    assert names == {"k": "kv", "v": "kv.1", "swa.rope": "swa"}
    with pytest.raises(KeyError, match="target layer 0 k: not in this pool"):
        pool.space_of("k", 0)
    assert CLASSES["mha"]().space_of("k", 0).name == "kv"
