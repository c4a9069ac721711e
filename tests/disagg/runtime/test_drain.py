"""A side that drains: what is open ends with the right bytes, new rooms are refused by name."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest

from disagg import DecodeEndpoint, EndpointClosed, EndpointDraining, KVPoll, PrefillEndpoint
from disagg.engines.base import create_engine
from disagg.protocol.events import AbortRoom, Drain, ReadEnded
from disagg.protocol.versions import PROTOCOL
from kvpool import RequestAddress, Span
from tests import oracle
from tests.disagg.engines.peers import ENGINES
from tests.disagg.protocol.pair import Pair
from tests.disagg.runtime.sides import TOKENS, pool, prefill_side, succeeds
from tests.disagg.stepping import stepped
from tests.disagg.waiting import until
from tests.processes import Child

PLACES = {
    "unix": (None, {}),
    "tcp": ("tcp://127.0.0.1:*", {"insecure": True}),
    "tls": ("tcp://127.0.0.1:*", {}),
}
LONG = 60.0


@pytest.fixture(params=PLACES)
def place(request, keys):
    """Where prefill listens, and options of both sides."""
    where, options = PLACES[request.param]
    return where, {"keys": keys} if request.param == "tls" else options


def tables(holder, names):
    """A block table of TOKENS for each name, in pages of its own."""
    ((space, span),) = oracle.place(holder, 10 * len(names) * holder.page_size, 9).spans.items()
    pages = {name: span.ids[10 * n : 10 * (n + 1)] for n, name in enumerate(names)}
    return {name: RequestAddress(TOKENS, {space: Span(ids)}) for name, ids in pages.items()}


@contextmanager
def reading_from(address, engine="local", **options):
    """A decode that is connected, its memory, and a block table for each of several rooms."""
    dest = pool(page_size=8, num_pages=80)
    oracle.blank(dest)
    with DecodeEndpoint(dest.layout, create_engine(engine), **options) as decode:
        decode.connect([address], timeout=LONG)
        yield decode, dest, tables(dest, ["sent", "asked", "begun", "new", "later"])


def no_leases(*endpoints):
    for endpoint in endpoints:
        leases = endpoint.leases()
        assert not any(leases.leased.values()) and not any(leases.quarantined.values())


def part(table, tokens):
    return RequestAddress(tokens, table.spans)


def refused(decode, room):
    """The room fails for prefill's drain, which says what to do; long before any time-out."""
    assert decode.wait(room, LONG) is KVPoll.Failed
    failure = decode.failure(room)
    assert (failure.side, failure.kind) == ("prefill", "draining")
    assert failure.reason.startswith("draining: this prefill takes no new rooms")
    assert failure.reason.endswith("Send the request to another prefill.")


def arrived(decode, room, dest, table):
    """Its bytes are right; whatever else is there, other rooms' are too."""
    succeeds(decode, room)
    assert oracle.holds(dest, table)


def test_a_prefill_that_drains_ends_what_is_open_and_refuses_the_rest(place):
    where, options = place
    with (
        prefill_side(where, **options) as (prefill, given),
        reading_from(prefill.address, **options) as (decode, dest, into),
    ):
        prefill.send("sent", given)
        decode.receive("asked", into["asked"])
        until(prefill, lambda: prefill.poll("asked") is KVPoll.WaitingForInput)
        decode.receive("begun", into["begun"])
        prefill.send("begun", part(given, 32), last=False)
        until(decode, lambda: decode.poll("begun") is KVPoll.Transferring)
        assert not prefill.draining and not prefill.drained
        assert not prefill.drain() and not prefill.drain()
        assert prefill.draining and not prefill.drained
        with pytest.raises(EndpointDraining, match=r"room 'new': draining: .* another prefill\."):
            prefill.send("new", given)
        decode.receive("new", into["new"])
        refused(decode, "new")
        with pytest.raises(TimeoutError, match=r"3 rooms are open after 0 s: room 'sent' waits"):
            prefill.drain(timeout=0)
        decode.receive("sent", into["sent"])
        prefill.send("begun", given)
        prefill.send("asked", given)
        for room in ("sent", "begun", "asked"):
            arrived(decode, room, dest, into[room])
        assert prefill.drain(timeout=LONG) and prefill.drained
        no_leases(prefill, decode)
        # the link is there still, and what it says has not changed
        decode.receive("later", into["later"])
        refused(decode, "later")
        assert all(link.lost is None for link in decode.machine.peers.links)
        assert prefill.drained


def test_a_decode_that_connects_to_a_draining_prefill_has_what_was_sent_to_it():
    with prefill_side() as (prefill, given):
        prefill.send("sent", given)
        prefill.drain()
        with reading_from(prefill.address) as (decode, dest, into):
            decode.receive("new", into["new"])
            decode.receive("sent", into["sent"])
            refused(decode, "new")
            arrived(decode, "sent", dest, into["sent"])
        assert prefill.drain(timeout=LONG)


def test_a_decode_that_drains_ends_what_is_open_and_takes_no_more(place):
    where, options = place
    with (
        prefill_side(where, **options) as (prefill, given),
        reading_from(prefill.address, **options) as (decode, dest, into),
    ):
        prefill.send("unread", given)
        for room in ("asked", "begun"):
            decode.receive(room, into[room])
        prefill.send("begun", part(given, 32), last=False)
        assert not decode.drain() and decode.draining
        with pytest.raises(EndpointDraining, match=r"room 'new': this decode drains .* decode\."):
            decode.receive("new", into["new"])
        with pytest.raises(TimeoutError, match=r"2 rooms are open after 0 s: room 'asked' waits"):
            decode.drain(timeout=0)
        decode.decline("unread")  # prefill's pages come back
        prefill.send("begun", given)
        prefill.send("asked", given)
        for room in ("begun", "asked"):
            arrived(decode, room, dest, into[room])
        assert decode.drain(timeout=LONG) and decode.drained
        succeeds(prefill, "unread")
        assert not prefill.draining
        no_leases(prefill, decode)


def test_a_prefill_that_has_stopped_ends_what_it_will_not_send():
    with (
        prefill_side() as (prefill, given),
        reading_from(prefill.address) as (decode, dest, into),
    ):
        prefill.send("sent", given)
        decode.receive("asked", into["asked"])
        decode.receive("begun", into["begun"])
        until(prefill, lambda: prefill.poll("asked") is KVPoll.WaitingForInput)
        prefill.send("begun", part(given, 32), last=False)
        until(decode, lambda: decode.poll("begun") is KVPoll.Transferring)
        prefill.drain(stopped=True)
        for room in ("asked", "begun"):
            assert decode.wait(room, LONG) is prefill.wait(room, LONG) is KVPoll.Failed
            for side in (decode, prefill):
                failure = side.failure(room)
                assert (failure.side, failure.kind) == ("prefill", "draining")
                assert failure.reason.endswith("Send the request to another.")
        decode.receive("sent", into["sent"])
        arrived(decode, "sent", dest, into["sent"])
        assert prefill.drain(timeout=LONG)
        no_leases(prefill, decode)


def test_a_decode_that_has_stopped_gives_prefills_pages_back():
    with (
        prefill_side() as (prefill, given),
        reading_from(prefill.address) as (decode, _, into),
    ):
        for room in ("asked", "begun"):
            decode.receive(room, into[room])
        prefill.send("begun", part(given, 32), last=False)
        until(decode, lambda: decode.poll("begun") is KVPoll.Transferring)
        until(prefill, lambda: prefill.poll("asked") is KVPoll.WaitingForInput)
        decode.drain(stopped=True)
        assert decode.drain(timeout=LONG)
        for room in ("asked", "begun"):
            assert prefill.wait(room, LONG) is KVPoll.Failed
            failure = prefill.failure(room)
            assert (failure.side, failure.kind) == ("decode", "draining")
        no_leases(prefill, decode)


def test_a_drain_waits_for_reads_of_rooms_that_have_failed():
    pair = Pair()
    pair.ask("r")
    pair.serve()
    (read,) = pair.reads
    pair.tell(pair.decode, Drain())
    pair.tell(pair.decode, AbortRoom("r", "the user went away."))
    assert pair.decode.poll("r") is KVPoll.Failed and not pair.decode.drained
    pair.tell(pair.decode, ReadEnded(read, None))
    assert pair.decode.drained


def test_without_a_thread_the_one_that_waits_turns_the_loop():
    with stepped() as engine:
        engine.prefill.send("r", oracle.filled(engine.pools[0], 40))
        engine.decode.receive("r", oracle.place(engine.pools[1], 40, 3))
        turning = threading.Event()

        def others():
            while not turning.is_set():
                engine.decode.step()

        thread = threading.Thread(target=others)
        thread.start()
        try:
            assert engine.prefill.drain(timeout=LONG)
        finally:
            turning.set()
            thread.join()
        assert engine.prefill.poll("r") is KVPoll.Success


def test_a_close_ends_the_wait():
    with prefill_side() as (prefill, given):
        prefill.send("r", given)
        ends = []

        def waits():
            try:
                prefill.drain(timeout=LONG)
            except EndpointClosed as error:
                ends.append(error)

        thread = threading.Thread(target=waits)
        thread.start()
        until(prefill, lambda: prefill.draining)
        prefill.close()
        thread.join(LONG)
        assert len(ends) == 1
        with pytest.raises(EndpointClosed):
            prefill.drain()


@pytest.mark.parametrize("number", [PROTOCOL - 1, PROTOCOL])
def test_decodes_of_either_protocol_are_told(monkeypatch, number):
    monkeypatch.setattr("tests.disagg.protocol.pair.PROTOCOLS", (PROTOCOL, number))
    pair = Pair()
    pair.tell(pair.prefill, Drain())
    pair.ask("r")
    failure = pair.decode.failure("r")
    assert (failure.side, failure.kind) == ("prefill", "draining")
    assert "another prefill" in failure.reason
    assert pair.prefill.drained and not pair.prefill.rooms.by_name


def _drains(pipe, engine, rooms):
    """A prefill that has sent `rooms`, drains until they have ended, and exits."""
    source = pool()
    given = oracle.filled(source, TOKENS)
    with PrefillEndpoint(source.layout, create_engine(engine)) as prefill:
        pipe.send(prefill.address)
        pipe.recv()
        for room in rooms:
            prefill.send(room, given)
        prefill.drain()
        pipe.send("drains")
        prefill.drain(timeout=LONG)
        pipe.send(sum(prefill.leases().leased.values()))
        pipe.recv()


@pytest.mark.parametrize("engine", [*ENGINES])
def test_a_process_that_drains_before_it_ends_loses_no_room(engine):
    rooms = ["sent", "asked", "begun"]
    with (
        Child(_drains, engine, rooms) as child,
        reading_from(child.answer(), engine) as (decode, dest, into),
    ):
        child.pipe.send(None)
        assert child.answer() == "drains"
        for room in [*rooms, "new"]:
            decode.receive(room, into[room])
        refused(decode, "new")
        for room in rooms:
            arrived(decode, room, dest, into[room])
        assert child.answer() == 0
        assert child.close() == 0
        no_leases(decode)
