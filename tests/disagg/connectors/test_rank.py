"""A rank's rooms: one bad room, name or message keeps no other request from being told."""

from __future__ import annotations

import logging
import time

import msgspec
import pytest

from disagg import RoomError
from disagg.connectors.rank.rank import Rank
from disagg.connectors.settings import Settings
from disagg.protocol import codec
from kvpool import MLAPool
from kvpool.layout import RequestAddress, Span
from tests.disagg.connectors.vllm.engines import until
from tests.streams import dial

MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "dtype": "f32", "num_pages": 12, "page_size": 16}
TOKENS = 40


def table(first=1):
    """The block table of a request in three pages."""
    return RequestAddress(TOKENS, {"kv": Span(range(first, first + 3))})


class Side:
    """A rank of an engine, over a pool, and what its engine was told."""

    def __init__(self, log, produces):
        self.pool = MLAPool(layers=range(2), **MLA)
        self.sent, self.received, self.failed = set(), set(), set()
        roles = {"produces": produces, "consumes": not produces}
        self.rank = Rank(Settings(), self.pool.layout, **roles, readers=1, log=log, conventions={})

    def step(self):
        results = self.rank.results({"a", "b", "c"})
        self.sent |= results.sent
        self.received |= results.received
        self.failed |= results.failed

    def send(self, room, first=1):
        self.rank.send(room, room, table(first), range(TOKENS), last=True)

    def receive(self, room, prefill, first=1):
        address = table(first)
        self.rank.receive(room, room, address, start=0, peers=(prefill.rank.prefill.address,))


@pytest.fixture
def log():
    made = logging.getLogger("tests.engine")
    yield made
    made.handlers.clear()


@pytest.fixture
def sides(log):
    pair = Side(log, True), Side(log, False)
    yield pair
    for side in pair:
        side.rank.close()


def test_a_stranger_that_names_a_room_as_no_caller_can_keeps_no_request_from_being_told(sides):
    prefill, decode = sides
    prefill.send("a")
    with dial(prefill.rank.prefill.address) as stranger:
        stranger.send(msgspec.msgpack.encode({"type": "drop_room", "room": "a\nb", "reason": "x"}))
        refused = codec.decode(stranger.receive())
        assert not refused.final and "malformed message" in refused.why
    decode.receive("a", prefill)
    until(lambda: "a" in prefill.sent and "a" in decode.received, decode, prefill)
    assert not decode.failed


class Raising(logging.Handler):
    """An engine's log that fails once, on a message about a request."""

    def __init__(self, request, error):
        super().__init__()
        self.request, self.error, self.raised = request, error, False

    def emit(self, record):
        if f"request {self.request} was not received" in record.getMessage() and not self.raised:
            self.raised = True
            raise self.error


def fail_three(prefill, decode, log, error):
    """Three requests that prefill rejects, told by one call; the log fails for the second."""
    handler = Raising("b", error)
    log.addHandler(handler)
    for number, room in enumerate("abc"):
        decode.receive(room, prefill, 1 + 3 * number)
        prefill.rank.not_sent(room, room, ValueError("it was preempted."))
    end = time.monotonic() + 20
    while not all(decode.rank.decode.poll(room).ended for room in "abc"):
        assert time.monotonic() < end
        prefill.rank.turn()
        decode.rank.turn()
    return handler


def test_a_log_that_fails_for_one_request_keeps_no_other_from_being_told(sides, log):
    prefill, decode = sides
    handler = fail_three(prefill, decode, log, OSError("the disk is full"))
    decode.step()
    assert handler.raised
    assert decode.failed == decode.received == {"a", "b", "c"}


def test_an_interrupt_while_ends_are_told_loses_none(sides, log):
    prefill, decode = sides
    fail_three(prefill, decode, log, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        decode.step()
    decode.step()
    assert decode.failed == decode.received == {"a", "b", "c"}
    for number, room in enumerate("abc"):  # all are forgotten: their names and pages are free
        decode.receive(room, prefill, 1 + 3 * number)


@pytest.mark.parametrize("room", ["a\nb", "x" * 257, "", -1])
def test_a_request_whose_room_has_no_name_of_one_fails_alone(sides, room, caplog):
    prefill, decode = sides
    address = table()
    with pytest.raises(RoomError) as refused:
        prefill.rank.send("b", room, address, range(TOKENS), last=True)
    prefill.rank.not_sent("b", room, refused.value)
    assert "request b cannot be handed over: room " in caplog.text
    with pytest.raises(RoomError):
        prefill.rank.expect("c", room)
    prefill.rank.abort("c")
    decode.rank.decline(room, (prefill.rank.prefill.address,))
    prefill.send("a")
    decode.receive("a", prefill)
    until(lambda: {"a", "b"} <= prefill.sent and "a" in decode.received, decode, prefill)
    assert not decode.failed
