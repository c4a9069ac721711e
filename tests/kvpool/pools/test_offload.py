"""A request's state goes to host memory and comes back, to the same items or to others, also behind
what is there already: no byte before `start` is written, nor one that another request or the prefix
cache needs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvpool import Allocator, DeviceUnavailable, PrefixCache, RequestAddress, Shard, Span
from tests.oracle import DEST, blank, fill, holds, place, state, write
from tests.pools import PACKED, dsv4, every_class, hybrid, memory_of, mha, mla, swa

LONG = replace(dsv4.but(page_rings=True, window_page_size=16), resized={"window_page_size": 8})
POOLS = {**PACKED, "dsv4, pages longer than their rings": LONG}
MANY = {"num_pages": 24, "num_window_pages": 25}
TOKENS = list(range(100, 129))


def whole_items(space, start: int, tokens: int) -> list[int]:
    """Numbers of the items with something alive of which no entry was complete before `start`."""
    if space.kind == "slot":
        return [0] if tokens else []
    size, step = space.entries_per_item, space.window_step if space.ring else 1
    entries, kept = tokens // space.tokens_per_entry, start // space.tokens_per_entry
    kept -= kept % step
    first = 0
    if space.window is not None:
        first = max(0, entries - entries % space.window_step - space.window)
    if space.kind == "ring":
        return [0] if first < entries else []
    numbers = {entry // size for entry in range(first, entries)}
    return [number for number in sorted(numbers) if number * size >= kept]


def expected_memory(pool, source, there, here, start: int) -> np.ndarray:
    """What a load must leave of a blank pool in which positions before `start` were written: whole
    items as they were saved, and of the item that `start` lies in the entries from there on.
    """
    blank(pool)
    write(pool, here, range(start), salt=1)
    for buffer in pool.layout.buffers:
        space = pool.layout.space_by_name[buffer.space]
        rows, saved = pool.item_bytes_view(buffer), source[buffer.name]
        for number in whole_items(space, start, here.num_tokens):
            ids = [address.spans[space.id_list].ids[number] for address in (there, here)]
            rows[ids[1]] = saved[ids[0]]
    write(pool, here, range(start, here.num_tokens))
    return memory_of(pool)


def test_saved_is_host_memory_of_its_own():
    pool = mla(**MANY)
    address = place(pool, 9)
    fill(pool, address)
    saved = pool.save(address)
    assert saved.nbytes == 3 * 4 * 4 * 48  # pages, tokens, layers, bytes of a row
    assert saved.num_tokens == 9
    blank(pool)
    assert all((rows != 255).any() for rows in saved.items.values())


@settings(deadline=None, max_examples=150)
@given(data=st.data(), name=st.sampled_from(list(POOLS)))
def test_of_any_pool_positions_from_start_on_come_back_and_no_other_byte_is_written(data, name):
    build, placement = POOLS[name], data.draw(st.sampled_from(["layer", "page", "stack", "block"]))
    more = {**MANY, "placement": placement, **({"num_pages": 70} if placement == "block" else {})}
    if data.draw(st.booleans(), "resized"):
        more = {**build.resized, **more}
    if data.draw(st.booleans(), "sharded"):
        more["shard"] = Shard(1, 2)
    pool = build(**more)
    tokens = data.draw(st.integers(0, 29))
    start = data.draw(st.integers(0, tokens))
    there = place(pool, tokens, 1)
    here = place(pool, tokens, 2) if data.draw(st.booleans(), "elsewhere") else there
    fill(pool, there)
    saved = pool.save(there)
    live = {
        buffer.name: (len(numbers), buffer.item_bytes)
        for buffer in pool.layout.buffers
        if (numbers := whole_items(pool.layout.space_by_name[buffer.space], 0, tokens))
    }
    assert {name: tuple(rows.shape) for name, rows in saved.items.items()} == live
    source = {b.name: pool.item_bytes_view(b).clone() for b in pool.layout.buffers}
    expected = expected_memory(pool, source, there, here, start)
    blank(pool)
    write(pool, here, range(start), salt=1)
    pool.load(here, saved, start=start)
    np.testing.assert_array_equal(memory_of(pool), expected)


def computed(pool, alloc, tokens, steps=(8, 8, 8, 5)):
    """A request of these tokens, computed in chunks, stored after each."""
    request = alloc.new_request()
    for count in steps:
        before = request.num_tokens
        alloc.extend(request, count)
        write(pool, request.address(), range(before, before + count))
        alloc.store(request, tokens[before : before + count])
    return request


@every_class
def test_a_preempted_request_comes_back_behind_its_stored_prefix(build):
    pool = build(**MANY, num_slots=9)
    alloc = Allocator(pool, prefix=PrefixCache(checkpoint_tokens=8))
    blank(pool)
    first = computed(pool, alloc, TOKENS)
    saved = pool.save(first.address())
    alloc.free(first)
    other = alloc.new_request(TOKENS[:17])  # goes on with other tokens
    assert other.num_tokens == 16
    again = alloc.new_request(TOKENS)
    start = again.num_tokens
    assert 24 <= start < len(TOKENS)
    alloc.extend(again, len(TOKENS) - start, received=True)
    shared = memory_of(pool)
    with pytest.raises(ValueError, match=rf"Begin at position {start} \(start={start}, "):
        pool.load(again.address(), saved)
    np.testing.assert_array_equal(memory_of(pool), shared)
    assert not again.pins()
    pool.load(again.address(), saved, start=start)
    assert holds(pool, again.address()) and holds(pool, other.address())
    alloc.store(again, TOKENS[start:])
    alloc.check_integrity()


@every_class
@pytest.mark.parametrize("tokens", [5, 8, 29])
def test_a_fork_takes_what_follows_its_prefix_and_its_parent_stays(build, tokens):
    """The parent's state after the fork has other values."""
    pool = build(**MANY)
    alloc = Allocator(pool)
    blank(pool)
    parent = alloc.new_request()
    alloc.extend(parent, tokens)
    write(pool, parent.address(), range(tokens))
    fork = alloc.fork(parent, tokens)
    source = build(**MANY)
    there = place(source, 33, 4)
    fill(source, there)
    saved = source.save(there)
    alloc.extend(fork, 33 - tokens, received=True)
    pool.load(fork.address(), saved, start=tokens)
    assert holds(pool, fork.address()) and holds(pool, parent.address())


# refused, with nothing written


def refused(pool, address, saved, says, start=0):
    blank(pool)
    with pytest.raises(ValueError, match=says):
        pool.load(address, saved, start=start)
    assert (memory_of(pool) == DEST).all()


@pytest.mark.parametrize(
    ("build", "other", "says"),
    [
        (mla, {"page_size": 3}, r"buffer target.kv.0: .*entries_per_item=4.* when saved, .*=3"),
        (mla, {"layers": [0, 1, 2]}, r"buffer target.kv.3: .* when saved, absent here"),
        (
            mla,
            {"layers": range(5), "total_kv_layers": 5},
            r"buffer target.kv.4: absent when saved, ",
        ),
        (mla, {"packing": "f32"}, r"dtype='bfloat16'.* when saved, .*dtype='float32'.* here"),
        (mha, {"order": "hnd"}, r"buffer target.k.0: .* Load into a pool of the same layout"),
        (swa, {"window": 4}, r"buffer target.swa.kv.0: .*window=6.* when saved, .*window=4"),
        (hybrid, {"conv_dtype": "float16"}, r"buffer target.conv.0: "),
        (dsv4, {"speculation": True}, r"buffer target.c2.index_state.1: "),
    ],
)
def test_a_pool_of_another_layout_is_refused(build, other, says):
    source = build(**MANY)
    saved = source.save(place(source, 9))
    pool = build(**{**MANY, **other})
    refused(pool, place(pool, 9), saved, says)


def test_placement_and_numbers_of_items_may_differ():
    source, dest = dsv4(**MANY), dsv4(num_pages=12, num_window_pages=15, placement="page")
    there, here = place(source, 29, 1), place(dest, 29, 2)
    fill(source, there)
    blank(dest, 254)
    dest.load(here, source.save(there))
    for region in dest.layout.regions:
        one, two = (state(pool).views[region.key] for pool in (source, dest))
        name = dest.layout.space_of(region).id_list
        for number in range(4, 6) if name == "swa" else range(1):
            ids = [address.spans[name].ids[number] for address in (there, here)]
            assert (one[ids[0]] == two[ids[1]]).all()


def test_another_number_of_tokens_is_refused():
    pool = mla(**MANY)
    saved = pool.save(place(pool, 9))
    refused(pool, place(pool, 10), saved, "9 tokens were saved, the block table has 10")


@pytest.mark.parametrize("do", ["save", "load"])
@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ({}, "no ids for space 'kv' of buffer target.kv.0"),
        ({"kv": Span([1, 2])}, "space kv: items 0 to 2 of the request are live, its ids cover 0"),
        ({"kv": Span([1, 2, 3], 1)}, "items 0 to 2 of the request are live, its ids cover 1 to 3"),
        ({"kv": Span([1, 24, 3])}, "space kv: ids from 1 to 24, items are 1 to 23"),
        ({"kv": Span([1, 0, 3])}, "space kv: ids from 0 to 3, items are 1 to 23"),
    ],
)
def test_an_address_that_does_not_fit_is_refused(do, spans, says):
    pool = mla(**MANY)
    saved = pool.save(place(pool, 9))
    address = RequestAddress(9, spans)
    if do == "load":
        refused(pool, address, saved, says)
    else:
        with pytest.raises(ValueError, match=says):
            pool.save(address)


def test_an_address_that_does_not_fit_in_its_last_space_changes_no_other():
    pool = hybrid(**MANY)
    good = place(pool, 9)
    saved = pool.save(good)
    bad = RequestAddress(9, {**good.spans, "state": Span([5])})
    refused(pool, bad, saved, "space state: ids from 5 to 5, items are 1 to 4")


def test_a_pool_without_memory_refuses_to_save_and_to_load():
    pool, other = mla(device="meta", **MANY), mla(**MANY)
    with pytest.raises(DeviceUnavailable, match="no memory to save or load"):
        pool.save(place(pool, 9))
    with pytest.raises(DeviceUnavailable, match="no memory to save or load"):
        pool.load(place(pool, 9), other.save(place(other, 9)))


def test_what_the_prefix_cache_keeps_or_has_pinned_is_not_written_over():
    pool = mla(**MANY)
    alloc = Allocator(pool, prefix=PrefixCache())
    blank(pool)
    request = computed(pool, alloc, TOKENS)
    saved = pool.save(request.address())
    says = (
        "load would write positions 27 to 28 of this request to items 7 of space kv, which the "
        "prefix cache keeps. Begin at position 28"
    )
    refused(pool, request.address(), saved, says, 27)
    pool.load(request.address(), saved, start=28)
    pinned = alloc.prefix.pin(TOKENS[:8])
    alloc.prefix.clear()
    refused(pool, request.address(), saved, "items 1-2 of space kv, which a pinned prefix holds")
    alloc.prefix.unpin(pinned)
    pool.load(request.address(), saved)


def test_all_that_is_shared_is_named():
    pool = swa(**MANY)  # pages of 4, in the window of 2
    alloc = Allocator(pool)
    blank(pool)
    parent = computed(pool, alloc, TOKENS, (9,))
    saved = pool.save(parent.address())
    forks = [alloc.fork(parent, 9) for _ in range(2)]
    says = (
        "items 1-2 of space kv, which 2 other requests hold; items 2-4 of space swa, which 2 other "
        r"requests hold. Begin at position 8 \(start=8, of a snapshot tokens=range\(8, 9\)\), or"
    )
    refused(pool, parent.address(), saved, says)
    for fork in forks:
        alloc.free(fork)
    pool.load(parent.address(), saved)


@pytest.mark.parametrize("start", [-1, 10])
def test_a_start_outside_what_was_saved_is_refused(start):
    pool = mla(**MANY)
    saved = pool.save(place(pool, 9))
    refused(pool, place(pool, 9), saved, f"start: 0 to 9, .* got {start}", start)


def test_a_block_table_whose_state_was_overwritten_since_is_neither_saved_nor_loaded():
    pool = hybrid(**MANY)
    alloc = Allocator(pool)
    request = computed(pool, alloc, TOKENS, (9,))
    old = request.address()
    saved = pool.save(old)
    alloc.extend(request, 1)
    refused(pool, old, saved, "has lost the state in slot 1 of space state")
    with pytest.raises(ValueError, match="has lost the state in slot 1 of space state"):
        pool.save(old)


def test_a_block_table_without_a_request_is_written_as_it_says():
    pool = mla(**MANY)
    alloc = Allocator(pool, prefix=PrefixCache())
    blank(pool)
    request = computed(pool, alloc, TOKENS)
    saved = pool.save(request.address())
    blank(pool, DEST)
    pool.load(RequestAddress(29, request.address().spans), saved)
    assert holds(pool, request.address())


# copy_items


@pytest.mark.parametrize(
    ("space", "src", "dst", "error", "says"),
    [
        ("kv", [9], [1], IndexError, "target item of kv 9 of 9"),
        ("kv", [1], [-1], IndexError, "target item of kv -1 of 9"),
        ("ring", [1, 2], [4, 5], IndexError, "target item of ring 5 of 5"),
        ("swa", [1, 2], [3], ValueError, "space swa: 2 source items, 1 targets"),
        (
            "c2",
            [1],
            [2],
            KeyError,
            r"target space 'c2': this pool has id lists \['kv', 'ring', 'swa",
        ),
        ("state", [1], [2], KeyError, r"target space 'state': this pool has id lists"),
        ("kv", [1.5], [2], ValueError, "Give a flat list of integers"),
        ("kv", [True], [False], ValueError, "Give a flat list of integers"),
    ],
)
def test_items_that_cannot_be_copied_are_refused_and_nothing_is_written(
    space, src, dst, error, says
):
    pool = dsv4()
    fill(pool, place(pool, 9))
    before = memory_of(pool)
    with pytest.raises(error, match=says):
        pool.copy_items(space, src, dst)
    assert (memory_of(pool) == before).all()


def test_a_list_that_has_no_buffers_here_is_refused():
    with pytest.raises(KeyError, match=r"target space 'swa': this pool has id lists \['kv'\]"):
        swa(layers=[1]).copy_items("swa", [1], [2])


def test_copies_go_by_the_spaces_that_a_draft_has():
    pool = dsv4(owner="draft", own_spaces=True)
    for name in ("draft.kv", "draft.swa", "draft.ring"):
        pool.copy_items(name, [1], [2])
    with pytest.raises(KeyError, match="draft space 'kv'"):
        pool.copy_items("kv", [1], [2])


def test_shared_items_are_no_target_of_a_copy():
    pool = mla(**MANY)
    alloc = Allocator(pool, prefix=PrefixCache())
    blank(pool)
    request = computed(pool, alloc, TOKENS[:13], (13,))
    alloc.fork(request, 8)
    before = memory_of(pool)
    for target, says in (
        (2, "items 2 of space kv, which 2 requests hold and the prefix cache keeps"),
        (3, "items 3 of space kv, which 1 request holds and the prefix cache keeps"),
    ):
        with pytest.raises(ValueError, match=says):
            pool.copy_items("kv", [9], [target])
    np.testing.assert_array_equal(memory_of(pool), before)
    pool.copy_items("kv", [1], [4])  # its own last page
    alloc.free(request)
    with pytest.raises(ValueError, match="items 3 of space kv, which the prefix cache keeps"):
        pool.copy_items("kv", [9], [3])
