"""The allocator against sets of pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvpool import Allocator, MLAPool, OutOfPages
from kvpool.allocator import Request

PAGE = 4


def allocator(num_pages=9, page_size=PAGE) -> Allocator:
    pool = MLAPool(
        layers=[0],
        num_pages=num_pages,
        page_size=page_size,
        dtype="bf16",
        device="meta",
    )
    return Allocator(pool)


def pages_of(alloc, request) -> list[int]:
    """Page ids of a request, in order."""
    return request.address().spans["kv"].ids.tolist()


def test_all_pages_but_the_first_can_be_handed_out():
    alloc = allocator(num_pages=9)
    assert alloc.free_pages == 8
    request = alloc.new_request()
    alloc.extend(request, 8 * PAGE)
    assert sorted(pages_of(alloc, request)) == list(range(1, 9))
    assert alloc.free_pages == 0


def test_a_pool_of_two_pages_hands_out_one():
    alloc = allocator(num_pages=2)
    assert alloc.extend(alloc.new_request(), PAGE)["kv"].tolist() == [4, 5, 6, 7]


def test_no_location_lies_in_page_0():
    alloc = allocator()
    assert alloc.extend(alloc.new_request(), 8 * PAGE)["kv"].min() >= PAGE


def test_a_location_is_page_times_page_size_plus_entry():
    alloc = allocator()
    request = alloc.new_request()
    got = alloc.extend(request, 6)["kv"]
    first, second = pages_of(alloc, request)
    assert got.tolist() == [first * 4 + n for n in range(4)] + [second * 4, second * 4 + 1]
    assert got.dtype == np.int64


def test_a_started_page_is_filled_before_another_is_taken():
    alloc = allocator()
    request = alloc.new_request()
    alloc.extend(request, 3)
    (page,) = pages_of(alloc, request)
    assert alloc.extend(request, 1)["kv"].tolist() == [page * 4 + 3]
    assert alloc.free_pages == 7
    alloc.extend(request, 1)
    assert alloc.free_pages == 6


def test_tokens_one_by_one_lie_where_tokens_at_once_lie():
    one, two = allocator(), allocator()
    slow, fast = one.new_request(), two.new_request()
    by_one = [int(one.extend(slow, 1)["kv"][0]) for _ in range(19)]
    assert by_one == two.extend(fast, 19)["kv"].tolist()


def test_locations_repeats_what_extend_returned():
    alloc = allocator()
    request, other = alloc.new_request(), alloc.new_request()
    parts = [alloc.extend(request, 5)["kv"]]
    alloc.extend(other, 6)
    parts.append(alloc.extend(request, 4)["kv"])
    assert alloc.locations(request)["kv"].tolist() == np.concatenate(parts).tolist()


def test_a_fresh_request_gets_consecutive_pages():
    alloc = allocator()
    request = alloc.new_request()
    alloc.extend(request, 5 * PAGE)
    pages = pages_of(alloc, request)
    assert pages == list(range(pages[0], pages[0] + 5))


@pytest.mark.parametrize("page_size", [1, 3, 64, 256])
def test_any_page_size(page_size):
    alloc = allocator(page_size=page_size)
    request = alloc.new_request()
    got = alloc.extend(request, 2 * page_size + 1)["kv"]
    pages = pages_of(alloc, request)
    assert got.tolist() == [
        pages[p // page_size] * page_size + p % page_size for p in range(len(got))
    ]
    assert len(pages) == 3


def test_no_tokens_take_no_page():
    alloc = allocator()
    request = alloc.new_request()
    assert alloc.extend(request, 0)["kv"].size == 0
    assert alloc.locations(request)["kv"].size == 0
    assert (alloc.free_pages, pages_of(alloc, request)) == (8, [])


def test_an_address_says_tokens_and_pages():
    alloc = allocator()
    request = alloc.new_request()
    alloc.extend(request, 9)
    address = request.address()
    assert address.num_tokens == 9
    assert set(address.spans) == {"kv"}
    assert (address.spans["kv"].first_item, address.spans["kv"].ids.size) == (0, 3)


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
    before = pages_of(alloc, request), alloc.free_pages, request.num_tokens
    says = r"2 more pages of 4 tokens are needed, 1 of 8 are free"
    with pytest.raises(OutOfPages, match=says):
        alloc.extend(request, 8)
    assert (pages_of(alloc, request), alloc.free_pages, request.num_tokens) == before
    alloc.check_integrity()
    assert alloc.extend(request, 7)["kv"].size == 7


def test_more_tokens_than_any_pool_holds_run_out_at_once():
    alloc = allocator()
    with pytest.raises(OutOfPages):
        alloc.extend(alloc.new_request(), 1 << 62)
    assert alloc.free_pages == 8


# batches


def test_a_batch_lies_where_its_requests_one_by_one_would():
    one, two = allocator(), allocator()
    slow, fast = ([alloc.new_request() for _ in range(3)] for alloc in (one, two))
    for alloc, requests in ((one, slow), (two, fast)):
        alloc.extend(requests[1], 3)
    by_one = [one.extend(request, 6)["kv"].tolist() for request in slow]
    assert two.extend_batch(fast, 6)["kv"].tolist() == by_one
    assert [r.num_tokens for r in fast] == [6, 9, 6]
    two.check_integrity()


def test_an_empty_batch_and_a_batch_of_no_tokens_take_nothing():
    alloc = allocator()
    assert alloc.extend_batch([], 5)["kv"].shape == (0, 5)
    assert alloc.extend_batch([alloc.new_request(), alloc.new_request()], 0)["kv"].shape == (2, 0)
    assert alloc.free_pages == 8


def test_a_batch_is_extended_whole_or_not_at_all():
    alloc = allocator()
    requests = [alloc.new_request() for _ in range(3)]
    alloc.extend_batch(requests, 4)
    before = [pages_of(alloc, request) for request in requests]
    with pytest.raises(OutOfPages, match=r"6 more pages of 4 tokens are needed, 5 of 8 are free"):
        alloc.extend_batch(requests, 5)
    assert [pages_of(alloc, request) for request in requests] == before
    assert (alloc.free_pages, [r.num_tokens for r in requests]) == (5, [4, 4, 4])
    alloc.check_integrity()


def test_a_batch_with_a_freed_request_is_refused_whole():
    alloc = allocator()
    one, two = alloc.new_request(), alloc.new_request()
    alloc.free(two)
    with pytest.raises(ValueError, match="this request was freed"):
        alloc.extend_batch([one, two], 4)
    assert (alloc.free_pages, one.num_tokens) == (8, 0)


@pytest.mark.parametrize("held", [0, 1])
def test_a_batch_that_names_a_request_twice_is_refused_and_changes_nothing(held):
    alloc = allocator()
    request = alloc.new_request()
    alloc.extend(request, held)
    before = request.num_tokens, pages_of(alloc, request), alloc.free_pages
    with pytest.raises(ValueError, match="twice"):
        alloc.extend_batch([request, request], 3)
    assert (request.num_tokens, pages_of(alloc, request), alloc.free_pages) == before


# the end of a request


def test_freed_pages_are_handed_out_again():
    alloc = allocator()
    request = alloc.new_request()
    alloc.extend(request, 8 * PAGE)
    pages = set(pages_of(alloc, request))
    alloc.free(request)
    assert alloc.free_pages == 8
    again = alloc.new_request()
    alloc.extend(again, 8 * PAGE)
    assert set(pages_of(alloc, again)) == pages


def test_a_freed_request_is_refused():
    alloc = allocator()
    request = alloc.new_request()
    alloc.extend(request, 4)
    alloc.free(request)
    assert request.freed
    for use in (alloc.free, Request.address, alloc.locations, lambda r: alloc.extend(r, 1)):
        with pytest.raises(ValueError, match="this request was freed"):
            use(request)
    assert alloc.free_pages == 8
    alloc.check_integrity()


def test_a_request_of_another_allocator_is_refused():
    alloc, other = allocator(), allocator()
    request = other.new_request()
    for use in (alloc.free, alloc.locations, lambda r: alloc.extend(r, 1)):
        with pytest.raises(ValueError, match="belongs to another allocator"):
            use(request)


def test_requests_do_not_shrink():
    alloc = allocator()
    request = alloc.new_request()
    alloc.extend(request, 4)
    with pytest.raises(ValueError, match=r"tokens: 0 or more, got -1"):
        alloc.extend(request, -1)
    assert request.num_tokens == 4


def test_check_integrity_names_a_page_that_two_hold():
    alloc = allocator()
    one, two = alloc.new_request(), alloc.new_request()
    alloc.extend(one, 4)
    alloc.extend(two, 4)
    two.pages = one.pages
    with pytest.raises(RuntimeError, match=r"page 1 is free or held 2 times, expected 1"):
        alloc.check_integrity()


def test_check_integrity_names_a_page_that_is_lost():
    alloc = allocator()
    request = alloc.new_request()
    alloc.extend(request, 12)
    request.pages = request.pages[[0, 2]]
    with pytest.raises(RuntimeError, match=r"page 2 is free or held 0 times, expected 1"):
        alloc.check_integrity()


def test_check_integrity_names_a_held_padding_page():
    alloc = allocator()
    request = alloc.new_request()
    alloc.extend(request, 4)
    request.pages = np.array([0, *request.pages])
    with pytest.raises(RuntimeError, match=r"page 0 is free or held 1 times, expected 0"):
        alloc.check_integrity()


def test_check_integrity_names_a_page_that_does_not_exist():
    alloc = allocator()
    request = alloc.new_request()
    alloc.extend(request, 4)
    request.pages = np.array([*request.pages, 99])
    with pytest.raises(RuntimeError, match="page 99"):
        alloc.check_integrity()


class Requests(RuleBasedStateMachine):
    """Requests that grow, end and are refused in any order, beside a dict of lists."""

    TOTAL, SIZE = 12, 3
    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.alloc = allocator(num_pages=self.TOTAL + 1, page_size=self.SIZE)
        self.free: set[int] = set(range(1, self.TOTAL + 1))
        self.tokens: dict[int, list[int]] = {}  # locations by request
        self.requests: dict[int, object] = {}
        self.count = 0

    @rule(target=live)
    def begin(self) -> int:
        self.count += 1
        self.requests[self.count] = self.alloc.new_request()
        self.tokens[self.count] = []
        return self.count

    @rule(name=live, tokens=st.integers(0, 14))
    def extend(self, name: int, tokens: int) -> None:
        request, held = self.requests[name], self.tokens[name]
        needed = -(-(len(held) + tokens) // self.SIZE) - -(-len(held) // self.SIZE)
        if needed > len(self.free):
            with pytest.raises(OutOfPages):
                self.alloc.extend(request, tokens)
            return
        got = self.alloc.extend(request, tokens)["kv"].tolist()
        assert len(got) == tokens
        for location in got:
            page, entry = divmod(location, self.SIZE)
            assert entry == len(held) % self.SIZE
            if entry == 0:
                self.free.remove(page)  # a KeyError: handed out twice, or page 0
            else:
                assert location == held[-1] + 1
            held.append(location)

    @rule(name=consumes(live))
    def end(self, name: int) -> None:
        request, held = self.requests.pop(name), self.tokens.pop(name)
        self.alloc.free(request)
        self.free |= {location // self.SIZE for location in held}
        with pytest.raises(ValueError, match="freed"):
            self.alloc.free(request)

    @invariant()
    def agrees(self) -> None:
        self.alloc.check_integrity()
        assert self.alloc.free_pages == len(self.free)
        for name, request in self.requests.items():
            held = self.tokens[name]
            address = request.address()
            assert self.alloc.locations(request)["kv"].tolist() == held
            assert address.num_tokens == len(held)
            assert address.spans["kv"].ids.tolist() == [n // self.SIZE for n in held[:: self.SIZE]]


Requests.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestRequests = Requests.TestCase
