"""One list a step of the rooms that have ended, instead of a question for every room."""

from __future__ import annotations

import pytest

from disagg import DecodeEndpoint, KVPoll, create_engine
from disagg.protocol.rooms.prefill_rooms import MAX_FAILED_UNSENT
from disagg.runtime.transport import MemoryNetwork, MemoryTransport
from kvpool import MLAPool
from tests import oracle
from tests.disagg.protocol.pair import Pair
from tests.disagg.stepping import MLA, stepped

TOKENS = 40


@pytest.fixture
def engine():
    with stepped() as made:
        yield made


def tables(engine, seed=0):
    source, dest = engine.pools
    return oracle.place(source, TOKENS, seed), oracle.place(dest, TOKENS, seed + 1)


def test_a_room_that_is_aborted_is_in_the_list_with_the_reason(engine):
    given, into = tables(engine)
    engine.decode.receive("r", into)
    engine.prefill.send("other", given)
    engine.step(3)
    engine.prefill.abort("other", "the user went away.")
    engine.decode.abort("r", "no room.")
    (own,) = engine.prefill.ended()
    assert own == ("other", KVPoll.Failed, engine.prefill.failure("other"))
    assert (own.failure.kind, own.failure.reason) == ("abort", "the user went away.")
    (asked,) = engine.decode.ended()
    assert (asked.room, asked.state, asked.failure.reason) == ("r", KVPoll.Failed, "no room.")
    engine.step_until(lambda: engine.prefill.poll("r").ended)
    (told,) = engine.prefill.ended()  # a decode has asked for it, and nothing was sent
    assert (told.room, told.failure.side, told.failure.reason) == ("r", "decode", "no room.")


def test_a_failed_room_is_in_decodes_list_once_no_read_may_write_to_it():
    pair = Pair()
    pair.request()
    pair.offer()
    pair.pump()
    pair.abort(pair.decode)
    assert pair.decode.poll("r") is KVPoll.Failed and pair.decode.room("r").reading
    assert pair.decode.ended.take() == []
    pair.read()
    ((room, state, failure),) = pair.decode.ended.take()
    assert (room, state, failure.reason) == ("r", KVPoll.Failed, "gave up")
    assert not pair.decode.room("r").reading and pair.decode.ended.take() == []


def test_rooms_come_in_the_order_in_which_they_ended(engine):
    for room in range(5):
        engine.prefill.send(room, oracle.place(engine.pools[0], 16, room))
    for room in (3, 0, 4, 1, 2):
        engine.prefill.abort(room, "no.")
    assert [each.room for each in engine.prefill.ended()] == [3, 0, 4, 1, 2]


def test_a_room_that_is_forgotten_is_in_no_list_and_its_name_can_end_again(engine):
    _, into = tables(engine)
    engine.decode.receive("r", into)
    engine.decode.abort("r", "first.")
    engine.decode.forget("r")
    assert engine.decode.ended() == []
    engine.decode.receive("r", into)
    engine.decode.abort("r", "second.")
    assert [str(each.failure) for each in engine.decode.ended()] == ["decode: second."]


def test_a_room_that_failed_before_it_was_sent_is_in_the_list_again_once_it_is(engine):
    """Who tracks rooms from `send` on would otherwise wait for it for ever."""
    given, into = tables(engine)
    engine.decode.receive("r", into)
    engine.step(3)
    engine.decode.abort("r", "gave up.")
    engine.step_until(lambda: engine.prefill.poll("r").ended)
    assert [each.room for each in engine.prefill.ended()] == ["r"]
    engine.prefill.send("r", given)
    assert [each.failure.reason for each in engine.prefill.ended()] == ["gave up."]
    assert engine.prefill.ended() == []


def test_what_is_kept_for_who_never_asks_is_what_rooms_are_kept():
    pair = Pair()
    for name in range(MAX_FAILED_UNSENT + 50):  # decode asks, and gives up
        pair.request(name)
        pair.pump()
        pair.abort(pair.decode, name=name)
        pair.pump()
        pair.forget(pair.decode, name=name)
    assert pair.decode.ended.take() == []
    assert [each.room for each in pair.prefill.ended.take()] == [*pair.prefill.rooms()]
    assert len(pair.prefill.rooms()) == MAX_FAILED_UNSENT


def test_what_ends_with_the_endpoint_is_in_the_list_after_close():
    pool = MLAPool(layers=range(2), **MLA)
    options = {"transport": MemoryTransport(MemoryNetwork()), "threaded": False}
    decode = DecodeEndpoint(pool.layout, create_engine("local"), **options)
    link = decode.connect(["nobody"])
    decode.receive("r", oracle.place(pool, 20), link=link)
    decode.close()
    assert [(each.room, each.state) for each in decode.ended()] == [("r", KVPoll.Failed)]
