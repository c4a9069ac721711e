"""Saved state comes back behind what is there already: no byte before `start` is written, nor one
that another request or the prefix cache needs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvpool import Allocator, PrefixCache, RequestAddress, Shard
from tests.oracle import DEST, blank, fill, holds, place, state, write
from tests.pools import CLASSES, PACKED, dsv4, hybrid, mla, swa

LONG = replace(dsv4.but(page_rings=True, window_page_size=16), resized={"window_page_size": 8})
POOLS = {**PACKED, "dsv4, pages longer than their rings": LONG}
MANY = {"num_pages": 24, "num_window_pages": 25}
TOKENS = list(range(100, 129))
every = pytest.mark.parametrize("build", CLASSES.values(), ids=CLASSES.keys())


def memory_of(pool) -> list[np.ndarray]:
    return [memory.copy() for memory in state(pool).memory]


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


def expected_memory(pool, source, there, here, start: int) -> list[np.ndarray]:
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
    for memory, wanted in zip(memory_of(pool), expected):
        np.testing.assert_array_equal(memory, wanted)


def computed(pool, alloc, tokens, steps=(8, 8, 8, 5)):
    """A request of these tokens, computed in chunks, stored after each."""
    request = alloc.new_request()
    for count in steps:
        before = request.num_tokens
        alloc.extend(request, count)
        write(pool, request.address(), range(before, before + count))
        alloc.store(request, tokens[before : before + count])
    return request


@every
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
    for memory, before in zip(memory_of(pool), shared):
        np.testing.assert_array_equal(memory, before)
    assert not again.pins()
    pool.load(again.address(), saved, start=start)
    assert holds(pool, again.address()) and holds(pool, other.address())
    alloc.store(again, TOKENS[start:])
    alloc.check_integrity()


@every
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


def refused(pool, address, saved, start, says):
    before = memory_of(pool)
    with pytest.raises(ValueError, match=says):
        pool.load(address, saved, start=start)
    for memory, was in zip(memory_of(pool), before):
        np.testing.assert_array_equal(memory, was)


def test_what_the_prefix_cache_keeps_is_not_written_over():
    pool = mla(**MANY)
    alloc = Allocator(pool, prefix=PrefixCache())
    blank(pool)
    request = computed(pool, alloc, TOKENS)
    saved = pool.save(request.address())
    says = (
        "load would write positions 27 to 28 of this request to items 7 of space kv, which the "
        "prefix cache keeps. Begin at position 28"
    )
    refused(pool, request.address(), saved, 27, says)
    pool.load(request.address(), saved, start=28)
    alloc.prefix.clear()
    pool.load(request.address(), saved)


def test_a_prefix_that_is_pinned_is_not_written_over_though_the_cache_forgot_it():
    pool = mla(**MANY)
    alloc = Allocator(pool, prefix=PrefixCache())
    blank(pool)
    request = computed(pool, alloc, TOKENS)
    pinned = alloc.prefix.pin(TOKENS[:8])
    alloc.prefix.clear()
    saved = pool.save(request.address())
    refused(pool, request.address(), saved, 0, "items 1-2 of space kv, which a pinned prefix holds")
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
    refused(pool, parent.address(), saved, 0, says)
    for fork in forks:
        alloc.free(fork)
    pool.load(parent.address(), saved)


@pytest.mark.parametrize("start", [-1, 10])
def test_a_start_outside_what_was_saved_is_refused(start):
    pool = mla(**MANY)
    saved = pool.save(place(pool, 9))
    refused(pool, place(pool, 9), saved, start, f"start: 0 to 9, .* got {start}")


def test_a_block_table_whose_state_was_overwritten_since_is_neither_saved_nor_loaded():
    pool = hybrid(**MANY)
    alloc = Allocator(pool)
    request = computed(pool, alloc, TOKENS, (9,))
    old = request.address()
    saved = pool.save(old)
    alloc.extend(request, 1)
    refused(pool, old, saved, 0, "has lost the state in slot 1 of space state")
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
    for memory, was in zip(memory_of(pool), before):
        np.testing.assert_array_equal(memory, was)
    pool.copy_items("kv", [1], [4])  # its own last page
    alloc.free(request)
    with pytest.raises(ValueError, match="items 3 of space kv, which the prefix cache keeps"):
        pool.copy_items("kv", [9], [3])
