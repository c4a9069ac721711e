"""What a layout may say, and what it is refused for."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import event, given, settings, strategies as st

from kvpool import MHAPool
from kvpool.layout import (
    Axis,
    Buffer,
    Interleave,
    LayoutError,
    PoolLayout,
    Region,
    RequestAddress,
    Slab,
    Space,
    Span,
)
from tests.pools import every_class
from tests.slices import models, sides

TOO_BIG = 1 << 63
PARTS = Axis, Region, Buffer, Space, Interleave, PoolLayout


def buffer(name="b", space="kv", base=0, stride=64, nbytes=64, items=4, memory="cpu"):
    return Buffer(name, space, base, stride, nbytes, items, memory)


def region(role="k", offset=0, width=16, axes=(), owner="target", layer=0, home="b", dtype="uint8"):
    return Region(owner, layer, role, home, offset, dtype, tuple(axes), width)


def layout(*regions, buffers=(buffer(),), spaces=(Space("kv"),), total=1, **more):
    return PoolLayout(tuple(buffers), regions, tuple(spaces), total, **more)


# one part at a time: its values, and what it refuses

PLAIN = {"buffers": (buffer(),), "regions": (region(),), "spaces": (Space("kv"),)}
PLAIN |= {"total_kv_layers": 1}
RIGHT = {
    "axis": partial(Axis, name="head", size=2, stride=128),
    "region": partial(region, owner="draft", layer=7, role="rope", dtype="bfloat16", width=2),
    "buffer": buffer,
    "space": partial(Space, name="s"),
    "interleave": partial(Interleave, size=16, rank=0, ranks=2),
    "layout": partial(PoolLayout, **PLAIN),
}
WRONG = {
    "axis": [
        ({"name": ""}, r"axis: a name of 1 to 128 characters, got ''"),
        ({"name": "x" * 129}, r"axis: a name of 1 to 128 characters, got 'x{129}'"),
        ({"size": 0}, r"axis head size: 1 to 2\*\*63-1, got 0"),
        ({"size": TOO_BIG}, r"axis head size: .* got 9223372036854775808"),
        ({"stride": -1}, r"axis head stride: 0 to 2\*\*63-1, got -1"),
        ({"start": -1, "total": 8}, r"axis head start: 0 to 2\*\*63-1, got -1"),
        ({"start": 1}, r"axis head: steps 1 to 3 exceed the total of 2"),
        ({"start": 7, "total": 8}, r"axis head: steps 7 to 9 exceed the total of 8"),
    ],
    "region": [
        ({"owner": ""}, r"region owner: a name of 1 to 128 characters, got ''"),
        ({"role": ""}, r"draft layer 7 role: a name of 1 to 128 characters, got ''"),
        ({"layer": -1}, r"draft rope layer: 0 to 2\*\*63-1, got -1"),
        ({"home": ""}, r"draft layer 7 rope buffer: a name .* got ''"),
        ({"offset": -1}, r"draft layer 7 rope offset: 0 to 2\*\*63-1, got -1"),
        ({"width": 0}, r"draft layer 7 rope width: 1 to 2\*\*63-1, got 0"),
        ({"width": 3}, r"draft layer 7 rope width: 3 bytes are not a multiple of bfloat16 \(2\)"),
        ({"dtype": "bf17"}, r"draft layer 7 rope: dtype 'bf17' is not known"),
        (
            {"axes": [Axis(f"a{n}", 1, 0) for n in range(9)]},
            r"draft layer 7 rope: 9 axes, at most 8 are supported",
        ),
        (
            {"axes": [Axis("head", 1, 0), Axis("head", 2, 4)]},
            r"draft layer 7 rope: \['head', 'head'\] names an axis twice",
        ),
    ],
    "buffer": [
        ({"name": ""}, r"buffer: a name .* got ''"),
        ({"space": ""}, r"buffer b space: a name .* got ''"),
        ({"memory": ""}, r"buffer b memory: a name .* got ''"),
        ({"base": -1}, r"buffer b base: 0 to 2\*\*63-1, got -1"),
        ({"nbytes": 0}, r"buffer b item_bytes: 1 to 2\*\*63-1, got 0"),
        ({"stride": 0}, r"buffer b item_stride: 1 to 2\*\*63-1, got 0"),
        ({"items": 0}, r"buffer b items: 1 to 2\*\*63-1, got 0"),
        ({"stride": 63}, r"buffer b: items of 64 bytes overlap at a stride of 63"),
        ({"base": TOO_BIG - 100}, r"buffer b end: 0 to 2\*\*63-1, got 9223372036854775964"),
        ({"stride": 1 << 62}, r"buffer b end: 0 to 2\*\*63-1, got 1383505805528216"),
    ],
    "space": [
        ({"name": ""}, r"space: a name .* got ''"),
        ({"kind": "heap"}, r"space s kind: one of paged, slot, ring, got 'heap'"),
        ({"entries_per_item": 0}, r"space s entries_per_item: 1 to 2\*\*63-1, got 0"),
        ({"tokens_per_entry": 0}, r"space s tokens_per_entry: 1 to 2\*\*63-1, got 0"),
        ({"reserved": -1}, r"space s reserved: 0 to 2\*\*63-1, got -1"),
        ({"ids": ""}, r"space s ids: a name of 1 to 128 characters, got ''"),
        ({"kind": "slot", "entries_per_item": 2}, r"space s: a slot has no entries"),
        ({"kind": "slot", "window": 1}, r"space s: a slot has no entries"),
        (
            {"kind": "ring", "entries_per_item": 8},
            r"space s: window: at most 8 in a ring of 8 entries and steps of 1, got None",
        ),
        (
            {"kind": "ring", "entries_per_item": 8, "window": 6, "window_step": 4},
            r"space s: window: at most 5 in a ring of 8 entries and steps of 4, got 6",
        ),
        (
            {"kind": "ring", "window": 1, "interleave": Interleave(4, 1, 2)},
            r"space s interleave: a ring is one request's whole state.* Only paged spaces",
        ),
        (
            {"tokens_per_entry": 4, "interleave": Interleave(6, 1, 2)},
            r"space s interleave: stretches of 6 positions would cut entries of 4: a multiple of 4",
        ),
        ({"window_step": 0}, r"space s window_step: 1 to 2\*\*63-1, got 0"),
        ({"window_step": 4}, r"space s: a window_step of 4 needs a window"),
        ({"window": 0}, r"space s window: 1 to 2\*\*63-1, got 0"),
        (
            {"entries_per_item": 64, "ring": 8, "window": 6, "window_step": 4},
            r"space s: window: at most 5 in a ring of 8 entries and steps of 4, got 6",
        ),
        (
            {"entries_per_item": 60, "ring": 8, "window": 4, "window_step": 4},
            r"space s ring: 8 entries, in steps of 4, do not divide an item of 60",
        ),
        ({"entries_per_item": 64, "ring": 0, "window": 1}, r"space s ring: 1 to 2\*\*63-1, got 0"),
        (
            {"entries_per_item": 8, "window": 4, "ring": 8, "interleave": Interleave(4, 1, 2)},
            r"space s ring: of the entries of a page, which one rank holds all of",
        ),
        ({"whole": True}, r"space s whole: of paged spaces with a window"),
        ({"kind": "ring", "window": 1, "whole": True}, r"space s whole: of paged spaces with"),
        (
            {"entries_per_item": 8, "window": 4, "ring": 8, "partial": True},
            r"space s partial: of entries that a token is written to after the other",
        ),
        ({"kind": "slot", "partial": True}, r"space s partial: of entries that a token is"),
    ],
    "interleave": [
        ({"size": 0}, r"interleave size: 1 to 2\*\*63-1, got 0"),
        ({"rank": 2}, r"interleave rank: 0 to 1 of 2 ranks, got 2"),
        ({"rank": -1}, r"interleave rank: 0 to 1 of 2 ranks, got -1"),
        ({"ranks": 0}, r"interleave ranks: 1 to 1024, got 0"),
        ({"ranks": 1025}, r"interleave ranks: 1 to 1024, got 1025"),
        (
            {"size": 1 << 40},
            r"interleave: stretches of 1099511627776 over 2 ranks: at most 2\*\*40",
        ),
    ],
    "layout": [
        ({"version": 2}, r"layout version 2: this kvpool reads version 1"),
        ({"total_kv_layers": -1}, r"total_kv_layers: 0 to 2\*\*63-1, got -1"),
        ({"buffers": (buffer(), buffer(base=4096))}, r"buffer b: declared twice"),
        ({"spaces": (Space("kv"), Space("kv"))}, r"space kv: declared twice"),
        ({"regions": (region(), region(offset=32))}, r"region target layer 0 k: declared twice"),
        ({"spaces": ()}, r"buffer b: space 'kv' is not declared \(declared: none\)"),
        (
            {"spaces": (Space("swa"), Space("ring"))},
            r"buffer b: space 'kv' is not declared \(declared: swa, ring\)",
        ),
        ({"buffers": ()}, r"target layer 0 k: buffer 'b' is not declared"),
        (
            {"spaces": (Space("kv", reserved=4),)},
            r"buffer b: 4 items, and space kv reserves 4 of them",
        ),
    ],
}


@pytest.mark.parametrize(
    ("part", "wrong", "says"), [(part, *each) for part, rows in WRONG.items() for each in rows]
)
def test_what_cannot_be_is_refused(part, wrong, says):
    with pytest.raises(LayoutError, match=says):
        RIGHT[part](**wrong)


def test_axes_are_kept_as_entry_then_head_then_by_name():
    axes = [Axis(name, 2, 8) for name in ("tap", "head", "dim", "entry")]
    kept = region(axes=axes)
    assert [axis.name for axis in kept.axes] == ["entry", "head", "dim", "tap"]
    assert kept == region(axes=reversed(axes))


def test_a_region_knows_its_bytes_and_its_end():
    grid = region(offset=10, width=4, axes=[Axis("head", 3, 100), Axis("entry", 5, 7)])
    assert grid.nbytes == 4 * 3 * 5
    assert grid.end == 10 + 2 * 100 + 4 * 7 + 4
    assert (grid.key, str(grid)) == (("target", 0, "k"), "target layer 0 k")
    assert grid.axis("head") == Axis("head", 3, 100)
    assert grid.axis("tap") is None


@pytest.mark.parametrize(("given", "kept"), [("bf16", "bfloat16"), ("e4m3", "float8_e4m3fn")])
def test_a_region_keeps_the_whole_name_of_its_dtype(given, kept):
    assert region(dtype=given).dtype == kept


def test_a_buffer_ends_with_its_last_item_and_not_with_its_last_stride():
    assert buffer(base=1000, stride=64, nbytes=40, items=4).end == 1000 + 3 * 64 + 40


def test_the_stride_of_a_single_item_means_nothing():
    assert buffer(stride=1, nbytes=40, items=1).end == 40


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_entries_lie_where_vllm_puts_them(size, ranks):
    """`slot = table[p // virtual] * block + local`, of vllm/v1/worker/block_table.py."""
    block = 16
    virtual = block * ranks
    for rank in range(ranks):
        space = Space("kv", entries_per_item=block, interleave=Interleave(size, rank, ranks))
        for p in range(5 * virtual):
            inside = p % virtual
            if inside // size % ranks == rank:
                local = inside // (ranks * size) * size + inside % size
                assert divmod(space.held.index(p), block) == (p // virtual, local)
                assert space.held.number(p // virtual * block + local) == p


@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(0, 30)),
    st.integers(1, 4),
    st.integers(0, 200),
)
def test_ranks_share_out_what_is_alive(size, ranks, per, window, step, tokens):
    """Of a window too, each rank keeps alive what it holds of the request's live entries."""
    more = {} if window is None else {"window": window + 1, "window_step": step}
    whole = Space("s", tokens_per_entry=per, **more).alive(tokens)
    seen = []
    for rank in range(ranks):
        part = Interleave(size * per, rank, ranks)
        space = Space("s", tokens_per_entry=per, interleave=part, **more)
        mine = [e for e in range(tokens // per) if e * per // (size * per) % ranks == rank]
        alive = space.alive(tokens)
        assert [space.held.number(e) for e in alive] == [e for e in mine if e in whole]
        assert [mine[e] for e in alive] == [e for e in mine if e in whole]
        assert space.alive_in_request(tokens) == whole
        seen += [mine[e] for e in alive]
    assert sorted(seen) == [*whole]


def test_one_rank_holds_all_whatever_the_stretches():
    assert Space("s", interleave=Interleave(16, 0, 1)) == Space("s")


@pytest.mark.parametrize(
    ("space", "tokens", "alive"),
    [
        ({"kind": "slot"}, 0, range(0)),
        ({"kind": "slot"}, 9, range(1)),
        ({}, 9, range(9)),
        ({"tokens_per_entry": 4}, 11, range(2)),
        ({"window": 4}, 9, range(5, 9)),
        ({"window": 4}, 3, range(3)),
        ({"window": 4, "window_step": 4}, 8, range(4, 8)),
        ({"window": 4, "window_step": 4}, 11, range(4, 11)),
        ({"window": 0, "window_step": 128}, 256, range(256, 256)),
        ({"window": 0, "window_step": 128}, 255, range(128, 255)),
    ],
)
def test_a_space_says_which_entries_are_alive(space, tokens, alive):
    assert Space("s", **space).alive(tokens) == alive


@pytest.mark.parametrize("per", [1, 4])
def test_a_window_that_moves_whole_comes_with_the_last_position(per):
    parts = Space("s", entries_per_item=4, tokens_per_entry=per, window=8)
    whole = replace(parts, whole=True)
    for first, stop in [(0, 7), (0, 20), (14, 20), (19, 20), (14, 19)]:
        tokens = range(first * per, stop * per)
        entries, items = (range(12, 20), range(3, 5)) if stop == 20 else (range(0), range(0))
        assert whole.needed_entries(tokens, 20 * per) == entries
        assert whole.needed_items(tokens, 20 * per) == items
    assert parts.needed_entries(range(14 * per, 20 * per), 20 * per) == range(14, 20)
    assert whole.alive(20 * per) == parts.alive(20 * per)


def test_live_bytes_count_what_is_alive_and_no_padding():
    kv, c4 = Space("kv", entries_per_item=8), Space("c4", "paged", 2, 4, ids="kv")
    swa, state = Space("swa", entries_per_item=8, window=5), Space("state", "slot")
    spaces, sizes = (kv, c4, swa, state), (8, 2, 8, 1)
    buffers = [Buffer(s.name, s.name, 1000 * n, 100, 100, 9) for n, s in enumerate(spaces)]
    regions = [
        Region("target", 0, s.name, s.name, 0, "uint8", axes, 3)
        for s, size in zip(spaces, sizes)
        for axes in [(Axis("entry", size, 4),) if size > 1 else ()]
    ]
    layout = PoolLayout(buffers, regions, spaces, 1)
    assert [layout.live_bytes(n) for n in (0, 1, 4, 11)] == [0, 9, 3 * (4 + 1 + 4 + 1), 57]


# whole layouts


def test_regions_that_overlap_are_refused_with_both_ranges():
    says = (
        r"target layer 0 k: overlaps draft layer 3 v in an item of buffer b: bytes 0 to 33 and "
        r"32 to 64\."
    )
    with pytest.raises(LayoutError, match=says):
        layout(region("k", 0, 33), region("v", 32, 32, owner="draft", layer=3))
    with pytest.raises(LayoutError, match=r"overlaps itself .* 0 to 16 and 15 to 31"):
        layout(region(width=16, axes=[Axis("head", 2, 15)]))


def test_a_clash_in_a_later_buffer_of_another_shape_is_found():
    homes = [buffer("one"), buffer("two", base=4096)]
    right = [region("k", 0, 32, home="one"), region("v", 32, 32, home="one")]
    wrong = [region("k", 0, 32, layer=1, home="two"), region("v", 31, 32, layer=1, home="two")]
    with pytest.raises(LayoutError, match="target layer 1 k: overlaps target layer 1 v"):
        layout(*right, *wrong, buffers=homes, total=2)


def test_an_item_of_too_many_separate_runs_is_refused_unlisted():
    size = 1 << 40
    comb = region(width=1, axes=[Axis("head", size, 2)])
    with pytest.raises(LayoutError, match=rf"buffer b: an item of {size} separate runs, at most"):
        layout(comb, buffers=[buffer(stride=4 * size, nbytes=4 * size)])


def byte_list(held: Region) -> list[int]:
    """Every byte of a region in its item, from the formula of kvpool.layout."""
    steps = product(*(range(axis.size) for axis in held.axes))
    starts = [
        held.offset + sum(a * axis.stride for a, axis in zip(step, held.axes)) for step in steps
    ]
    return [start + b for start in starts for b in range(held.width)]


ITEM = 40
AXES = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 13)), max_size=3)
GRIDS = st.tuples(st.integers(0, 20), st.integers(1, 5), AXES)


@settings(max_examples=500)
@given(st.lists(GRIDS, min_size=1, max_size=3))
def test_regions_are_refused_exactly_when_a_set_of_bytes_says_so(grids):
    regions = [
        region(f"r{n}", offset, width, [Axis(f"a{i}", *axis) for i, axis in enumerate(axes)])
        for n, (offset, width, axes) in enumerate(grids)
    ]
    used = Counter(byte for held in regions for byte in byte_list(held))
    leaves, overlaps = max(used) >= ITEM, max(used.values()) > 1
    event(f"leaves={leaves} overlaps={overlaps}")
    if leaves or overlaps:
        with pytest.raises(LayoutError, match="ends at byte" if leaves else "overlaps"):
            layout(*regions, buffers=[buffer(stride=ITEM, nbytes=ITEM)])
    else:
        layout(*regions, buffers=[buffer(stride=ITEM, nbytes=ITEM)])


# buffers among each other


def page(name, base, nbytes, stride=96, items=4):
    return buffer(name, base=base, stride=stride, nbytes=nbytes, items=items)


PLACED = [page("one", 0, 32), page("two", 32, 48), page("three", 80, 16)]  # layers of a page


@pytest.mark.parametrize(
    "buffers",
    [
        [buffer("one", base=0), buffer("two", base=256)],  # they touch
        [buffer(name, memory=name) for name in ("cpu", "cuda:0", "cuda:1")],
        [buffer(name, memory="meta") for name in ("one", "two")],
        PLACED,
    ],
)
def test_buffers_that_share_no_byte_are_legal(buffers):
    layout(buffers=buffers)


def test_buffers_that_overlap_are_refused_with_both_ranges():
    says = r"buffer two: base 255 lies inside buffer one \(0 to 256, items of 64 every 64\)"
    with pytest.raises(LayoutError, match=says):
        layout(buffers=[buffer("two", base=255), buffer("one", base=0)])


PLACES = st.tuples(
    st.integers(0, 60), st.sampled_from([8, 16, 24]), st.integers(1, 24), st.integers(1, 4)
)


@settings(max_examples=500)
@given(st.lists(PLACES, min_size=2, max_size=4))
def test_no_accepted_layout_has_two_buffers_that_share_a_byte(places):
    buffers = [
        buffer(f"b{n}", base=base, stride=stride, nbytes=min(nbytes, stride), items=items)
        for n, (base, stride, nbytes, items) in enumerate(places)
    ]
    used = Counter(
        b.base + item * b.item_stride + byte
        for b in buffers
        for item in range(b.items)
        for byte in range(b.item_bytes)
    )
    shared = max(used.values()) > 1
    in_order = sorted(buffers, key=lambda b: b.base)
    apart = all(one.end <= two.base for one, two in pairwise(in_order))
    try:
        layout(buffers=buffers, spaces=[Space("kv", reserved=0)])
        accepted = True
    except LayoutError:
        accepted = False
    event(f"shared={shared} apart={apart} accepted={accepted}")
    assert not (accepted and shared)
    assert accepted or not apart


# spaces among each other


HALF = Interleave(4, 1, 2)


def test_what_every_rank_holds_shares_ids_with_what_ranks_share_out():
    """Index keys beside interleaved latents: an item of either ranges over the same positions."""
    kv = Space("kv", "paged", 8, interleave=HALF)
    index = Space("index", "paged", 16, ids="kv")
    c4 = Space("c4", "paged", 2, 4, ids="kv", interleave=HALF)
    assert layout(buffers=(), spaces=(kv, index, c4)).space_by_name["index"].id_list == "kv"


@pytest.mark.parametrize(
    ("spaces", "says"),
    [
        (
            (Space("kv"), Space("c4", ids="swa")),
            r"space c4: shares the ids of 'swa', which has no id list itself",
        ),
        (
            (Space("kv"), Space("c4", ids="kv"), Space("c128", ids="c4")),
            r"space c128: shares the ids of 'c4', which has no id list itself",
        ),
        (
            (Space("kv", entries_per_item=256), Space("c4", "paged", 32, 4, ids="kv")),
            r"space c4: an item holds 128 tokens, but an item of kv, whose ids it shares, 256",
        ),
        (
            (Space("kv", "paged", 8, interleave=HALF), Space("index", "paged", 8, ids="kv")),
            r"space index: an item holds 8 tokens, but an item of kv, whose ids it shares, 8 of 16",
        ),
        (
            (Space("kv", "paged", 6, interleave=HALF), Space("index", "paged", 12, ids="kv")),
            r"space kv: stretches of 4 positions do not divide an item of 6, and index shares",
        ),
    ],
)
def test_ids_that_cannot_be_shared_are_refused(spaces, says):
    with pytest.raises(LayoutError, match=says):
        layout(buffers=(), spaces=spaces)


PAGED, SLOTS = Space("kv", entries_per_item=4), Space("kv", "slot")
RINGS = Space("kv", "ring", entries_per_item=4, window=2)


@pytest.mark.parametrize(
    ("space", "axis", "says"),
    [
        (PAGED, Axis("entry", 4, 16), ""),
        (PAGED, Axis("entry", 3, 16), "layer 0 k: 3 entries, but an item of space kv holds 4"),
        (PAGED, Axis("head", 4, 16), "layer 0 k: 1 entries, .* space kv holds 4"),
        (PAGED, Axis("entry", 4, 16, 4, 8), "layer 0 k: entries cannot be sharded, got 4 of 8"),
        (SLOTS, Axis("head", 4, 16), ""),
        (SLOTS, Axis("entry", 1, 16), "k: has an entry axis, .* space kv is a slot without ent"),
        (RINGS, Axis("entry", 4, 16), ""),
        (RINGS, Axis("entry", 2, 16), "k: 2 entries, but an item of space kv holds 4"),
    ],
)
def test_the_entries_of_a_region_are_those_of_its_space(space, axis, says):
    with pytest.raises(LayoutError, match=says) if says else nullcontext():
        layout(region(axes=[axis]), spaces=[space])


# what a layout is asked


def test_a_space_has_the_items_that_each_of_its_buffers_has():
    homes = [buffer("one", items=5), buffer("two", base=4096, items=4)]
    other = buffer("three", "swa", base=8192, items=9)
    held = layout(buffers=[*homes, other], spaces=[Space("kv"), Space("swa"), Space("ring")])
    assert held.items_by_space == {"kv": 4, "swa": 9}


@pytest.mark.parametrize(
    ("buffers", "slabs"),
    [
        (PLACED, [Slab(0, 4 * 96)]),
        ([page("one", 0, 32), page("two", 32, 48, items=2)], [Slab(0, 3 * 96 + 32)]),
        (
            [buffer("one", memory="cuda:1"), buffer("two", base=256, memory="cuda:0")],
            [Slab(256, 256, "cuda:0"), Slab(0, 256, "cuda:1")],
        ),
    ],
)
def test_slabs_are_of_one_memory_and_have_no_gap_of_a_page(buffers, slabs):
    assert layout(buffers=buffers).slabs() == slabs


@given(st.lists(st.integers(0, 9000), min_size=1, max_size=8))
def test_slabs_are_sorted_apart_and_reach_every_buffer(gaps):
    buffers, base = [], 0
    for n, gap in enumerate(gaps):
        buffers.append(buffer(f"b{n}", base=base + gap))
        base += gap + 256
    slabs = layout(buffers=buffers[::-1]).slabs()
    assert all(one.end + 4096 <= two.base for one, two in pairwise(slabs))
    assert all(sum(s.base <= b.base and b.end <= s.end for s in slabs) == 1 for b in buffers)
    assert {s.base for s in slabs} <= {b.base for b in buffers}
    assert {s.end for s in slabs} <= {b.end for b in buffers}


def target():
    return layout(region(), total=61, model="m", generation="g1")


def draft(space=Space("kv"), owner="draft", base=4096, name="d"):
    return layout(
        region(owner=owner, layer=61, home=name),
        buffers=[buffer(name, space.name, base=base)],
        spaces=[space],
        total=1,
        model="d",
        generation="g2",
    )


def test_a_target_merges_with_its_draft():
    whole = PoolLayout.merge(target(), draft())
    assert set(whole.region_by_key) == {("target", 0, "k"), ("draft", 61, "k")}
    assert [b.name for b in whole.buffers] == ["b", "d"]
    assert whole.spaces == (Space("kv"),)
    assert (whole.total_kv_layers, whole.model, whole.generation) == (61, "m", "g1")


def test_a_layout_merges_with_two_drafts_and_with_none():
    both = [draft(owner="draft0"), draft(owner="draft1", base=8192, name="e")]
    assert len(PoolLayout.merge(target(), *both).regions) == 3
    assert PoolLayout.merge(target()) == target()


def test_spaces_of_one_name_that_differ_do_not_merge():
    says = r"space kv: .*reserved=1.* and .*reserved=2.* cannot share ids"
    with pytest.raises(LayoutError, match=says):
        PoolLayout.merge(target(), draft(Space("kv", reserved=2)))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (draft(name="b"), r"buffer b: declared twice"),
        (draft(base=128), r"buffer d: base 128 lies inside buffer b"),
        (
            layout(region(home="d"), buffers=[buffer("d", base=4096)]),
            r"region target layer 0 k: declared twice",
        ),
    ],
)
def test_pools_that_claim_the_same_thing_do_not_merge(other, says):
    with pytest.raises(LayoutError, match=says):
        PoolLayout.merge(target(), other)


# fingerprints

SHARES = Interleave(4, 0, 2)
WHOLE = PoolLayout(
    (
        Buffer("b", "kv", 0, 256, 128, 8, "cuda:0"),
        Buffer("other", "other", 1 << 20, 256, 256, 8, "cuda:0", padding=True),
    ),
    (
        Region("target", 3, "k", "b", 0, "bfloat16", (Axis("head", 2, 32, 2, 8),), 16),
        Region("target", 3, "v", "other", 0, "bfloat16", (), 16, "amx"),
        Region("draft", 3, "v", "other", 64, "float8_e4m3fn", (Axis("tap", 2, 32),), 16),
    ),
    (
        Space("kv", window=128, window_step=4, interleave=SHARES),
        Space("other", "ring", window=1, reserved=2, block_pool="blocks", items_per_block=2),
        Space("page", entries_per_item=8, window=1, ring=2),
        Space("state", "slot", reserved=2, ids="other"),
    ),
    8,
    "m",
    "g",
)
TEXTS = {"cpu", "kv", "other", "b", "slot", "paged", "float16", "uint8", "x", "blocks"}


def changes(value):
    """Layouts in JSON that differ from this part of one in one value, and where."""
    if isinstance(value, dict | list):
        for at in value if isinstance(value, dict) else range(len(value)):
            for path, other in changes(value[at]):
                changed = value.copy()
                changed[at] = other
                yield (at, *path), changed
    elif isinstance(value, int) and not isinstance(value, bool):
        yield from (((), other) for other in (value // 2, value + 1, 2 * value + 2))
    else:
        yield from (((), other) for other in ([not value] if value is True else [True, 1, *TEXTS]))


def test_a_fingerprint_tells_layouts_apart_that_differ_in_anything_but_pointers():
    seen, fingerprints = set(), {WHOLE.fingerprint()}
    for path, changed in changes(json.loads(WHOLE.to_json())):
        with suppress(LayoutError):
            other = PoolLayout.from_json(json.dumps(changed))
            if other == WHOLE:
                continue
            seen.add(path[-1])
            if path[-1] in ("base", "generation"):
                assert other.fingerprint() == WHOLE.fingerprint()
            else:
                assert other.fingerprint() not in fingerprints, path
                fingerprints.add(other.fingerprint())
    names = {field.name for kind in PARTS for field in fields(kind)}
    lists = {"version", "buffers", "regions", "spaces", "axes", "interleave"}
    assert names - seen <= lists


def test_a_fingerprint_ignores_pointers_devices_lives_and_order():
    buffers = [replace(b, base=b.base + 4096, memory="cuda:7") for b in WHOLE.buffers[::-1]]
    other = PoolLayout(
        tuple(buffers), WHOLE.regions[::-1], WHOLE.spaces[::-1], 8, "m", "another life"
    )
    assert other.fingerprint() == WHOLE.fingerprint()


# request addresses


def test_a_span_keeps_a_read_only_copy_of_its_ids():
    ids = [7, 3, 5]
    span = Span(ids, first_item=2)
    ids[0] = 0
    assert span.ids.tolist() == [7, 3, 5]
    with pytest.raises(ValueError, match="read-only"):
        span.ids[0] = 1


@pytest.mark.parametrize(
    ("ids", "first", "says"),
    [
        ([1, -2], 0, r"span ids: -2 is negative"),
        ([4, 1, 4], 0, r"span ids: item 4 is listed twice"),
        ([1.0], 0, r"span ids: a flat list of integers, got float64\(1,\)"),
        ([[1, 2]], 0, r"span ids: a flat list of integers, got int64\(1, 2\)"),
        ([1], -1, r"span first_item: 0 to \d+, got -1"),
        ([1], 1 << 41, r"span first_item: 0 to \d+, got \d+"),
    ],
)
def test_a_span_that_cannot_be_is_refused(ids, first, says):
    with pytest.raises(ValueError, match=says):
        Span(ids, first)


@pytest.mark.parametrize(
    ("blocks", "null", "ids", "first"),
    [
        ([0, 0, 5, 2], 0, [5, 2], 2),
        ([0, 0, 0], 0, [], 3),
        ([-1, -1, 0, 7], -1, [0, 7], 2),
        (np.array([0, 9], dtype=np.uint32), 0, [9], 1),
    ],
)
def test_null_blocks_before_the_live_ones_are_left_out_of_a_span(blocks, null, ids, first):
    span = Span.from_blocks(blocks, null=null)
    assert (span.ids.tolist(), span.first_item) == (ids, first)
    assert span.ids.dtype == np.int64 and not span.ids.flags.writeable


@pytest.mark.parametrize(
    ("blocks", "null", "ids", "first"),
    [
        ([0, 0, 2], 0, [6, 7, 8], 6),
        ([0, 0], 0, [], 6),
        (np.array([0, 200], dtype=np.uint8), 0, [600, 601, 602], 3),
    ],
)
def test_blocks_of_a_span_are_several_items_each(blocks, null, ids, first):
    span = Span.from_blocks(blocks, null, 3)
    assert (span.ids.tolist(), span.first_item) == (ids, first)


@pytest.mark.parametrize("size", [0, -1, 1.5, None])
def test_blocks_of_no_number_of_items_are_refused(size):
    with pytest.raises(ValueError, match="span items_per_block: "):
        Span.from_blocks([1], items_per_block=size)


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        ([0, 5, 0, 2], r"span blocks: null block 0 at index 2, after live ones from index 1 on"),
        ([5, 0], r"span blocks: null block 0 at index 1, after live ones from index 0 on"),
        (["0"], r"span ids: a flat list of integers"),
    ],
)
def test_blocks_that_are_no_span_are_refused(blocks, says):
    with pytest.raises(ValueError, match=says):
        Span.from_blocks(blocks)


@pytest.mark.parametrize("tokens", [-1, (1 << 40) + 1])
def test_a_request_of_an_impossible_length_is_refused(tokens):
    with pytest.raises(ValueError, match=rf"num_tokens: 0 to \d+, got {tokens}"):
        RequestAddress(tokens, {})


# layouts that differ in pointers


def test_layouts_that_differ_in_pointers_keep_their_regions_once():
    one, other = (layout(region(), buffers=[buffer(base=base)]) for base in (0, 4096))
    before = replace(other)
    other.share(one)
    assert other == before and other.region_by_key == before.region_by_key
    assert other.regions is one.regions and other.spaces is one.spaces
    assert other.region_by_key is one.region_by_key
    assert other.buffers[0].base == 4096


def test_layouts_that_differ_in_more_share_nothing():
    one = layout(region())
    for other in (layout(region(role="v")), layout(region(), spaces=[Space("kv", reserved=2)])):
        with pytest.raises(ValueError, match="share regions and spaces that are equal"):
            other.share(one)


# which bytes of a layout's memory are somebody else's

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


@every_class
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
