"""A request that a room offers or receives is pinned: what would change its bytes raises."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from disagg import KVPoll, PrefillEndpoint
from disagg.engines.base import TransferError, create_engine
from kvpool import Allocator, OutOfPages, RequestAddress, RequestPinned
from tests import oracle
from tests.disagg.runtime.sides import connected, succeeds
from tests.pools import dsv4, hybrid, mla, swa

PAGE, STRANGER = 16, 7
TOKENS = 80
SIZES = {"page_size": PAGE, "num_pages": 24, "num_window_pages": 16}
windowed = swa.but(**SIZES, window=32, window_page_size=PAGE)
slotted = hybrid.but(**SIZES)
paged = mla.but(**SIZES)
ringed = dsv4.but(**SIZES, window=32, window_page_size=PAGE)


class Side:
    """A pool and its allocator, beside other requests that reuse what is free."""

    def __init__(self, pool):
        self.pool, self.allocator = pool, Allocator(pool)
        oracle.blank(pool)

    def request(self, tokens=0, *, received=False):
        request = self.allocator.new_request()
        if received:
            self.allocator.extend(request, tokens, received=True)
        else:
            self.compute(request, tokens)
        return request

    def compute(self, request, tokens):
        """`tokens` more tokens, with the values that the oracle has for them."""
        start = request.num_tokens
        self.allocator.extend(request, tokens)
        oracle.write(self.pool, request.address(), range(start, start + tokens))

    def reuse(self):
        """Other requests take all that is free, write to it, and end."""
        strangers = []
        while True:
            strangers.append(self.allocator.new_request())
            try:
                self.allocator.extend(strangers[-1], PAGE)
            except OutOfPages:
                break
            oracle.write(self.pool, strangers[-1].address(), range(PAGE), salt=STRANGER)
        for stranger in strangers:
            self.allocator.free(stranger)


@contextmanager
def pinning(build, dest=None, *, verify=None, **options):
    """Both sides, connected."""
    here, there = Side(build()), Side((dest or build)())
    with connected(here.pool, there.pool, verify=verify, prefill=options) as (prefill, decode):
        yield here, prefill, there, decode


def arrives(there, decode, room, tokens=TOKENS, **options):
    """Receives a room: each byte is prefill's at `send`, and no other byte has changed."""
    request = there.request(tokens, received=True)
    oracle.blank(there.pool)
    decode.receive(room, request.address(), **options)
    succeeds(decode, room)
    oracle.assert_holds(there.pool, request.address())
    return request


@pytest.mark.parametrize(("build", "verify"), [(slotted, None), (ringed, "checksum")])
def test_a_state_that_is_offered_is_not_overwritten_by_the_next_token(build, verify):
    with pinning(build, verify=verify) as (here, prefill, there, decode):
        request = here.request(TOKENS)
        prefill.send("r", request.address())
        with pytest.raises(RequestPinned, match=r"room 'r' offers .* the state in (slot|ring) 1 "):
            here.compute(request, 1)
        arrives(there, decode, "r")
        succeeds(prefill, "r")
        here.compute(request, 1)


def test_a_window_page_that_is_offered_goes_to_no_other_request():
    with pinning(windowed, verify="checksum") as (here, prefill, there, decode):
        request = here.request(TOKENS)
        prefill.send("r", request.address())
        with pytest.raises(RequestPinned, match=r"it would lose items 4 of space swa\. Wait") as no:
            for _ in range(40):
                here.compute(request, 1)
                here.reuse()
        # tokens that leave the pages of positions 48 to 79 alone
        assert request.num_tokens == 96 and "at 97 tokens it would lose" in str(no.value)
        here.reuse()
        arrives(there, decode, "r")


def writers(there, request, saved):
    """What would change a request that is received, or take its pages."""
    allocator = there.allocator
    return [
        lambda: allocator.free(request),
        lambda: allocator.extend(request, 1),
        lambda: allocator.fork(request, request.num_tokens),
        lambda: there.pool.load(request.address(), saved),
        lambda: there.pool.save(request.address()),
    ]


@pytest.mark.parametrize("build", [slotted, ringed])
def test_what_is_received_is_neither_freed_nor_changed_nor_read(build):
    with pinning(build) as (here, prefill, there, decode):
        saved = here.pool.save(here.request(TOKENS).address())
        request = there.request(TOKENS, received=True)
        says = r"room 'r' receives the 80 tokens of this request.*reading\('r'\) is false"
        oracle.blank(there.pool)
        decode.receive("r", request.address())
        for call in writers(there, request, saved):
            with pytest.raises(RequestPinned, match=says):
                call()
        there.reuse()
        oracle.blank(there.pool)
        prefill.send("r", here.request(TOKENS).address())
        succeeds(decode, "r")
        oracle.assert_holds(there.pool, request.address())
        for call in reversed(writers(there, request, saved)[:3]):
            call()


def test_a_request_of_a_failed_room_is_pinned_while_a_read_may_still_write(monkeypatch):
    def fail(*_):
        raise TransferError("injected")

    with pinning(paged) as (here, prefill, there, decode):
        monkeypatch.setattr(decode.engine, "read", fail)
        monkeypatch.setattr(decode.engine, "fence", fail)
        request = there.request(TOKENS, received=True)
        decode.receive("r", request.address())
        prefill.send("r", here.request(TOKENS).address())
        assert decode.wait("r", 20) is KVPoll.Failed
        for call in (
            lambda: there.allocator.free(request),
            lambda: decode.receive("again", request.address()),
        ):
            with pytest.raises(RequestPinned, match=r"room 'r' receives"):
                call()
        monkeypatch.undo()
        decode.close()
        there.allocator.free(request)


def success(prefill, decode, request):
    decode.receive("r", request.address())
    succeeds(prefill, "r")
    succeeds(decode, "r")


def abort(prefill, decode, request):
    prefill.abort("r", "not needed")


def lease_end(prefill, decode, request):
    assert prefill.wait("r", 20) is KVPoll.Failed


def close(prefill, decode, request):
    prefill.close()


def lost(prefill, decode, request):
    decode.receive("r", request.address(), aux=["never"])
    decode.close()
    assert prefill.wait("r", 20) is KVPoll.Failed


@pytest.mark.parametrize("end", [success, abort, lease_end, close, lost])
def test_once_the_room_has_ended_everything_is_allowed_again(end):
    lease = 0.3 if end is lease_end else None
    with pinning(slotted, lease=lease) as (here, prefill, there, decode):
        request = here.request(TOKENS)
        saved = here.pool.save(request.address())
        prefill.send("r", request.address())
        end(prefill, decode, there.request(TOKENS, received=True))
        here.pool.load(request.address(), saved)
        here.compute(request, 1)
        here.allocator.free(request)
        assert request.num_tokens == 0


@pytest.mark.parametrize("build", [paged, windowed, slotted, ringed])
def test_chunked_prefill_goes_on_between_its_chunks(build):
    with pinning(build, verify="checksum") as (here, prefill, there, decode):
        request, total = here.request(), 176
        for start in range(0, total, 24):
            here.compute(request, min(24, total - start))
            prefill.send("r", request.address(), last=request.num_tokens == total)
            with pytest.raises(RequestPinned, match="free would give up"):
                here.allocator.free(request)
            here.reuse()
        arrives(there, decode, "r", total)
        succeeds(prefill, "r")
        here.allocator.free(request)


def test_a_chunk_that_is_refused_leaves_the_pins_as_they_were():
    with pinning(slotted) as (here, prefill, _, _):
        request = here.request(TOKENS)
        with pytest.raises(ValueError, match="the next chunk starts there"):
            prefill.send("r", request.address(), tokens=range(8, TOKENS))
        here.compute(request, 1)
        prefill.send("r", request.address(), tokens=range(8), last=False)
        with pytest.raises(ValueError, match="the next chunk starts there"):
            prefill.send("r", request.address(), tokens=range(16, TOKENS + 1))
        here.compute(request, 1)
        with pytest.raises(RequestPinned, match="free would give up"):
            here.allocator.free(request)


def test_a_room_of_the_same_name_is_another_room():
    with pinning(slotted) as (here, prefill, there, decode):
        first, second = here.request(TOKENS), here.request(TOKENS)
        prefill.send("r", first.address())
        arrives(there, decode, "r")
        succeeds(prefill, "r")
        prefill.forget("r")
        decode.forget("r")
        prefill.send("r", second.address())
        here.compute(first, 1)
        here.allocator.free(first)
        with pytest.raises(RequestPinned, match="room 'r' offers"):
            here.allocator.free(second)


@pytest.mark.parametrize("build", [slotted, windowed])
def test_a_block_table_that_is_no_longer_the_requests_is_refused(build):
    with pinning(build) as (here, prefill, _, _):
        request = here.request(TOKENS)
        old = request.address()
        here.compute(request, PAGE)
        here.compute(request, 1)
        here.reuse()
        with pytest.raises(ValueError, match=r"of 80 tokens, .* 97 now and has lost .* again"):
            prefill.send("r", old)
        prefill.send("r", request.address())
        prefill.abort("r", "next")
        here.allocator.free(request)
        here.allocator.new_request()  # in its row
        with pytest.raises(ValueError, match="this request was freed"):
            prefill.send("s", old)


def test_two_rooms_do_not_receive_one_request():
    with pinning(paged) as (_, _, there, decode):
        request = there.request(TOKENS, received=True)
        decode.receive("r", request.address())
        with pytest.raises(RequestPinned, match="room 's' would write to the same items"):
            decode.receive("s", request.address())
        with pytest.raises(ValueError, match="room 'r' exists already"):
            decode.receive("r", request.address())
        with pytest.raises(RequestPinned, match="room 'r' receives"):
            there.allocator.free(request)
        decode.abort("r", "another prefill does it")
        decode.receive("s", request.address())


def test_pages_that_requests_share_are_not_received():
    with pinning(paged) as (here, prefill, there, decode):
        prefix = there.request(40)
        request = there.allocator.fork(prefix, 40)
        there.allocator.extend(request, TOKENS - 40, received=True)
        with pytest.raises(ValueError, match="items 2 of space kv, which 1 other request holds"):
            decode.receive("r", request.address(), start=31)
        decode.receive("r", request.address(), start=32)
        prefill.send("r", here.request(TOKENS).address())
        succeeds(decode, "r")


def test_a_request_is_not_offered_while_it_is_received():
    pool = Side(paged())
    with (
        PrefillEndpoint(pool.pool.layout, create_engine("local")) as relay,
        pinning(paged, lambda: pool.pool) as (_, _, _, decode),
    ):
        request = pool.request(TOKENS, received=True)
        decode.receive("r", request.address())
        with pytest.raises(RequestPinned, match="room 'on' would offer what is not there yet"):
            relay.send("on", request.address())
        decode.abort("r", "it is there by other means")
        relay.send("on", request.address())
        with pytest.raises(RequestPinned, match="room 's' would write to the same items"):
            decode.receive("s", request.address())


def test_a_block_table_that_is_not_a_requests_pins_nothing():
    with pinning(paged) as (here, prefill, there, decode):
        request, wanted = here.request(TOKENS), there.request(TOKENS, received=True)
        prefill.send("r", RequestAddress(TOKENS, request.address().spans))
        here.allocator.free(request)
        decode.receive("r", RequestAddress(TOKENS, wanted.address().spans))
        there.allocator.free(wanted)


def test_what_prefill_frees_between_chunks_is_not_offered_to_a_larger_window():
    with pinning(windowed, windowed.but(window=64)) as (here, prefill, there, decode):
        request, total = here.request(), 176
        for start in range(0, total, 32):
            here.compute(request, min(32, total - start))
            here.reuse()  # among others window pages that no later token reads
            prefill.send("r", request.address(), last=request.num_tokens == total)
        wanted = there.request(total, received=True)
        decode.receive("r", wanted.address())
        if decode.wait("r", 20) is KVPoll.Success:
            oracle.assert_holds(there.pool, wanted.address())
        assert "Give decode a window of at most 32 entries" in str(decode.failure("r"))
