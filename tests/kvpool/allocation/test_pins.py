"""What pins refuse, word by word, and that a refusal changes nothing."""

from __future__ import annotations

from itertools import count

import pytest

from kvpool import Allocator, PoolLayout, RequestAddress, RequestPinned
from kvpool.layout import Pin
from tests.kvpool.allocation.test_allocator import refused, started
from tests.pools import dsv4, hybrid, mla

NAMES = count()


class Room:
    """A room that has taken a request, until it is `ended`."""

    def __init__(self, request, side="offered", *, layout=None, last=True, address=None):
        self.name, self.ended = f"room {next(NAMES)}", False
        address, layout = address or request.address(), layout or request._allocator.layout
        self.pin = Pin(self.name, side, address, layout, last, lambda: not self.ended)
        request.pin(self.pin)


@pytest.mark.parametrize(
    ("build", "item"), [(hybrid, "slot 1 of space state"), (dsv4, r"ring 1 of space c2\.ring")]
)
@pytest.mark.parametrize("side", ["offered", "received"])
def test_the_next_token_of_a_pinned_state_is_refused_by_slot(build, item, side):
    alloc, request = started(build(), 7)
    room = Room(request, side)
    with pytest.raises(RequestPinned, match=rf"at 8 tokens .* lose the state in {item}\. Wait"):
        alloc.extend(request, 1)
    alloc.extend(request, 0)
    room.ended = True
    alloc.extend(request, 1)


@pytest.mark.parametrize("side", ["offered", "received"])
def test_a_pinned_request_is_not_freed_and_its_items_are_named(side):
    alloc, request = started(hybrid(), 9)
    room = Room(request, side)
    says = "free would give up items 1-3 of space kv, items 1 of space state"
    with refused(alloc, RequestPinned, says):
        alloc.free(request)
    room.ended = True
    alloc.free(request)
    alloc.check_integrity()


def test_an_offered_request_is_saved_and_not_loaded():
    pool = mla()
    _, request = started(pool, 9)
    Room(request)
    saved = pool.save(request.address())
    with pytest.raises(RequestPinned, match="load would write to the same items"):
        pool.load(request.address(), saved)
    pool.load(RequestAddress(9, request.address().spans), saved)  # nobody's block table


def test_a_pin_is_of_the_memory_that_its_endpoint_has():
    target, draft = mla(), hybrid(owner="draft", layers=[0, 3], own_spaces=True)
    alloc = Allocator(target, draft)
    request = alloc.new_request()
    alloc.extend(request, 9)
    Room(request, "received", layout=target.layout)
    alloc.extend(request, 1)
    room = Room(request, "received", layout=draft.layout)
    with pytest.raises(RequestPinned, match="would write to the same items"):
        Room(request, "received", layout=PoolLayout.merge(target.layout, draft.layout))
    with pytest.raises(RequestPinned, match=r"the state in slot 1 of space draft\.state"):
        alloc.extend(request, 1)
    room.ended = True
    alloc.extend(request, 1)


@pytest.mark.parametrize("side", ["offered", "received"])
@pytest.mark.parametrize("last", [True, False])
def test_tokens_of_a_room_cannot_be_taken_back_and_later_ones_can(side, last):
    alloc, request = started(mla(), 9)
    Room(request, side, last=last)
    alloc.extend(request, 4)
    alloc.truncate(request, 10)
    alloc.truncate(request, 9)
    said = "at 8 tokens it would lose 8 to 8"
    with pytest.raises(RequestPinned, match=said):
        alloc.truncate(request, 8)
    other = alloc.new_request()
    alloc.extend(other, 4)
    with pytest.raises(RequestPinned, match=said):
        alloc.truncate_batch([other, request], [2, 8])
    assert (other.num_tokens, request.num_tokens) == (4, 9)
    alloc.check_integrity()


def test_a_page_that_a_room_reads_is_not_replaced_by_a_copy():
    alloc, request = started(mla(), 5)
    Room(request)
    alloc.extend(request, 3)
    alloc.fork(request, 8)
    with pytest.raises(RequestPinned, match="at 6 tokens its last item would be another"):
        alloc.truncate(request, 6)


def test_a_block_table_from_before_a_truncation_is_refused():
    alloc, request = started(mla(), 9)
    old = request.address()
    alloc.truncate(request, 4)
    with pytest.raises(ValueError, match=r"of 9 tokens, .* lost the last 5 tokens.* again"):
        Room(request, address=old)
    alloc.extend(alloc.new_request(), 4)  # takes page 2
    alloc.extend(request, 8)
    with pytest.raises(ValueError, match=r"lost items 2-3 of space kv\. .* again"):
        Room(request, address=old)
    Room(request)
