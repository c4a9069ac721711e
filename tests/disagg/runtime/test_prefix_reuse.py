"""A hand-off between sides that reuse prefixes: prefill computes, and decode asks for, what is not
there.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from kvpool import Allocator, PrefixCache, RequestPinned
from tests import oracle
from tests.disagg.runtime.sides import connected, succeeds
from tests.pools import dsv4, hybrid, mla, swa

PAGE = 16
SIZES = {"page_size": PAGE, "num_pages": 40, "num_window_pages": 40}
POOLS = {
    "full": mla.but(**SIZES),
    "window": swa.but(**SIZES, window=24, window_page_size=PAGE),
    "linear": hybrid.but(**SIZES),
    "rings": dsv4.but(**SIZES, window=24, window_page_size=PAGE),
}
PROMPT = np.random.default_rng(0).integers(0, 1 << 17, 5 * PAGE)
FOLLOWED = np.concatenate([PROMPT, np.random.default_rng(1).integers(0, 1 << 17, PAGE + 5)])


class Side:
    def __init__(self, pool):
        self.pool = pool
        self.allocator = Allocator(pool, prefix=PrefixCache(checkpoint_tokens=PAGE))
        oracle.blank(pool)


@contextmanager
def reusing(build):
    here, there = Side(build()), Side(build())
    with connected(here.pool, there.pool, verify="checksum") as (prefill, decode):
        yield here, prefill, there, decode


def computed(side, tokens):
    """A request of these tokens in chunks of a page, with the oracle's values, and with how many
    it began.
    """
    request = side.allocator.new_request(tokens[:-1])
    found = request.num_tokens
    while (start := request.num_tokens) < tokens.size:
        more = min(PAGE, tokens.size - start)
        side.allocator.extend(request, more)
        oracle.write(side.pool, request.address(), range(start, start + more))
        side.allocator.store(request, tokens[start : start + more])
    return request, found


def hand_over(here, prefill, there, decode, room, tokens):
    """Both ends' requests, and with how many tokens each began."""
    source, computed_from = computed(here, tokens)
    prefill.send(room, source.address())
    dest = there.allocator.new_request(tokens)
    start = dest.num_tokens
    there.allocator.extend(dest, tokens.size - start, received=True)
    decode.receive(room, dest.address(), start=start)
    with pytest.raises(RequestPinned, match="others would reuse what is not there yet"):
        there.allocator.store(dest, tokens[start:])
    succeeds(decode, room)
    there.allocator.store(dest, tokens[start:])
    assert oracle.holds(there.pool, dest.address())
    return source, dest, computed_from, start


@pytest.mark.parametrize("kind", POOLS)
def test_both_ends_begin_with_what_they_have(kind):
    with reusing(POOLS[kind]) as (here, prefill, there, decode):
        source, dest, *began = hand_over(here, prefill, there, decode, 1, PROMPT)
        assert began == [0, 0]
        prefill.wait(1, 20)
        here.allocator.free(source)
        there.allocator.free(dest)
        source, dest, *began = hand_over(here, prefill, there, decode, 2, FOLLOWED)
        # of the window, decode has received what was alive at the end: whole pages of it
        assert began == [PROMPT.size, 0 if kind in ("window", "rings") else PROMPT.size]
        for side in (here, there):
            side.allocator.check_integrity()


def test_decode_reads_only_what_it_lacks():
    with reusing(POOLS["full"]) as (here, prefill, there, decode):
        hand_over(here, prefill, there, decode, 1, PROMPT)
        hand_over(here, prefill, there, decode, 2, FOLLOWED)
        first, second = (decode.metrics(room).bytes_moved for room in (1, 2))
        assert second * PROMPT.size == first * (FOLLOWED.size - PROMPT.size)


def test_pages_that_are_kept_for_others_cannot_be_received_again():
    with reusing(POOLS["full"]) as (here, prefill, there, decode):
        _, dest, *_ = hand_over(here, prefill, there, decode, 1, PROMPT)
        there.allocator.free(dest)
        again = there.allocator.new_request(PROMPT)
        with pytest.raises(ValueError, match=r"the prefix cache keeps\. Begin at position"):
            decode.receive(2, again.address(), start=0)
