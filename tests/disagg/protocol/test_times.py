"""When the chunks of a room were ready, read and released, by a clock that is set by hand."""

from __future__ import annotations

import pytest

from disagg import KVPoll, ReadTimes
from disagg.protocol.events import ReadBegun, ReadEnded
from disagg.protocol.rooms.offered import LayerRange
from tests.disagg.protocol.pair import Pair


def test_times_of_a_room_count_from_its_request():
    pair = Pair()
    pair.now = 100.0
    pair.request()
    pair.now = 101.0
    pair.pump()
    pair.now = 103.0
    pair.serve(range(16), last=False)
    pair.now = 104.0
    pair.serve(range(16, 30))
    second, first = pair.reads.pop(), pair.reads.pop()
    for read, begun in ((first, 103.5), (second, 105.0)):
        pair.tell(pair.decode, ReadBegun(read, begun, 0.0, ()))
    for read, pair.now in ((second, 106.0), (first, 109.0)):
        pair.tell(pair.decode, ReadEnded(read, None))
    pair.now = 112.0
    pair.pump()
    metrics = pair.decode.room("r").metrics
    assert pair.polls()[0] is KVPoll.Success
    every = {"source": 0, "layers": None}
    assert metrics.reads == [
        ReadTimes(**every, start=16, stop=30, ready=4.0, begun=5.0, ended=6.0),
        ReadTimes(**every, start=0, stop=16, ready=3.0, begun=3.5, ended=9.0),
    ]
    assert (metrics.asked_seconds, metrics.wait_seconds, metrics.done_seconds) == (0.0, 3.0, 9.0)
    assert (metrics.released, metrics.total_seconds) == ({0: 12.0}, 12.0)


def test_a_read_that_had_no_turn_has_ended_and_not_begun():
    pair = Pair()
    pair.ask()
    pair.serve()
    pair.now = 5.0
    pair.abort(pair.decode)
    pair.read()
    metrics = pair.decode.room("r").metrics
    assert [(read.begun, read.ended) for read in metrics.reads] == [(None, 5.0)]
    assert (metrics.done_seconds, metrics.released) == (0.0, {})


def test_parts_of_a_chunk_say_their_layers():
    pair = Pair(layers=range(4))
    pair.ask()
    for low in (0, 2):
        pair.serve(last=low == 2, layers=range(low, low + 2))
    pair.read()
    layers = [read.layers for read in pair.decode.room("r").metrics.reads]
    assert sorted(layers, key=str) == [LayerRange("target", 0, 2), LayerRange("target", 2, 4)]


@pytest.mark.parametrize("verify", [False, True])
def test_a_room_is_done_once_it_was_verified(verify):
    pair = Pair(verify=verify)
    pair.ask()
    pair.serve()
    pair.now = 3.0
    pair.read()
    assert pair.decode.room("r").metrics.done_seconds == (0.0 if verify else 3.0)
