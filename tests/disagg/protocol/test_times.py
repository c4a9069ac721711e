"""When the chunks of a room were ready, read and released, by a clock that is set by hand."""

from __future__ import annotations

import pytest

from disagg import KVPoll
from disagg.protocol.events import ReadEnded
from disagg.protocol.rooms.offered import LayerRange
from tests.disagg.protocol.pair import Pair


def test_times_of_a_room_count_from_its_request():
    pair = Pair()
    pair.now = 100.0
    pair.request()
    pair.now = 101.0
    pair.pump()
    pair.now = 103.0
    pair.offer(range(16), last=False)
    pair.pump()
    pair.now = 104.0
    pair.offer(range(16, 30))
    pair.pump()
    second, first = pair.reads.pop(), pair.reads.pop()
    first.begun, second.begun = 103.5, 105.0
    for read, pair.now in ((second, 106.0), (first, 109.0)):
        pair.tell(pair.decode, ReadEnded(read, None))
    pair.now = 112.0
    pair.pump()
    found = pair.decode.metrics("r")
    assert pair.polls()[0] is KVPoll.Success
    assert found.reads == [(0, 16, 30, None, 4.0, 5.0, 6.0), (0, 0, 16, None, 3.0, 3.5, 9.0)]
    assert (found.asked_seconds, found.wait_seconds, found.done_seconds) == (0.0, 3.0, 9.0)
    assert (found.released, found.total_seconds) == ({0: 12.0}, 12.0)


def test_a_read_that_had_no_turn_has_ended_and_not_begun():
    pair = Pair()
    pair.request()
    pair.pump()
    pair.offer()
    pair.pump()
    pair.now = 5.0
    pair.abort(pair.decode)
    pair.read()
    found = pair.decode.metrics("r")
    assert [(each.begun, each.ended) for each in found.reads] == [(None, 5.0)]
    assert (found.done_seconds, found.released) == (0.0, {})


def test_parts_of_a_chunk_say_their_layers():
    pair = Pair(layers=range(4))
    pair.request()
    pair.pump()
    for low in (0, 2):
        pair.offer(last=low == 2, layers=range(low, low + 2))
        pair.pump()
    pair.read()
    found = [each.layers for each in pair.decode.metrics("r").reads]
    assert sorted(found, key=str) == [LayerRange("target", 0, 2), LayerRange("target", 2, 4)]


@pytest.mark.parametrize("verify", [False, True])
def test_a_room_is_done_once_it_was_verified(verify):
    pair = Pair(verify=verify)
    pair.request()
    pair.pump()
    pair.offer()
    pair.pump()
    pair.now = 3.0
    pair.read()
    assert pair.decode.metrics("r").done_seconds == (0.0 if verify else 3.0)
