"""No two rooms of one decode write the same item at the same time."""

from __future__ import annotations

import pytest

from disagg import RoomError
from disagg.protocol.events import ReadEnded
from disagg.protocol.written_items import WrittenItems
from kvpool import Interleave, RequestAddress, Space, Span
from kvpool.item import Cell, Repeat
from tests.disagg.protocol.pair import Pair, pool
from tests.oracle import built
from tests.pools import CLASSES


def table(tokens, ids, first_item=0):
    return RequestAddress(tokens, {"kv": Span(ids, first_item)})


def test_a_page_of_another_room_is_refused_by_name_until_that_has_ended_and_is_not_read():
    pair = Pair()
    pair.request("one", table(30, [3, 4]))
    pair.offer(name="one")
    pair.pump()
    with pytest.raises(RoomError, match=r"'two': item 4 of id list kv is written by room 'one'"):
        pair.request("two", table(30, [4, 5]))
    pair.abort(pair.decode, name="one")
    with pytest.raises(RoomError, match="written by room 'one'"):  # a read may still write
        pair.request("two", table(30, [4, 5]))
    pair.tell(pair.decode, ReadEnded(pair.reads.pop(), None))
    pair.request("two", table(30, [4, 5]))
    pair.request("three", table(30, [1, 3]))


def test_a_refused_room_leaves_nothing_behind():
    pair = Pair()
    pair.request("one", table(30, [3, 4]))
    with pytest.raises(RoomError):
        pair.request("two", table(48, [1, 2, 3]))
    assert pair.decode.rooms().keys() == {"one"}
    pair.request("three", table(30, [1, 2]))


def test_pages_of_a_prefix_that_decode_holds_are_shared():
    pair = Pair()
    pair.request("one", table(40, [1, 2, 3]), start=32)
    pair.request("two", table(40, [1, 2, 4]), start=32)
    pair.request("three", table(40, [1, 6, 7]), start=31)
    with pytest.raises(RoomError, match="item 6 of"):  # position 31 is in its second page
        pair.request("four", table(40, [1, 6, 5]), start=31)
    pair.request("whole", table(40, [1, 2, 8]), start=40)  # nothing of it is written


def test_a_window_s_pages_are_counted_from_the_first_that_is_there():
    pair = Pair()
    pair.request("one", table(64, [5, 6], first_item=2), start=48)  # item 3 is page 6
    pair.request("two", table(30, [5, 1]))
    with pytest.raises(RoomError, match="item 6 of"):
        pair.request("three", table(30, [6, 2]))


@pytest.mark.parametrize("name", CLASSES)
def test_slots_and_rings_are_written_whole_whatever_start_is(name):
    layout = CLASSES[name](num_pages=20, num_window_pages=40, device="meta").layout
    lists = {space.id_list for space in layout.spaces}
    alone = {space.id_list for space in layout.spaces if space.per_request}
    spans = {each: Span([3]) for each in lists}
    items = WrittenItems(layout)
    items.claim("one", RequestAddress(5, spans), 5)
    for each in lists:
        mine = RequestAddress(5, {each: Span([3])})
        if each in alone:
            with pytest.raises(
                RoomError, match=f"item 3 of id list {each} is written by room 'one'"
            ):
                items.claim("two", mine, 5)
        else:
            items.claim("two", mine, 5)
            items.release("two")
    items.release("one")
    items.claim("two", RequestAddress(5, spans), 0)


def test_pages_before_start_are_counted_as_the_rank_holds_them():
    """Rank 1 of 2, stretches of 4: 32 positions are two of its pages of 8."""
    page = Repeat("entry", 8, Cell("latent", 2, "bf16"))
    spaces = [Space("kv", "paged", 8, interleave=Interleave(4, 1, 2))]
    items = WrittenItems(built([(0, "kv", 12, page)], spaces).layout)
    items.claim("one", table(40, [1, 2, 3]), 32)
    items.claim("two", table(40, [1, 2, 4]), 32)
    items.claim("three", table(40, [1, 6, 7]), 28)  # positions 28 to 31 are in its second page
    with pytest.raises(RoomError, match="item 6 of"):
        items.claim("four", table(40, [1, 6, 8]), 28)
    items.claim("five", table(40, [5, 6, 9]), 32)


def test_ids_that_no_buffer_has_are_left_to_the_read_which_refuses_them():
    items = WrittenItems(pool().layout)
    for room in ("one", "two"):
        items.claim(room, table(30, [1000 + (room == "two"), 99]), 0)
    for room in ("one", "two"):
        items.release(room)


def test_a_refusal_names_few_items_of_many():
    items = WrittenItems(pool(num_pages=200).layout)
    items.claim("one", table(1600, range(1, 200, 2)), 0)
    with pytest.raises(RoomError, match=r"item 1, 3, .*, 39 and 80 more of id list kv"):
        items.claim("two", table(1600, range(1, 200, 2)), 0)
