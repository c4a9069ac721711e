"""Requests that receive at most so many tokens: the allocator lists every page that may be alive,
and goes on with the tokens that came.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from disagg import KVPoll
from kvpool import Allocator, PrefixCache, RequestAddress, RequestPinned
from tests import oracle
from tests.disagg.runtime.sides import connected, succeeds
from tests.pools import CLASSES, dsv4, hybrid, mla, swa

MANY = {"num_pages": 14, "num_window_pages": 24, "num_slots": 9}
ROOM = 30
every = pytest.mark.parametrize("build", CLASSES.values(), ids=CLASSES.keys())


@contextmanager
def receiving(build):
    """A source pool, and prefill, another pool and its decode."""
    source, dest = build(**MANY), build(**MANY)
    with connected(source, dest, verify="checksum") as (prefill, decode):
        oracle.blank(dest)
        yield source, prefill, dest, decode


def received(source, prefill, decode, request, tokens, start=0):
    """Receives `tokens` tokens into a request that has room for more; returns how many came."""
    table = oracle.place(source, tokens, 3)
    oracle.fill(source, table)
    decode.receive("r", request.address(), start=start, at_most=True)
    prefill.send("r", table)
    succeeds(decode, "r")
    return decode.num_tokens("r")


@every
@pytest.mark.parametrize("tokens", [0, 7, 21, ROOM])
def test_fewer_tokens_than_there_is_room_for_come_whole_and_the_request_goes_on(build, tokens):
    with receiving(build) as (source, prefill, dest, decode):
        alloc = Allocator(dest)
        request, other = alloc.new_request(), alloc.new_request()
        alloc.extend(request, ROOM, at_most=True)
        count = received(source, prefill, decode, request, tokens)
        assert count == tokens
        alloc.truncate(request, count)
        assert request.num_tokens == request.received_tokens == tokens
        alloc.check_integrity()
        oracle.assert_holds(dest, request.address())
        alloc.extend(other, 2)  # of the pages that came back
        alloc.extend(request, 7)
        oracle.write(dest, request.address(), range(tokens, tokens + 7))
        assert oracle.holds(dest, request.address())
        exact = alloc.usage().used
        for each in (request, other):
            alloc.free(each)
        for size, got in ((tokens, True), (7, False)):  # as one whose number was known
            if got:
                request, other = alloc.new_request(), alloc.new_request()
            alloc.extend(request, size, received=got)
        alloc.extend(other, 2)
        assert alloc.usage().used == exact


@every
def test_a_prefix_that_is_there_stays_and_what_follows_it_comes(build):
    with receiving(build) as (source, prefill, dest, decode):
        alloc = Allocator(dest)
        request = alloc.new_request()
        alloc.extend(request, 8)
        alloc.extend(request, ROOM - 8, at_most=True)
        coming = RequestAddress(21, request.address().spans)
        oracle.write(dest, coming, range(8), salt=1)
        with pytest.raises(ValueError, match="tokens: 8 to 30, which it has, got 7"):
            alloc.truncate(request, 7)
        alloc.truncate(request, received(source, prefill, decode, request, 21, start=8))
        oracle.assert_holds(dest, request.address(), range(8, 21), kept=range(8))


def test_of_a_window_every_page_that_may_be_alive_is_listed():
    """The window is 6 tokens in pages of 2."""
    alloc = Allocator(swa(**{**MANY, "num_pages": 20}))
    request, exact = alloc.new_request(), alloc.new_request()
    alloc.extend(request, ROOM, received=True, at_most=True)
    alloc.extend(exact, ROOM, received=True)
    spans = [each.address().spans["swa"] for each in (request, exact)]
    assert [(span.first_item, span.ids.size) for span in spans] == [(0, 15), (12, 3)]
    alloc.truncate(request, 21)
    span = request.address().spans["swa"]
    assert (span.first_item, span.ids.size) == (0, 11)
    alloc.extend(request, 1)
    assert request.address().spans["swa"].first_item == 7  # what was dead is given back


@pytest.mark.parametrize("build", [mla, swa, hybrid, dsv4])
def test_until_the_number_is_said_nothing_goes_on_from_it(build):
    pool = build(**MANY)
    alloc = Allocator(pool, prefix=PrefixCache(checkpoint_tokens=8))
    request, other = alloc.new_request(), alloc.new_request()
    alloc.extend(request, 20, at_most=True)
    used = alloc.usage().used
    for call in (
        lambda: alloc.extend(request, 1),
        lambda: alloc.extend_batch([other, request], 1),
        lambda: alloc.fork(request, 20),
        lambda: alloc.store(request, range(8)),
        lambda: pool.save(request.address()),
    ):
        with pytest.raises(ValueError, match=r"receives from 0 to 20 tokens, .* Call truncate"):
            call()
    assert alloc.usage().used == used and other.num_tokens == 0
    alloc.truncate(request, 20)  # all came
    alloc.extend(request, 1)
    alloc.check_integrity()


def test_the_number_is_not_said_while_a_room_receives():
    with receiving(swa) as (_, _, dest, decode):
        alloc = Allocator(dest)
        request = alloc.new_request()
        alloc.extend(request, ROOM, at_most=True)
        decode.receive("r", request.address(), at_most=True)
        for tokens in (21, ROOM):
            with pytest.raises(RequestPinned, match="room 'r' receives"):
                alloc.truncate(request, tokens)
        decode.abort("r", "not needed")
        assert decode.wait("r", 10) is KVPoll.Failed
        alloc.free(request)
        assert not any(alloc.usage().used.values())


def test_a_batch_receives_at_most_so_many_each_and_each_number_is_said():
    alloc = Allocator(dsv4(**MANY))
    requests = [alloc.new_request() for _ in range(3)]
    alloc.extend_batch(requests, [5, 9, 12], at_most=True)
    alloc.truncate_batch(requests, [5, 0, 7])
    assert [each.num_tokens for each in requests] == [5, 0, 7]
    alloc.extend_batch(requests, 3)
    alloc.check_integrity()
