"""No two rooms of one decode write the same item at the same time."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from disagg import KVPoll, RoomError
from disagg.protocol import messages
from disagg.protocol.events import ReadEnded, Received
from disagg.protocol.rooms.block_tables import WrittenItems
from kvpool import Interleave, RequestAddress, Space, Span
from kvpool.item import Cell, Repeat
from tests.disagg.protocol.pair import Pair, pool
from tests.oracle import built, overlaid
from tests.pools import CLASSES


def table(tokens, ids, first_item=0):
    return RequestAddress(tokens, {"kv": Span(ids, first_item)})


def test_a_page_of_another_room_is_refused_by_name_until_that_has_ended_and_is_not_read():
    pair = Pair()
    pair.request("one", table(30, [3, 4]))
    pair.serve(name="one")
    with pytest.raises(RoomError, match=r"'two': item 4 of id list kv is written by room 'one'"):
        pair.request("two", table(30, [4, 5]))
    assert pair.decode.rooms.by_name.keys() == {"one"}
    pair.abort(pair.decode, name="one")
    with pytest.raises(RoomError, match="written by room 'one'"):  # a read may still write
        pair.request("two", table(30, [4, 5]))
    pair.tell(pair.decode, ReadEnded(pair.reads.pop(), None))
    pair.request("two", table(30, [4, 5]))
    pair.request("three", table(30, [1, 3]))


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
    spans = {id_list: Span([3]) for id_list in lists}
    items = WrittenItems(layout)
    items.claim("one", RequestAddress(5, spans), 5)
    for id_list in lists:
        mine = RequestAddress(5, {id_list: Span([3])})
        if id_list in alone:
            with pytest.raises(
                RoomError, match=f"item 3 of id list {id_list} is written by room 'one'"
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


def pooled(cut=1):
    """`cut` pages of tokens, a window's and a slot over one another in blocks of one pool."""
    parts = {
        "kv": [(0, Repeat("entry", 16, Cell("k", 2, "bf16")))],
        "swa": [(1, Repeat("entry", 8, Cell("k", 2, "bf16")))],
        "state": [(2, Cell("state", 9, "f32"))],
    }
    spaces = (
        Space("kv", "paged", 16, reserved=cut, block_pool="blocks", items_per_block=cut),
        Space("swa", entries_per_item=8, window=8, block_pool="blocks"),
        Space("state", "slot", block_pool="blocks"),
    )
    return overlaid(parts, spaces, 20)


def blocks(tokens, **ids):
    return RequestAddress(tokens, {name: Span(listed) for name, listed in ids.items()})


def test_a_block_that_another_room_writes_through_another_space_is_refused():
    pair = Pair(built=pooled())
    pair.request("one", blocks(30, kv=[3, 4], swa=[5, 6, 7, 8], state=[9]))
    says = (
        r"'two': block {} of id list {} \(block pool blocks\) is written by room 'one' through id "
        "list {}, until"
    )
    for wrong, item, name, through in (
        ({"kv": [10, 8]}, 8, "kv", "swa"),
        ({"state": [4]}, 4, "state", "kv"),
        ({"swa": [11, 12, 13, 9]}, 9, "swa", "state"),
    ):
        free = {"kv": [14, 15], "swa": [11, 12, 13, 16], "state": [17]}
        with pytest.raises(RoomError, match=says.format(item, name, through)):
            pair.request("two", blocks(30, **free | wrong))
    pair.request("two", blocks(30, **free))
    pair.abort(pair.decode, name="one")
    pair.request("three", blocks(30, kv=[9, 5], swa=[3, 6, 7, 8], state=[4]))


def test_a_block_of_several_pages_is_one_room_s_and_one_space_s():
    pair = Pair(built=pooled(3))
    pair.request("one", blocks(40, kv=[9, 10, 11], swa=[5, 6, 7, 8, 15], state=[9]))  # kv: block 3
    free = {"kv": [42, 43, 44], "swa": [12, 13, 10, 11, 16], "state": [17]}
    for wrong, block, name, through in (
        ({"state": [3]}, 3, "state", " through id list kv"),
        ({"kv": [27, 28, 29]}, 9, "kv", " through id list state"),
        ({"kv": [26, 42, 43]}, 8, "kv", " through id list swa"),
        ({"kv": [9, 42, 43]}, 3, "kv", ""),
        ({"kv": [42, 43, 11]}, 3, "kv", ""),
    ):
        says = rf"block {block} of id list {name} \(block pool blocks\) .* 'one'{through}, until"
        with pytest.raises(RoomError, match=says):
            pair.request("two", blocks(40, **free | wrong))
    with pytest.raises(RoomError, match=r"spaces kv \(item 52\) and state \(item 17\), but"):
        pair.request("two", blocks(40, **free | {"kv": [42, 43, 52]}))
    pair.request("two", blocks(40, **free))
    pair.abort(pair.decode, name="one")
    pair.request("three", blocks(40, kv=[27, 28, 29], swa=[3, 5, 6, 7, 8], state=[1]))


def test_rooms_share_a_prefix_of_blocks_and_list_the_reserved_one_where_a_window_has_passed():
    pair = Pair(built=pooled())
    pair.request("one", blocks(32, kv=[3, 4], swa=[0, 7, 8, 9], state=[14]), start=16)
    pair.request("two", blocks(32, kv=[3, 5], swa=[0, 11, 12, 13], state=[15]), start=16)


def test_such_a_block_table_of_a_peer_fails_the_room_before_a_byte_is_read():
    pair = Pair(built=pooled())
    pair.ask()
    pair.offer()
    (ready,) = pair.lose(pair.prefill)
    wrong = blocks(30, kv=[3, 4], swa=[5, 6, 7, 8], state=[4])
    pair.tell(pair.decode, Received(0, replace(ready, spans=messages.spans_of(wrong))))
    pair.pump()
    assert pair.polls() == (KVPoll.Failed, KVPoll.Failed) and not pair.reads
    failure = pair.decode.failure("r")
    assert failure.kind == "protocol"
    reason = "block 4 of block pool blocks is listed in spaces kv (item 4) and state (item 4), but"
    assert reason in failure.reason


def test_a_refusal_names_few_items_of_many():
    items = WrittenItems(pool(num_pages=200).layout)
    items.claim("one", table(1600, range(1, 200, 2)), 0)
    with pytest.raises(RoomError, match=r"item 1, 3, .*, 39 and 80 more of id list kv"):
        items.claim("two", table(1600, range(1, 200, 2)), 0)
