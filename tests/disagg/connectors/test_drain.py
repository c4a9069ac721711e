"""A rank that ends: what it has sent is read, what waits for it fails by name, on both sides."""

from __future__ import annotations

import logging
import threading

import pytest

from disagg import KVPoll
from disagg.connectors.rank.rank import Rank
from disagg.connectors.settings import Settings
from kvpool import MLAPool
from kvpool.layout import RequestAddress, Span
from tests import oracle
from tests.disagg.connectors.vllm.engines import until

MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "dtype": "f32", "num_pages": 12, "page_size": 16}
TOKENS = 40
LONG = 60.0
ROOMS = {"sent": 1, "asked": 4, "begun": 7}


def table(first, tokens=TOKENS):
    """The block table of a request in three pages."""
    return RequestAddress(tokens, {"kv": Span(range(first, first + 3))})


class Side:
    """A rank of an engine over a pool, and what its engine was told."""

    def __init__(self, seconds, **roles):
        self.pool, self.told = MLAPool(layers=range(2), **MLA), {}
        self.sent, self.received, self.failed = set(), set(), set()
        sides = {"produces": False, "consumes": False, **roles}
        log = logging.getLogger("tests.engine")
        settings, layout = Settings(drain_seconds=seconds), self.pool.layout
        self.rank = Rank(settings, layout, **sides, readers=1, log=log, conventions={})

    def step(self):
        results = self.rank.results({*ROOMS, "new"})
        self.sent |= results.sent
        self.received |= results.received
        self.failed |= results.failed
        self.told |= results.why

    def send(self, room, start=0, stop=TOKENS):
        address = table(ROOMS[room], stop)
        self.rank.send(room, room, address, range(start, stop), last=stop == TOKENS)

    def receive(self, room, prefill):
        address = table(ROOMS.get(room, 1))
        self.rank.receive(room, room, address, start=0, peers=(prefill.rank.prefill.address,))


@pytest.fixture
def made():
    sides = []

    def make(seconds=LONG, **roles):
        sides.append(Side(seconds, **roles))
        return sides[-1]

    yield make
    for side in sides:
        side.rank.close()


def opened(prefill, decode):
    """A room that was sent, one that was asked for, and one of which a part was sent."""
    for first in ROOMS.values():
        oracle.write(prefill.pool, table(first), range(TOKENS))
    oracle.blank(decode.pool)
    prefill.send("sent")
    decode.receive("asked", prefill)
    decode.receive("begun", prefill)
    prefill.send("begun", stop=16)
    until(
        lambda: (
            prefill.rank.asked("asked") and decode.rank.decode.poll("begun") is KVPoll.Transferring
        ),
        prefill,
        decode,
    )


def closing(side):
    """Closes its rank in a thread, as an engine's own end does while others live."""
    thread = threading.Thread(target=side.rank.close)
    thread.start()
    return thread


def test_a_prefill_that_ends_is_read_to_the_end(made):
    prefill, decode = made(produces=True), made(consumes=True)
    opened(prefill, decode)
    thread = closing(prefill)
    until(lambda: {"asked", "begun"} <= decode.failed, decode)
    assert thread.is_alive()  # what was sent has still to be read
    decode.receive("sent", prefill)
    until(lambda: "sent" in decode.received, decode)
    assert decode.failed == {"asked", "begun"}
    assert all(decode.told[room].kind == "draining" for room in decode.failed)
    assert oracle.holds(decode.pool, table(ROOMS["sent"]))
    thread.join(LONG)
    assert not thread.is_alive()
    assert not any(decode.rank.decode.leases().leased.values())


def test_a_prefill_that_drains_takes_no_more_and_goes_on(made):
    prefill, decode = made(produces=True), made(consumes=True)
    opened(prefill, decode)
    prefill.rank.drain()
    decode.receive("new", prefill)
    until(lambda: "new" in decode.failed, decode, prefill)
    assert decode.told["new"].kind == "draining"
    prefill.send("begun", start=16)
    prefill.send("asked")
    decode.receive("sent", prefill)
    until(lambda: set(ROOMS) <= decode.received and set(ROOMS) <= prefill.sent, decode, prefill)
    assert decode.failed == {"new"}
    for first in ROOMS.values():
        assert oracle.holds(decode.pool, table(first))
    assert prefill.rank.prefill.drained


def test_a_decode_that_ends_gives_pages_back_at_once(made):
    prefill, decode = made(produces=True), made(consumes=True)
    opened(prefill, decode)
    decode.rank.close()
    until(lambda: "begun" in prefill.sent, prefill)
    assert prefill.told["begun"].side == "decode" and prefill.told["begun"].kind == "draining"
    leased = prefill.rank.prefill.leases().leased
    assert sum(leased.values()) == 3  # of what was sent, which another decode may read
    prefill.rank.abort("sent")


def test_nobody_is_waited_for_longer_than_the_settings_say(made, caplog):
    prefill = made(0.05, produces=True, consumes=True)
    prefill.send("sent")
    prefill.rank.close()
    assert "closed before all was read (drain_seconds 0.05): 1 rooms are open" in caplog.text
    prefill.rank.close()
