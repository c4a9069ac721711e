"""Callers that wait: for a room, for any, in an event loop."""

from __future__ import annotations

import asyncio
import select
import threading
import time

import pytest

from disagg import Ended, KVPoll, Link, UnknownRoom, UsageError
from kvpool import RequestAddress, Span
from tests import oracle
from tests.disagg.runtime.sides import decode_side, prefill_side
from tests.disagg.stepping import stepped

THREADS = 60


def readable(endpoint, seconds=0.0):
    return bool(select.select([endpoint], [], [], seconds)[0])


def tables(count):
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

    with prefill_side() as (prefill, _), decode_side() as (decode, _, _):
        decode.connect([prefill.address], timeout=20)
        for room, table in enumerate(tables(5)):
            decode.receive(room, table)
            prefill.send(room, table)
        found = asyncio.run(all_ended(decode, 5))
    assert sorted(each.room for each in found) == [*range(5)]
    assert {each.state for each in found} == {KVPoll.Success}


def test_without_a_thread_there_is_no_file():
    with stepped() as made, pytest.raises(UsageError, match="Ask ended"):
        made.decode.fileno()


def test_a_room_that_is_forgotten_wakes_who_waits_for_a_layer():
    with prefill_side() as (prefill, _), decode_side() as (decode, _, address):
        decode.connect([prefill.address], timeout=20)
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
            while not len(decode.driver._waiters):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            with decode._loop.lock:  # it is woken by the first, and asks after the second
                decode.abort(room, "enough.")
                decode.forget(room)
            thread.join(20)
            assert not thread.is_alive() and len(raised) == 1


def test_a_wait_that_was_too_short_leaves_nothing_behind():
    with decode_side() as (decode, _, address), prefill_side() as (prefill, _):
        decode.connect([prefill.address], timeout=20)
        decode.receive("r", address)
        for wait in (decode.wait, lambda room, seconds: decode.wait_layer(room, 0, seconds)):
            with pytest.raises(TimeoutError, match="it waits for"):
                wait("r", 0.01)
        assert not len(decode.driver._waiters)


def test_one_of_many_threads_wakes_for_its_room_alone():
    with prefill_side() as (prefill, _), decode_side() as (decode, _, _):
        decode.connect([prefill.address], timeout=20)
        given = tables(1)
        found = {}

        def wait(room):
            found[room] = decode.wait(room, 30)

        for room in range(THREADS):
            decode.receive(room, given[0] if not room else RequestAddress(0, {"kv": Span([])}))
        threads = [threading.Thread(target=wait, args=(room,)) for room in range(THREADS)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 20
        while len(decode.driver._waiters) < THREADS:
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
