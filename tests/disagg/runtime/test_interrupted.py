"""Handlers of signals that raise while the caller is in an endpoint: a time limit by SIGALRM, and
Ctrl-C. Every call is complete or was not made, no room suffers, and the caller sees the exception.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from contextlib import contextmanager

import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from kvpool import Allocator, MHAPool
from tests import oracle
from tests.disagg.runtime.sides import decode_side

TRIALS, ROOMS, TOKENS = 25, 4, 50
SECONDS = 20
IN_HAND = "go", "<genexpr>", "ended", "take_ended"
"""Functions between the taking and the keeping of a list: what is raised there loses it."""
POOL = {"layers": range(2), "num_kv_heads": 2, "head_dim": 8, "num_pages": 40, "dtype": "f32"}


class Limit(Exception):
    """A caller's time limit."""


class Interrupt(KeyboardInterrupt):
    """Ctrl-C."""


@contextmanager
def alarms(kind):
    """SIGALRM raises `kind`; yields the exceptions that were raised. `alarm` is to be called where
    they are caught: elsewhere a busy machine lets them come before.
    """
    raised = []

    def handler(number, frame):
        raised.append(kind())
        raise raised[-1]

    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield raised
    finally:
        assert signal.getsignal(signal.SIGALRM) is handler
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def alarm(seconds):
    """One SIGALRM, after so many seconds."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


class Sides:
    """A prefill and a decode, with allocators, and rooms of one trial after the other."""

    def __init__(self, prefill, decode, source, dest):
        self.prefill, self.decode = prefill, decode
        self.source, self.dest = source, dest
        self.offered, self.received = Allocator(source), Allocator(dest)

    def turn(self):
        if not self.prefill.driver.has_thread:
            self.prefill.step()
            self.decode.step()

    def begin(self, trial):
        """Offers rooms and asks for them; asks for one more, which waits throughout."""
        rooms = {}
        for number in range(ROOMS):
            given, taken = self.offered.new_request(), self.received.new_request()
            self.offered.extend(given, TOKENS)
            self.received.extend(taken, TOKENS, received=True)
            oracle.write(self.source, given.address(), range(TOKENS), salt=trial)
            rooms[f"{trial} {number}"] = given, taken
            self.prefill.send(f"{trial} {number}", given.address())
            self.decode.receive(f"{trial} {number}", taken.address())
        waits = self.received.new_request()
        self.received.extend(waits, 3, received=True)
        self.decode.receive(f"{trial} waits", waits.address())
        return rooms, waits

    def go(self, ended, rooms):
        """Until both sides have listed all rooms as ended, and every call has been made often."""
        until = time.monotonic() + SECONDS
        while len(ended["decode"]) < ROOMS or len(ended["prefill"]) < ROOMS:
            assert time.monotonic() < until, ended
            self.turn()
            for name in rooms:
                self.decode.poll(name)
                self.decode.reading(name)
            for side in ("prefill", "decode"):
                listed = getattr(self, side).ended()
                ended[side].extend(each.room for each in listed if each.room in rooms)

    def drain(self, rooms):
        """Until all rooms have ended; takes the lists of them."""
        for side in (self.prefill, self.decode):
            until = time.monotonic() + SECONDS
            while not all(side.poll(name).ended for name in rooms):
                assert time.monotonic() < until
                self.turn()
            side.ended()

    def end(self, trial, rooms, waits):
        """Checks what a trial has moved, and gives all pages back."""
        for name, (given, taken) in rooms.items():
            assert self.decode.poll(name) is KVPoll.Success, self.decode.failure(name)
            assert oracle.holds(self.dest, taken.address(), salt=trial)
            for side in (self.prefill, self.decode):
                side.forget(name)
            self.offered.free(given)
            self.received.free(taken)
        name = f"{trial} waits"
        assert self.decode.poll(name) is KVPoll.WaitingForInput, self.decode.failure(name)
        self.decode.abort(name, "the trial is over.")
        assert [each.room for each in self.decode.ended()] == [name]
        self.decode.forget(name)
        self.received.free(waits)
        assert not self.decode.leases().leased and not self.prefill.leases().leased


@pytest.mark.parametrize("kind", [Limit, Interrupt])
@pytest.mark.parametrize("threaded", [True, False], ids=["threaded", "stepped"])
def test_a_handler_that_raises_in_a_turn_of_the_caller_harms_no_room(threaded, kind):
    source, dest = MHAPool(**POOL, page_size=16), MHAPool(**POOL, page_size=32)
    options, chance = {"threaded": threaded}, random.Random(7)
    with (
        PrefillEndpoint(source.layout, create_engine("local"), **options) as prefill,
        DecodeEndpoint(dest.layout, create_engine("local"), **options) as decode,
    ):
        sides = Sides(prefill, decode, source, dest)
        link = decode.connect([prefill.address])
        while not link.settled:
            sides.turn()
        for trial in range(TRIALS):
            rooms, waits = sides.begin(trial)
            ended = {"prefill": [], "decode": []}
            with alarms(kind) as raised, pytest.raises(kind) as caught:
                alarm(chance.uniform(1e-4, 4e-3))
                sides.go(ended, rooms)
                while not raised:
                    sides.turn()
                    decode.poll(f"{trial} waits")
            assert [caught.value] == raised
            if caught.traceback[-2].name in IN_HAND:
                sides.drain(rooms)
            else:
                sides.go(ended, rooms)
                assert all(sorted(listed) == sorted(rooms) for listed in ended.values())
            sides.end(trial, rooms, waits)


@pytest.mark.parametrize("threaded", [True, False], ids=["threaded", "stepped"])
def test_a_wait_ends_at_once_and_leaves_nothing_behind(threaded):
    with decode_side(threaded=threaded) as (decode, _, address):
        decode.connect(["ipc:///tmp/nowhere"])
        decode.receive("r", address)
        for wait in (
            lambda: decode.wait("r", SECONDS),
            lambda: decode.wait_layer("r", 0, SECONDS),
            lambda: decode.connect(["ipc:///tmp/nowhere"], timeout=SECONDS),
        ):
            began = time.monotonic()
            with alarms(Interrupt), pytest.raises(Interrupt):
                alarm(0.05)
                wait()
            assert time.monotonic() - began < SECONDS / 2
        decode.abort("r", "enough.")
        assert decode.wait("r", SECONDS) is KVPoll.Failed
        assert len(decode.machine.peers.links) == 1


@pytest.mark.parametrize("threaded", [True, False], ids=["threaded", "stepped"])
def test_a_handler_may_close_the_endpoint_that_it_interrupts(threaded):
    threads = threading.active_count()
    with decode_side(threaded=threaded) as (decode, _, address):
        decode.connect(["ipc:///tmp/nowhere"])
        decode.receive("r", address)
        before = signal.signal(signal.SIGALRM, lambda *_: decode.close())
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            assert decode.wait("r", SECONDS) is KVPoll.Failed
        finally:
            signal.signal(signal.SIGALRM, before)
        assert "the endpoint was closed" in str(decode.failure("r"))
    assert threading.active_count() <= threads


def test_close_goes_on_after_a_handler_has_ended_it():
    with decode_side() as (decode, _, _):
        close, ended = decode.engine.close, []

        def interrupted():
            if not ended:
                ended.append("once")
                signal.raise_signal(signal.SIGINT)
            close()
            ended.append("closed")

        decode.engine.close = interrupted
        with pytest.raises(KeyboardInterrupt):
            decode.close()
        decode.close()
        decode.close()
        assert ended == ["once", "closed"]
