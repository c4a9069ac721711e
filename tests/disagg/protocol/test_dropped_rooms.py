"""A room that fails on decode before prefill was asked for it gives prefill's pages back."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from disagg import KVPoll
from disagg.protocol import messages
from disagg.protocol.decode import DecodeMachine
from disagg.protocol.events import ConnectLink, Received
from disagg.protocol.peers.link import Link
from disagg.protocol.prefill import PrefillMachine
from tests import oracle
from tests.disagg.protocol.pair import Pair, hello, pool

FAILED = KVPoll.Failed


def misfit(pair, **changes):
    """The pair with a new decode that has another layout, or says another hello."""
    layout = pool(layers=(5,), total_kv_layers=6).layout
    greeting = replace(hello("d", layout), **changes)
    pair.decode = DecodeMachine(greeting, layout, 1, now=pair.now)
    pair.queues[pair.decode] = []
    pair.link = Link(("y",))
    return pair


@pytest.mark.parametrize("changes", [{}, {"engine": "nixl"}, {"protocol": 1}])
@pytest.mark.parametrize("when", ["before the hello", "after it"])
def test_a_refusal_of_either_side_ends_prefills_room(changes, when):
    """{}: decode refuses the plan. Else prefill refuses the hello."""
    pair = misfit(Pair(), **changes)
    pair.offer()
    pair.tell(pair.decode, ConnectLink(pair.link))
    if when == "after it":
        pair.pump()
        assert pair.prefill.poll("r") is KVPoll.Bootstrapping
    pair.ask()
    assert pair.polls() == (FAILED, FAILED)
    assert not pair.prefill.leases().leased
    why = pair.prefill.failure("r")
    assert (why.side, why.kind) == ("decode", "abort")
    assert why.reason == " ".join(pair.decode.failure("r").reason.split())


def test_prefill_learns_of_it_also_where_it_has_not_sent_yet():
    pair = misfit(Pair())
    pair.tell(pair.decode, ConnectLink(pair.link))
    pair.ask()
    pair.prefill.ended.take()
    pair.offer()
    assert [room.room for room in pair.prefill.ended.take()] == ["r"]
    assert not pair.prefill.leases().leased


def test_a_room_that_is_aborted_before_prefill_has_answered_is_ended_there():
    pair = Pair()
    pair.offer()
    pair.link = Link(("y",))
    pair.tell(pair.decode, ConnectLink(pair.link))
    pair.request()
    pair.abort(pair.decode)
    pair.pump()
    assert pair.polls() == (FAILED, FAILED)
    assert pair.prefill.failure("r").reason == "gave up"


def test_who_is_no_reader_ends_no_room_that_its_readers_have_asked_for():
    pair = Pair()
    pair.offer()
    pair.ask()
    pair.tell(pair.prefill, Received(b"stranger", messages.DropRoom("r", "no")))
    pair.finish()
    assert pair.polls() == (KVPoll.Success, KVPoll.Success)


def test_rooms_that_nobody_sends_are_kept_in_bounds(monkeypatch):
    monkeypatch.setattr("disagg.protocol.rooms.prefill_rooms.MAX_FAILED_UNSENT", 3)
    prefill = PrefillMachine(hello("p"), pool().layout, now=0.0)
    for number in range(10):
        prefill.handle(Received(b"d", messages.DropRoom(number, "no")), 0.0)
    assert not prefill.open_rooms()
    assert len(prefill.rooms()) == 3


def test_every_rank_of_a_prefill_is_told():
    """Rank 0 has another model, rank 1 has not answered."""
    decode = DecodeMachine(hello("d"), pool().layout, 1, now=0.0)
    link = Link(("x", "y"))
    decode.handle(ConnectLink(link), 0.0)
    pair = Pair()
    pair.decode, pair.link, pair.queues[decode] = decode, link, []
    pair.request(table=oracle.place(pool(), 30))
    pair.tell(decode, Received(0, replace(hello("p"), engine="nixl")))
    told = [message for message in pair.lose(decode) if isinstance(message, messages.DropRoom)]
    assert [message.room for message in told] == ["r", "r"]
