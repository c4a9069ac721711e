"""Items of every space: handed out, shared, copied, taken back, and refused."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from kvpool import (
    Allocator,
    Cell,
    DeviceUnavailable,
    LayoutError,
    MLAPool,
    OutOfPages,
    Repeat,
    Space,
)
from tests.oracle import built
from tests.pools import dsv4, hybrid, mha, mla, swa

PAGE = 4


def allocator(num_pages=9, page_size=PAGE) -> Allocator:
    pool = MLAPool(
        layers=[0], num_pages=num_pages, page_size=page_size, dtype="bf16", device="meta"
    )
    return Allocator(pool)


def pages_of(alloc, request, space="kv") -> list[int]:
    """Item ids of a request, in order."""
    return request.address().spans[space].ids.tolist()


def started(pool, tokens, **options):
    """An allocator, and a request of it that has `tokens` tokens."""
    alloc = Allocator(pool)
    request = alloc.new_request()
    alloc.extend(request, tokens, **options)
    return alloc, request


def snapshot(alloc):
    """All that an allocator knows, and all bytes of its pools."""
    lists = [
        (name, each.ids, each.held_from, each._stop, each.free_list.num_free)
        for name, each in alloc.lists.items()
    ]
    free = [(each.free_list._stack, each.free_list._counts) for each in alloc.lists.values()]
    slabs = [slab for pool in alloc.pools for slab in pool.layout.slabs() if slab.memory == "cpu"]
    tables = alloc._tables
    counts = tables.tokens, tables.received, lists, free, tables.free_rows
    return repr(counts), [ctypes.string_at(slab.base, slab.nbytes) for slab in slabs]


@contextmanager
def refused(alloc, error, says):
    """With this sentence, and nothing has changed."""
    before = snapshot(alloc)
    with pytest.raises(error, match=says):
        yield
    assert snapshot(alloc) == before


def test_all_pages_but_the_first_can_be_allocated_and_taken_again():
    alloc = allocator(num_pages=9)
    for _ in range(2):
        assert alloc.free_pages == 8
        request = alloc.new_request()
        assert alloc.extend(request, 8 * PAGE)["kv"].min() >= PAGE
        assert pages_of(alloc, request) == list(range(1, 9))  # one after the other
        assert alloc.free_pages == 0
        alloc.free(request)
    assert allocator(num_pages=2).free_pages == 1


def test_an_address_does_not_follow_its_request():
    alloc = allocator()
    request = alloc.new_request()
    alloc.extend(request, 4)
    before = request.address()
    pages = before.spans["kv"].ids.tolist()
    alloc.extend(request, 9)
    alloc.free(request)
    assert (before.num_tokens, before.spans["kv"].ids.tolist()) == (4, pages)


def test_running_out_says_what_is_missing_and_changes_nothing():
    alloc = allocator()
    request, other = alloc.new_request(), alloc.new_request()
    alloc.extend(request, 5)
    alloc.extend(other, 5 * PAGE)
    says = r"2 more items of 4 tokens are needed, 1 of 8 are free\. Free .*, or build a larger pool"
    with refused(alloc, OutOfPages, says):
        alloc.extend(request, 8)
    alloc.check_integrity()
    assert alloc.extend(request, 7)["kv"].size == 7


@pytest.mark.parametrize("received", [False, True])
def test_more_tokens_than_any_pool_holds_run_out_at_once(received):
    alloc, request = started(mla(device="meta"), 3)
    with refused(alloc, OutOfPages, "space kv: 274877906943 more items"):
        alloc.extend(request, (1 << 40) - 3, received=received)
    for tokens in ((1 << 40) - 2, 1 << 62, 1 << 80):
        with refused(alloc, ValueError, f"tokens: {tokens} more exceed 1099511627776"):
            alloc.extend(request, tokens, received=received)


# batches


def test_numbers_of_tokens_that_cannot_be_are_refused_whole():
    alloc = allocator()
    requests = [alloc.new_request() for _ in range(4)]
    alloc.extend_batch(requests, 1)
    for wrong in ([1, 2], [[1] * 4], 1.5):
        with pytest.raises(ValueError, match="one for each of 4 requests"):
            alloc.extend_batch(requests, wrong)
    with pytest.raises(ValueError, match="0 or more, got -1"):
        alloc.extend_batch(requests, [3, 0, -1, 0])
    assert [request.num_tokens for request in requests] == [1] * 4


def test_an_empty_batch_and_a_batch_of_no_tokens_take_nothing():
    alloc = allocator()
    assert alloc.extend_batch([], 5)["kv"].shape == (0, 5)
    assert alloc.extend_batch([alloc.new_request(), alloc.new_request()], 0)["kv"].shape == (2, 0)
    assert alloc.free_pages == 8


def test_a_batch_with_a_request_that_was_freed_or_is_named_twice_changes_nothing():
    alloc = allocator()
    request, freed = alloc.new_request(), alloc.new_request()
    alloc.extend(request, 1)
    alloc.free(freed)
    for batch, says in (([request, freed], "this request was freed"), ([request] * 2, "twice")):
        with refused(alloc, ValueError, says):
            alloc.extend_batch(batch, 3)


# the end of a request


def test_a_request_that_was_freed_or_is_of_another_allocator_is_refused():
    alloc, other = allocator(), allocator()
    request, foreign = alloc.new_request(), other.new_request()
    alloc.extend(request, 4)
    alloc.free(request)
    assert request.num_tokens == 0
    uses = (alloc.free, alloc.locations, lambda r: alloc.extend(r, 1), lambda r: alloc.fork(r, 0))
    for use in uses:
        with pytest.raises(ValueError, match="this request was freed"):
            use(request)
        with pytest.raises(ValueError, match="belongs to another allocator"):
            use(foreign)
    with pytest.raises(ValueError, match="this request was freed"):
        request.address()
    assert alloc.free_pages == 8
    alloc.check_integrity()


def test_a_freed_request_is_not_the_one_that_has_its_row():
    alloc = allocator()
    old = alloc.new_request()
    alloc.free(old)
    new = alloc.new_request()
    alloc.extend(new, 5)
    assert (old.num_tokens, new.num_tokens) == (0, 5)
    with pytest.raises(ValueError, match="this request was freed"):
        alloc.free(old)


def test_an_allocator_is_for_a_pool():
    with pytest.raises(ValueError, match="needs at least one pool"):
        Allocator()


def test_a_pool_has_one_allocator_with_live_requests():
    target, draft = mla(), mla(owner="draft", layers=[4])
    alloc = Allocator(target, draft)
    request = alloc.new_request()
    for pools in ((target,), (draft,), (draft, target)):
        with pytest.raises(ValueError, match=r"already has an allocator, with 1 live request"):
            Allocator(*pools)
    alloc.free(request)
    assert Allocator(draft).new_request().num_tokens == 0


def test_a_dropped_allocator_leaves_its_pool_to_the_next():
    pool = mla()
    alloc, request = started(pool, 9)
    del alloc, request
    assert Allocator(pool).free_pages == pool.num_pages - 1


@pytest.mark.parametrize("tokens", [2.0, "2", None])
def test_tokens_that_are_no_whole_number_are_refused_and_change_nothing(tokens):
    alloc, request = started(mla(), 5)
    for use in (alloc.extend, alloc.fork):
        with refused(alloc, TypeError, "tokens: a whole number, got"):
            use(request, tokens)
    assert alloc.extend(request, np.int32(2))["kv"].size == 2


def test_free_pages_are_those_of_the_list_that_has_fewest():
    own = {"owner": "draft", "layers": [4], "own_spaces": True}
    alloc = Allocator(mla(), mla(num_pages=5, **own))
    assert (alloc.free_pages, alloc.free_items("kv"), alloc.free_items("draft.kv")) == (4, 8, 4)
    with pytest.raises(ValueError, match=r"no pages of tokens: use free_items.*'state'"):
        _ = Allocator(hybrid(layers=[0])).free_pages


# windows: swa() keeps 6 tokens, in pages of 2; test_allocator_stateful.py has every order of calls


@settings(max_examples=200)
@example(size=1, per=1, window=0, step=2, chunks=[(6, True)])  # nothing of it is alive
@given(
    st.integers(1, 5),
    st.sampled_from([1, 1, 2, 3]),
    st.one_of(st.none(), st.integers(0, 9)),
    st.sampled_from([1, 1, 2, 4]),
    st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=5),
)
def test_any_paged_space_holds_the_items_of_what_is_alive(size, per, window, step, chunks):
    step = 1 if window is None else step
    window = max(1, window) if window is not None and step == 1 else window
    space = Space("w", "paged", size, per, window=window, window_step=step)
    state = built([(0, "w", 120, Repeat("entry", size, Cell("latent", 1, "uint8")))], [space])
    alloc, request = started(SimpleNamespace(layout=state.layout, allocator=None), 0)
    tokens = first = 0
    for more, received in chunks:
        entries = (tokens + more if received else tokens) // per
        while entries % step:
            entries -= 1
        tokens += more
        stop = -(-tokens // (size * per))
        first = max(
            first, min(stop, max(0, entries - (entries if window is None else window)) // size)
        )
        found = alloc.extend(request, more, received=received)["w"]
        span = request.address().spans["w"]
        assert (span.first_item, span.ids.size) == (first, stop - first)
        places = [
            span.ids[p // per // size - first] * size + p // per % size
            if p // per // size >= first
            else -1
            for p in range(tokens - more, tokens)
        ]
        assert found.tolist() == places
    alloc.check_integrity()


# received: computed elsewhere


def test_more_may_be_received_than_a_window_space_has_items():
    alloc, request = started(swa(layers=[0, 2], device="meta"), 0)
    found = alloc.extend(request, 1_000_000, received=True)["swa"]
    assert (found[:-6] == -1).all() and (found[-6:] > 0).all()
    words = (
        r"space swa: 499994 more items of 2 tokens are needed.* longer passes of windows: from_b"
    )
    with pytest.raises(OutOfPages, match=words):
        alloc.extend(alloc.new_request(), 999_988)


# truncation


@pytest.mark.parametrize("build", [mla, swa, dsv4.but(speculation=True)])
@pytest.mark.parametrize("held", [1, 7, 16, 38])
@pytest.mark.parametrize("drafts", [1, 2])
def test_drafts_of_one_extension_can_be_rejected_but_for_slots(build, held, drafts):
    """A token is decoded and drafts verified with it: at most the drafts go back."""
    pool = build(device="meta", num_pages=20, num_window_pages=40)
    alloc, request = started(pool, held)
    for accepted in range(drafts + 1):
        before = request.num_tokens
        alloc.extend(request, 1 + drafts)
        alloc.truncate(request, before + 1 + accepted)
    alloc.check_integrity()


def test_state_that_was_overwritten_or_freed_is_refused_with_the_reason():
    alloc, request = started(hybrid(device="meta"), 9)
    says = (
        r"space state: a slot holds the state after 9 tokens, and there is no checkpoint of that "
        r"after 8\. Fork the request before"
    )
    with refused(alloc, ValueError, says):
        alloc.truncate(request, 8)
    alloc.truncate(request, 0)

    alloc, request = started(dsv4(device="meta"), 9)  # rings of 4 and 8
    says = (
        r"space c2.ring: of the entries that are alive at 7 tokens, 4 to 4 were overwritten in the "
        r"ring of 4\. Build the pool with"
    )
    with pytest.raises(ValueError, match=says):
        alloc.truncate(request, 7)
    alloc.truncate(request, 8)
    with pytest.raises(ValueError, match=r"6 to 6|4 to 4"):  # 9 had overwritten 5, 8 had 4
        alloc.truncate(request, 7)

    alloc, request = started(swa(device="meta"), 0)  # a window of 6, in pages of 2
    for _ in range(5):
        alloc.extend(request, 4)
    says = "of the entries that are alive at 9 tokens, 3 to 8 left the window and were freed"
    with pytest.raises(ValueError, match=rf"space swa: {says}\."):
        alloc.truncate(request, 9)
    alloc.truncate(request, 16)

    alloc, request = started(swa(device="meta"), 20, received=True)
    with pytest.raises(ValueError, match=r"space swa: .* 12 to 13 "):
        alloc.truncate(request, 18)
    alloc.check_integrity()


def test_a_ring_that_was_cut_lists_what_is_left_and_fills_again():
    alloc, request = started(dsv4(speculation=True, device="meta"), 20)  # rings of 8 and 16
    (item,) = pages_of(alloc, request, "ring")
    alloc.truncate(request, 17)
    found = alloc.locations(request)["c2.ring"]
    assert found.tolist() == [-1] * 12 + [item * 8 + p % 8 for p in range(12, 17)]
    assert alloc.extend(request, 2)["c2.ring"].tolist() == [item * 8 + 1, item * 8 + 2]
    assert alloc.locations(request)["c2.ring"].tolist()[:12] == [-1] * 12


@pytest.mark.parametrize("tokens", [-1, 10, 1.5, "2", [1, 2], None])
def test_a_number_that_is_not_there_is_refused(tokens):
    alloc, request = started(mla(), 9)
    with pytest.raises(ValueError, match="tokens: "):
        alloc.truncate_batch([request], tokens)
    assert request.num_tokens == 9


# forks


@pytest.mark.parametrize(("build", "space"), [(hybrid, "state"), (dsv4, "ring")])
def test_slots_and_rings_are_forked_at_the_end_only(build, space):
    alloc, request = started(build(), 8)
    says = rf"space {space}: holds the state after 8 tokens, not after 7\. Fork at 8 tokens"
    with refused(alloc, ValueError, says):
        alloc.fork(request, 7)


def test_a_fork_that_reads_what_left_the_window_is_refused():
    alloc, request = started(swa(), 8)
    alloc.extend(request, 4)  # item 0 went back
    says = r"space swa: items 0 to 0 of that prefix have left the window and were freed"
    with refused(alloc, ValueError, says):
        alloc.fork(request, 7)


@pytest.mark.parametrize("more", [0, 1])
def test_a_fork_that_reads_what_was_dead_when_received_is_refused(more):
    alloc, request = started(swa(), 9, received=True)  # of item 1, entry 3 came and entry 2 did not
    alloc.extend(request, more)
    says = r"space swa: entries 2 to 2 of that prefix were dead when it was received"
    with refused(alloc, ValueError, says):
        alloc.fork(request, 8)
    child = alloc.fork(request, 9)
    with pytest.raises(ValueError, match=says):
        alloc.fork(child, 8)
    alloc.check_integrity()


@pytest.mark.parametrize("tokens", [-1, 10, 1 << 70])
def test_a_fork_of_more_tokens_than_there_are_is_refused(tokens):
    alloc, request = started(mla(), 9)
    with pytest.raises(ValueError, match=f"tokens: 0 to 9, which the request has, got {tokens}"):
        alloc.fork(request, tokens)


@pytest.mark.parametrize("build", [mla, swa, hybrid, dsv4])
def test_a_copy_that_fails_leaves_no_request_behind(build):
    alloc, request = started(build(device="meta"), 9)
    free = {name: alloc.free_items(name) for name in alloc.lists}
    with pytest.raises(DeviceUnavailable, match="no memory to write, read or copy"):
        alloc.fork(request, 9)
    alloc.check_integrity()
    assert {name: alloc.free_items(name) for name in alloc.lists} == free
    assert alloc.usage().requests == 1


# a target and its drafts


def test_a_draft_shares_its_targets_ids_and_a_fork_copies_in_both():
    target, draft = mla(), mha(owner="draft", layers=[4], num_pages=7)
    alloc = Allocator(target, draft)
    assert alloc.free_pages == 6  # of the smaller one
    request = alloc.new_request()
    assert set(alloc.extend(request, 6)) == {"kv"}
    for pool in (target, draft):
        for buffer in pool.layout.buffers:
            pool.item_bytes_view(buffer).random_(255)
    child = alloc.fork(request, 6)
    (shared, mine), (also, theirs) = pages_of(alloc, child), pages_of(alloc, request)
    assert shared == also and mine != theirs
    for pool in (target, draft):
        for buffer in pool.layout.buffers:
            view = pool.item_bytes_view(buffer)
            assert (view[mine] == view[theirs]).all() and view[mine].any()


def test_pools_that_cannot_share_ids_are_refused():
    with pytest.raises(LayoutError, match=r"space kv: .* cannot share ids"):
        Allocator(mla(), mla(owner="draft", layers=[4], page_size=3))


# check_integrity


def forgotten(kv, one, two):
    kv.free_list.num_free -= 1


def padding(kv, one, two):
    kv.free_list._stack[0] = 0


def miscounted(kv, one, two):
    kv.free_list._counts[3] += 1


def too_short(kv, one, two):
    kv._stop[one] = 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (miscounted, "item 3 has 1 holders, counted 2, and is 0 times free"),
        (forgotten, "item 5 has 0 holders, counted 0, and is 0 times free"),
        (too_short, "items 0 to 1 are held by a request of 12 tokens"),
        (padding, "item 0 of 9 is free or held"),
    ],
)
def test_check_integrity_names_what_is_wrong(change, says):
    alloc = allocator()
    one, two = alloc.new_request(), alloc.new_request()
    alloc.extend(one, 12)  # pages 1, 2, 3
    alloc.extend(two, 4)  # page 4
    alloc.check_integrity()
    change(alloc.lists["kv"], one._row, two._row)
    with pytest.raises(RuntimeError, match=f"space kv: {says}"):
        alloc.check_integrity()
