"""A request's traceparent: what one is, that prefill learns it, and what a peer may not write."""

from __future__ import annotations

import msgspec
import pytest

from disagg.protocol import codec, messages
from disagg.protocol.events import Received
from disagg.protocol.messages import WireError
from disagg.protocol.trace_context import (
    EXAMPLE,
    checked_traceparent,
    flags_of,
    is_traceparent,
    parent_of,
    trace_of,
)
from tests.disagg.protocol.pair import Pair, asks

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = [
    EXAMPLE,
    f"00-{TRACE}-{PARENT}-00",
    f"cc-{TRACE}-{PARENT}-ff",
    f"00-{'f' * 32}-{'f' * 16}-01",
]
BAD = [
    "",
    "x" * 55,
    EXAMPLE.upper(),
    EXAMPLE[:-1],
    f"{EXAMPLE}\n",
    f"{EXAMPLE}-what-follows",
    f" {EXAMPLE}",
    f"ff-{TRACE}-{PARENT}-01",
    f"00-{'0' * 32}-{PARENT}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"00-{TRACE}-{PARENT}-0\u0661",
    EXAMPLE.replace("-", "_"),
    f"00-{TRACE}-{PARENT[:-5]}\x1b[2K-01",
]


@pytest.mark.parametrize("value", [*GOOD, *BAD, None, 7, EXAMPLE.encode()])
def test_a_caller_may_give_what_a_peer_may_and_nothing_else(value):
    good = value in GOOD
    assert is_traceparent(value) == good
    fields = msgspec.to_builtins(asks()) | {"type": "read_request", "traceparent": value}
    frame = msgspec.msgpack.encode(fields)
    if good or value is None:
        assert checked_traceparent(value) == value
        assert codec.decode(frame).traceparent == value
        return
    with pytest.raises(ValueError, match=r"traceparent=.*, such as 00-0af76519"):
        checked_traceparent(value)
    with pytest.raises(WireError, match="malformed message"):
        codec.decode(frame)


def test_it_has_a_trace_a_parent_and_flags():
    assert (trace_of(EXAMPLE), parent_of(EXAMPLE), flags_of(EXAMPLE)) == (TRACE, PARENT, 1)
    assert flags_of(GOOD[2]) == 255


def test_what_a_peer_writes_there_is_quoted_without_escape_codes():
    frame = codec.encode(asks(traceparent=f"00-{TRACE}-{PARENT[:-5]}\x1b[2K-01"))
    with pytest.raises(WireError) as told:
        codec.decode(frame)
    assert str(told.value).isprintable() and len(str(told.value)) < 400


def test_prefill_learns_it_from_the_request_and_keeps_the_first_of_several_readers():
    pair = Pair()
    pair.ask(traceparent=EXAMPLE)
    (room,) = pair.prefill.rooms.by_name.values()
    assert room.traceparent == pair.decode.rooms.by_name["r"].traceparent == EXAMPLE
    prefill = Pair().prefill
    hello = messages.Hello(**msgspec.structs.asdict(pair.decode.hello))
    for number, given in enumerate([None, EXAMPLE, GOOD[1]]):
        peer = b"reader %d" % number
        again = msgspec.structs.replace(hello, generation=f"d{number}")
        prefill.handle(Received(peer, again), 0.0)
        prefill.handle(Received(peer, asks(readers=3, traceparent=given)), 0.0)
    (room,) = prefill.rooms.by_name.values()
    assert len(room.requests) == 3 and room.traceparent == EXAMPLE
