"""Rooms that have ended: one list of them a step instead of a question for every room, and callers
that wait: for a room, for any, in an event loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from multiprocessing.connection import wait

import pytest

from disagg import DecodeEndpoint, Ended, KVPoll, Link, UnknownRoom, UsageError, create_engine
from disagg.protocol.rooms.prefill_rooms import MAX_FAILED_UNSENT
from disagg.runtime.transport import MemoryNetwork, MemoryTransport
from kvpool import MLAPool, RequestAddress, Span
from tests import oracle
from tests.disagg.protocol.pair import Pair
from tests.disagg.runtime.sides import decode_side, joined, prefill_side
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
    assert pair.decode.poll("r") is KVPoll.Failed and pair.decode.rooms.known("r").reading
    assert pair.decode.ended.take_ended() == []
    pair.read()
    ((room, state, failure),) = pair.decode.ended.take_ended()
    assert (room, state, failure.reason) == ("r", KVPoll.Failed, "gave up")
    assert not pair.decode.rooms.known("r").reading and pair.decode.ended.take_ended() == []


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
    assert pair.decode.ended.take_ended() == []
    assert [each.room for each in pair.prefill.ended.take_ended()] == [*pair.prefill.rooms.by_name]
    assert len(pair.prefill.rooms.by_name) == MAX_FAILED_UNSENT


def test_what_ends_with_the_endpoint_is_in_the_list_after_close():
    pool = MLAPool(layers=range(2), **MLA)
    options = {"transport": MemoryTransport(MemoryNetwork()), "threaded": False}
    decode = DecodeEndpoint(pool.layout, create_engine("local"), **options)
    link = decode.connect(["nobody"])
    decode.receive("r", oracle.place(pool, 20), link=link)
    decode.close()
    assert [(each.room, each.state) for each in decode.ended()] == [("r", KVPoll.Failed)]


THREADS = 60


def readable(endpoint, seconds=0.0):
    return bool(wait([endpoint], seconds))


def tables_of(count):
    """Block tables of a token each, of items of their own."""
    return [RequestAddress(1, {"kv": Span([1 + n])}) for n in range(count)]


def test_the_file_can_be_read_while_ended_has_something():
    with prefill_side() as (prefill, given), decode_side() as (decode, dest, address):
        assert not readable(prefill) and not readable(decode)
        decode.connect([prefill.address], timeout=20)
        decode.receive("r", address)
        prefill.send("r", given)
        for side in (decode, prefill):
            assert readable(side, 20) and readable(side)
            assert side.ended() == [Ended("r", KVPoll.Success, None)]
            assert not readable(side)
        oracle.assert_holds(dest, address)
        prefill.send("s", given)
        prefill.abort("s", "enough.")
        assert readable(prefill)
        prefill.forget("s")  # and with it, that it has ended
        assert not readable(prefill) and prefill.ended() == []


def test_rooms_in_an_event_loop():
    async def all_ended(endpoint, count):
        loop, found, done = asyncio.get_running_loop(), [], asyncio.Event()

        def take():
            found.extend(endpoint.ended())
            if len(found) == count:
                done.set()

        loop.add_reader(endpoint, take)
        await asyncio.wait_for(done.wait(), 20)
        loop.remove_reader(endpoint)
        return found

    with joined() as (prefill, _, decode, *_):
        for room, table in enumerate(tables_of(5)):
            decode.receive(room, table)
            prefill.send(room, table)
        found = asyncio.run(all_ended(decode, 5))
    assert sorted(each.room for each in found) == [*range(5)]
    assert {each.state for each in found} == {KVPoll.Success}


def test_without_a_thread_there_is_no_file():
    with stepped() as made, pytest.raises(UsageError, match="Ask ended"):
        made.decode.fileno()


def test_a_room_that_is_forgotten_wakes_who_waits_for_a_layer():
    with joined() as (_, _, decode, _, address):
        for room in ("r", "s"):  # the loop goes on after the first
            decode.receive(room, address)
            raised = []

            def wait(room=room, raised=raised):
                try:
                    decode.wait_layer(room, 0, 20)
                except UnknownRoom as error:
                    raised.append(error)

            thread = threading.Thread(target=wait)
            thread.start()
            deadline = time.monotonic() + 20
            while not decode._loop.waiters.others:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            with decode._loop.lock:  # it is woken by the first, and asks after the second
                decode.abort(room, "enough.")
                decode.forget(room)
            thread.join(20)
            assert not thread.is_alive() and len(raised) == 1


def test_a_wait_that_was_too_short_leaves_nothing_behind():
    with joined() as (_, _, decode, _, address):
        decode.receive("r", address)
        for wait in (decode.wait, lambda room, seconds: decode.wait_layer(room, 0, seconds)):
            with pytest.raises(TimeoutError, match="it waits for"):
                wait("r", 0.01)
        waiters = decode._loop.waiters
        assert not (waiters.others or waiters.for_rooms)


def test_one_of_many_threads_wakes_for_its_room_alone():
    with joined() as (prefill, _, decode, *_):
        given = tables_of(1)
        found = {}

        def wait(room):
            found[room] = decode.wait(room, 30)

        for room in range(THREADS):
            decode.receive(room, given[0] if not room else RequestAddress(0, {"kv": Span([])}))
        threads = [threading.Thread(target=wait, args=(room,)) for room in range(THREADS)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 20
        while len(decode._loop.waiters.for_rooms) < THREADS:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        asked, poll = [], decode.machine.poll
        decode.machine.poll = lambda room: (asked.append(room), poll(room))[1]
        prefill.send(0, given[0])
        threads[0].join(20)
        assert found == {0: KVPoll.Success}
        assert set(asked) == {0}
        decode.machine.poll = poll
        for room in range(1, THREADS):
            decode.abort(room, "enough.")
        for thread in threads:
            thread.join(20)
        assert [found[room] for room in range(1, THREADS)] == [KVPoll.Failed] * (THREADS - 1)


class BrieflySettled(Link):
    """A link that is lost at once after its handshake."""

    states = (False, True)

    @property
    def settled(self):
        now, *BrieflySettled.states = (*BrieflySettled.states, False)
        return now


def test_a_handshake_that_was_done_is_no_timeout_though_the_link_is_lost_at_once():
    with decode_side() as (decode, _, _):
        decode.handshake(BrieflySettled(("ipc:///tmp/nowhere",)), 20)
        assert not any(BrieflySettled.states)
