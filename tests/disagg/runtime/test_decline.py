"""A decode that has everything already gives prefill's pages back, and reads nothing."""

from __future__ import annotations

import pytest

from disagg import Ended, KVPoll, RoomError
from disagg.protocol.rooms.decode_rooms import MAX_DECLINED
from disagg.protocol.rooms.prefill_rooms import MAX_FAILED_UNSENT
from tests import oracle
from tests.disagg.protocol.pair import Pair
from tests.disagg.stepping import stepped

TOKENS = 40
GOOD = KVPoll.Success


@pytest.fixture
def engine():
    with stepped() as made:
        yield made


def given_of(engine):
    return oracle.filled(engine.pools[0], TOKENS)


@pytest.mark.parametrize("when", ["before", "after", "between two chunks"])
def test_prefills_pages_come_back_without_a_read(engine, when):
    given, memory = given_of(engine), oracle.state(engine.pools[1]).views
    before = {key: view.copy() for key, view in memory.items()}
    if when == "before":
        engine.decode.decline("r")
    elif when == "after":
        engine.prefill.send("r", given, aux={"first": 7})
    else:
        engine.prefill.send("r", given, tokens=range(16), last=False)
    engine.step(5)
    if when == "before":
        engine.prefill.send("r", given)
    else:
        engine.decode.decline("r")
        engine.step(5)
    if when == "between two chunks":
        assert engine.prefill.poll("r") is KVPoll.Transferring
        engine.prefill.send("r", given, aux={"first": 7})
    assert engine.step_until_ended("r") == [GOOD, GOOD]
    for side in engine.all:
        assert side.ended() == [Ended("r", GOOD, None)]
        assert not any(side.leases().leased.values())
    assert engine.decode.metrics("r").bytes_moved == 0 and not engine.decode.reading("r")
    assert all((memory[key] == view).all() for key, view in before.items())
    if when != "before":
        assert engine.decode.aux("r") == {"first": 7}


def test_a_room_can_be_declined_before_the_prefill_has_answered():
    with stepped(connected=False) as engine:
        link = engine.decode.connect([engine.prefill.address])
        engine.decode.decline("r", link)
        assert engine.decode.poll("r") is KVPoll.Bootstrapping
        engine.prefill.send("r", given_of(engine))
        assert engine.step_until_ended("r") == [GOOD, GOOD]


@pytest.mark.parametrize("declines", [(True, True), (True, False), (False, True)])
def test_each_rank_of_a_decode_declines_or_reads(declines):
    with stepped(ranks=2) as engine:
        given = given_of(engine)
        into = oracle.place(engine.pools[1], TOKENS, 3)
        oracle.blank(engine.pools[1])
        engine.prefill.send("r", given)
        first, second = engine.decodes
        for decode, declined in zip(engine.decodes, declines):
            assert not engine.prefill.poll("r").ended
            if declined:
                decode.decline("r")
            else:
                decode.receive("r", into)
            engine.step_until_ended("r", decode)
        assert engine.step_until_ended("r") == [GOOD] * 3
        if not all(declines):
            oracle.assert_holds(engine.pools[1], into)
        moved = [each.metrics("r").bytes_moved > 0 for each in (first, second)]
        assert moved == [not declined for declined in declines]


def test_declining_again_changes_nothing(engine):
    for _ in range(2):
        engine.decode.decline("r")
        engine.step(3)
    engine.prefill.send("r", given_of(engine))
    engine.step_until_ended("r")
    engine.prefill.forget("r")
    engine.decode.decline("r")
    engine.step(10)
    assert engine.decode.poll("r") is GOOD
    assert "r" not in engine.prefill.machine.rooms.by_name
    assert engine.decode.snapshot().totals.rooms == {"success": 1, "failed": 0}


def test_a_room_that_is_received_is_not_declined_nor_the_other_way_round(engine):
    into = oracle.place(engine.pools[1], TOKENS, 3)
    engine.decode.receive("r", into)
    with pytest.raises(RoomError, match="'r' exists already"):
        engine.decode.decline("r")
    engine.decode.decline("other")
    with pytest.raises(RoomError, match="'other' exists already"):
        engine.decode.receive("other", into)
    engine.decode.abort("other", "no.")
    engine.decode.forget("other")
    engine.decode.receive("other", oracle.elsewhere(engine.pools[1], into))


def test_digests_are_not_compared_of_what_was_not_read():
    with stepped(decode_verify="checksum") as engine:
        engine.prefill.send("r", given_of(engine))
        engine.decode.decline("r")
        assert engine.step_until_ended("r") == [GOOD, GOOD]


def test_a_declined_room_that_fails_on_prefill_fails_with_its_reason(engine):
    engine.decode.decline("r")
    engine.step(5)
    engine.prefill.abort("r", "the user went away.")
    engine.step_until_ended("r")
    ((_, state, failure),) = engine.decode.ended()
    assert (state, failure.reason) == (KVPoll.Failed, "the user went away.")


def test_a_declined_room_for_which_nothing_comes_ends_within_its_bound():
    pair = Pair(offer_timeout=5.0)
    pair.decline()
    pair.pump()
    pair.wait(5.5)
    assert pair.polls() == (KVPoll.Failed, KVPoll.Failed)


def test_decode_keeps_the_latest_declined_rooms_only():
    pair = Pair()
    for name in range(MAX_DECLINED + 20):
        pair.decline(name)
        pair.offer(name=name)
        pair.pump()
        assert pair.polls(name) == (GOOD, GOOD)
        pair.forget(pair.prefill, name=name)
    assert [*pair.decode.rooms.by_name] == [*range(20, MAX_DECLINED + 20)]
    assert len(pair.decode.ended.take_ended()) == MAX_DECLINED <= MAX_FAILED_UNSENT
    assert not pair.prefill.rooms.by_name


def test_a_declined_room_that_was_forgotten_leaves_its_name_to_the_next():
    pair = Pair()
    pair.decline("r")
    pair.offer()
    pair.pump()
    pair.forget(pair.decode, pair.prefill)
    pair.request("r")
    for name in range(MAX_DECLINED + 1):
        pair.decline(name)
        pair.offer(name=name)
        pair.pump()
    assert "r" in pair.decode.rooms.by_name and not pair.decode.poll("r").ended
