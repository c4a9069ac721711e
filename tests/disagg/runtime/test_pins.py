"""A request that is offered or received is pinned: what would change its bytes raises."""

from __future__ import annotations

from contextlib import contextmanager

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.engines.base import create_engine
from kvpool import Allocator, OutOfPages
from tests import oracle
from tests.pools import swa

PAGE, STRANGER = 16, 7
SIZES = {"page_size": PAGE, "window_page_size": PAGE, "num_pages": 40, "num_slots": 8}
windowed = swa.but(**SIZES, num_window_pages=16, window=32)


class Side:
    """A pool and its allocator, beside other requests that reuse what is free."""

    def __init__(self, pool):
        self.pool, self.allocator = pool, Allocator(pool)
        oracle.blank(pool)

    def request(self, tokens=0, *, received=False):
        request = self.allocator.new_request()
        self.allocator.extend(request, tokens, received=received)
        if not received:
            oracle.write(self.pool, request.address(), range(tokens))
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
def connected(build, dest=None, *, verify=None, **options):
    """Both sides, connected over engine local."""
    here, there = Side(build()), Side((dest or build)())
    with (
        PrefillEndpoint(here.pool.layout, create_engine("local"), **options) as prefill,
        DecodeEndpoint(there.pool.layout, create_engine("local"), verify=verify) as decode,
    ):
        decode.connect([prefill.address], timeout=30)
        yield here, prefill, there, decode


def test_what_prefill_frees_between_chunks_is_not_offered_to_a_larger_window():
    with connected(windowed, windowed.but(window=64)) as (here, prefill, there, decode):
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
