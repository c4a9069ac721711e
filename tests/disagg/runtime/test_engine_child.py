"""Endpoints whose peers read from a process of the engine's own: it ends, and they go on."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from typing import Any, NamedTuple

from disagg import KVPoll, PrefillEndpoint, create_engine
from disagg.protocol.peers.link import Link
from kvpool import RequestAddress
from tests import oracle
from tests.disagg.runtime.sides import TOKENS, decode_side, pool
from tests.processes import stands_still, until

REASON = "the process that served reads by engine nixl was ended by SIGSEGV."


class Decode(NamedTuple):
    """A decode, and its link to the prefill."""

    endpoint: Any
    pool: Any
    table: RequestAddress
    link: Link

    def receives(self, room):
        oracle.blank(self.pool)
        self.endpoint.receive(room, self.table, link=self.link)

    def is_right(self, room):
        """Whether a room succeeds, byte by byte; or it fails, and lets its pages go."""
        if self.endpoint.wait(room, 60) is KVPoll.Success:
            oracle.assert_holds(self.pool, self.table)
            return True
        until(lambda: not self.endpoint.reading(room))
        return False

    def connects_again(self, prefill):
        """As often as the prefill has lost a child."""
        until(lambda: self.endpoint.snapshot().losses == prefill.children_ended)
        until(lambda: self.link.state == "open")


class Prefill(NamedTuple):
    """A prefill with a request, and with such a process."""

    endpoint: Any
    table: RequestAddress

    def moves(self, room, *decodes):
        for decode in decodes:
            decode.receives(f"{room} {id(decode)}")
            self.endpoint.send(f"{room} {id(decode)}", self.table)
        assert all(decode.is_right(f"{room} {id(decode)}") for decode in decodes)

    @property
    def children_ended(self):
        return self.endpoint.snapshot().telemetry["children_ended"]

    def ends_child(self):
        """It has ended, and what follows is done."""
        before = self.children_ended
        os.kill(self.endpoint.engine._child._process.pid, signal.SIGSEGV)
        until(lambda: self.children_ended > before)


@contextmanager
def sides(**options):
    """A prefill, and two decodes that are connected to it."""
    source = pool()
    table = oracle.filled(source, TOKENS)
    engine = create_engine("nixl", transports="tcp", child=True)
    with (
        PrefillEndpoint(source.layout, engine) as prefill,
        decode_side("nixl", **options) as one,
        decode_side("nixl", **options) as other,
    ):
        links = [side[0].connect([prefill.address], timeout=30) for side in (one, other)]
        yield Prefill(prefill, table), Decode(*one, links[0]), Decode(*other, links[1])


def test_rooms_that_were_asked_for_fail_with_the_reason_and_the_next_are_right():
    with sides() as (prefill, one, other):
        prefill.moves("before", one, other)
        one.receives("asked for")
        until(lambda: "asked for" in prefill.endpoint.machine.rooms.by_name)
        prefill.ends_child()
        for endpoint in (prefill.endpoint, one.endpoint):
            assert endpoint.wait("asked for", 30) is KVPoll.Failed
            assert REASON in endpoint.failure("asked for").reason
        for decode in (one, other):
            decode.connects_again(prefill)
        prefill.moves("after", one, other)
        for endpoint in (prefill.endpoint, one.endpoint, other.endpoint):
            assert not any(endpoint.leases().leased.values())
        assert prefill.endpoint.snapshot().losses == 2


def test_a_room_that_nobody_has_asked_for_yet_is_not_concerned():
    with sides() as (prefill, one, _):
        prefill.endpoint.send("early", prefill.table)
        prefill.ends_child()
        one.connects_again(prefill)
        one.receives("early")
        assert one.is_right("early")


def test_without_another_child_the_prefill_serves_by_itself(monkeypatch, caplog):
    with sides() as (prefill, one, _):
        monkeypatch.setattr("sys.executable", "/bin/false")
        prefill.ends_child()
        until(lambda: prefill.endpoint.engine._child is None)
        assert "this process serves reads by itself: no process can be started" in caplog.text
        assert "it ended with status 1" in caplog.text
        one.connects_again(prefill)
        prefill.moves("after", one)


def test_while_it_hangs_rooms_fail_by_their_time_out():
    with sides(read_timeout=1.0) as (prefill, one, _):
        prefill.moves("before", one)
        pid = prefill.endpoint.engine._child._process.pid
        os.kill(pid, signal.SIGSTOP)
        until(lambda: stands_still(pid))
        one.receives("hangs")
        prefill.endpoint.send("hangs", prefill.table)
        for endpoint in (one.endpoint, prefill.endpoint):
            assert endpoint.wait("hangs", 30) is KVPoll.Failed
            assert "nothing has arrived" in endpoint.failure("hangs").reason
        os.kill(pid, signal.SIGCONT)
        until(lambda: not one.endpoint.reading("hangs"))
        prefill.moves("after", one)
        assert prefill.children_ended == 0


def test_it_is_ended_again_and_again_while_rooms_move():
    """Every room is right, or has failed; and those between are right."""
    with sides() as (prefill, *both):
        for number in range(12):
            rooms = [f"{number} a", f"{number} b"]
            for room, decode in zip(rooms, both):
                decode.connects_again(prefill)
                decode.receives(room)
                prefill.endpoint.send(room, prefill.table)
            if number % 3 == 1:
                time.sleep(number / 2000)
                prefill.ends_child()
            right = [decode.is_right(room) for room, decode in zip(rooms, both)]
            assert number % 3 == 1 or all(right)
        assert not any(prefill.endpoint.leases().leased.values())
