"""Block tables that cannot be right are refused where they are given, on either side, with the
room, the space, the id and what would be right.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from disagg import KVPoll
from disagg.protocol.codec import decode as read_message, encode
from disagg.protocol.messages import ChunkReady, spans_of
from disagg.runtime.socket_transport import SocketTransport
from kvpool.layout import RequestAddress, Span
from tests.disagg.runtime.sides import connected, moves, succeeds
from tests.oracle import SOURCE, blank, elsewhere, merged, place, write
from tests.pools import hybrid, mha, mla, swa

TOKENS = 30
MORE = {"num_pages": 40, "num_window_pages": 40}
SLOTS, WINDOW = hybrid.but(**MORE), swa.but(**MORE)
"""Pages of 4 tokens and slots; pages of 4, and of 2 with a window of 6."""


def table(pool, tokens=TOKENS, **ids):
    """A block table of which some lists are others; None leaves a list out."""
    spans = {name: span for name, span in place(pool, tokens).spans.items() if name not in ids}
    spans |= {name: Span(given) for name, given in ids.items() if given is not None}
    return RequestAddress(tokens, spans)


def written(source, dest, there):
    """The table of a request that the source holds; the destination is blank."""
    blank(source, SOURCE)
    blank(dest)
    write(source, there, range(TOKENS))
    return there


WRONG = {
    "too few pages": (
        SLOTS,
        {"kv": [3, 4, 5]},
        "space kv needs items for positions 0 to 31, its block table covers 0 to 11. List",
    ),
    "the reserved page": (
        SLOTS,
        {"kv": range(8)},
        "item 0 of space kv lies outside 1 to 39. Items below 1 are",
    ),
    "a page beyond the pool": (
        SLOTS,
        {"kv": [3, 4, 5, 40, 6, 7, 8, 9]},
        "item 40 of space kv lies outside 1 to 39.",
    ),
    "the reserved slot": (SLOTS, {"state": [0]}, "item 0 of space state lies outside 1 to 4."),
    "a slot beyond the pool": (SLOTS, {"state": [5]}, "item 5 of space state lies outside 1 to 4."),
    "no slot": (SLOTS, {"state": []}, "space state needs items for positions 0 to 0, its block"),
    "no list of pages": (SLOTS, {"kv": None}, "its block table has no ids for space 'kv'."),
    "no list of slots": (SLOTS, {"state": None}, "its block table has no ids for space 'state'."),
    "a live page of a window": (
        WINDOW,
        {"swa": [*range(20, 32), 0, 33, 34]},
        "item 0 of space swa lies outside 1 to 39.",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("side", ["send", "receive"])
def test_a_block_table_that_cannot_be_right_is_refused_by_name_and_leaves_nothing(side, case):
    build, ids, reason = WRONG[case]
    source, dest = build(), build()
    with connected(source, dest) as (prefill, decode):
        endpoint = prefill if side == "send" else decode
        with pytest.raises(ValueError, match="room 'bad': ") as refused:
            getattr(endpoint, side)("bad", table(source, **ids))
        assert reason in str(refused.value)
        assert "bad" not in endpoint.machine.rooms.by_name
        assert not any(endpoint.leases().leased.values())
        there = written(source, dest, place(source, TOKENS, 1))
        moves(prefill, there, decode, dest, place(dest, TOKENS, 2), "good")


def test_pages_that_a_window_has_passed_may_be_any():
    source, dest = WINDOW(), WINDOW()
    ids = [0, 99, *range(5, 18)]  # of 30 tokens the last 6 are alive: pages 12 to 14
    with connected(source, dest) as (prefill, decode):
        there = written(source, dest, table(source, swa=ids))
        moves(prefill, there, decode, dest, place(dest, TOKENS))


def test_a_chunk_needs_its_own_pages_and_a_prefix_of_decode_none():
    source, dest = mha(**MORE), mha(**MORE)
    here = place(dest, TOKENS)
    with connected(source, dest) as (prefill, decode):
        prefill.send("r", table(source, 16, kv=[3, 4, 5, 6]), last=False)
        with pytest.raises(ValueError, match="needs items for positions 16 to 23, its block table"):
            prefill.send("r", table(source, 24, kv=[3, 4, 5, 6]), last=False)
        prefill.send("r", table(source, TOKENS, kv=[0, 99, *range(5, 11)]))
        kept = RequestAddress(TOKENS, {"kv": Span(here.spans["kv"].ids[4:], first_item=4)})
        with pytest.raises(ValueError, match="needs items for positions 12 to 31, its block table"):
            decode.receive("r", kept, start=15)
        decode.receive("r", kept, start=16)
        succeeds(decode, "r")


def test_the_list_of_a_draft_that_prefill_may_lack_may_be_left_out():
    source, target = mla(**MORE), mla(**MORE)
    slots = hybrid.arguments["linear"]
    draft = SLOTS(owner="draft", layers=[4], total_kv_layers=5, linear=slots, linear_layers=[4])
    dest = merged(target, draft)
    whole = place(dest, TOKENS)
    some = RequestAddress(TOKENS, {"kv": whole.spans["kv"]})
    assert whole.spans.keys() > some.spans.keys()
    with connected(dest, dest) as (_, decode), pytest.raises(ValueError, match="no ids for space"):
        decode.receive("r", some)
    with connected(source, dest, allow_missing={"draft"}) as (prefill, decode):
        decode.receive("r", some)
        prefill.send("r", place(source, TOKENS))
        succeeds(decode, "r")


class Lying(SocketTransport):
    """Of room `bad` it sends block tables that prefill was not given."""

    def send(self, peer, data):
        message = read_message(data)
        if isinstance(message, ChunkReady) and message.room == "bad":
            wrong = RequestAddress(TOKENS, {"kv": Span([3, 4, 5, 6, 7, 8, 9, 40])})
            data = encode(replace(message, spans=spans_of(wrong)))
        return super().send(peer, data)


def test_an_id_outside_prefills_pool_that_a_peer_sends_fails_that_room_and_no_other():
    source, dest, transport = mha(**MORE), mha(**MORE), Lying()
    with connected(source, dest, prefill={"transport": transport}) as (prefill, decode):
        here, there = place(dest, TOKENS), place(source, TOKENS)
        decode.receive("bad", here)
        prefill.send("bad", there)
        assert decode.wait("bad", 10) is KVPoll.Failed
        assert "item 40 of space kv lies outside 1 to 39" in str(decode.failure("bad"))
        assert not decode.reading("bad")
        written(source, dest, there)
        moves(prefill, there, decode, dest, elsewhere(dest, here), "good")
    transport.close()
