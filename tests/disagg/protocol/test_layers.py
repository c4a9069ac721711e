"""Chunks that come layer by layer, message by message: what decode takes, and what it refuses."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from disagg import KVPoll
from disagg.protocol.events import Received, Tick
from disagg.protocol.rooms.offered import LayerRange
from tests.disagg.protocol.pair import Pair
from tests.disagg.protocol.test_machines import Work


@pytest.fixture
def pair():
    pair = Pair(layers=range(4))
    pair.request()
    pair.pump()
    return pair


def offered(pair, *parts):
    """What prefill says of parts `(tokens, layers, last)`; decode has heard nothing of it."""
    for tokens, layers, last in parts:
        pair.offer(tokens, last, layers=layers)
    return pair.lose(pair.prefill)


def hear(pair, *messages):
    for message in messages:
        pair.tell(pair.decode, Received(0, message))


def test_success_needs_every_position_of_every_layer(pair):
    parts = [(range(30), range(n, n + 1), n == 3) for n in range(4)]
    parts = offered(pair, *parts)
    for number, message in enumerate(parts):
        assert message.layers == LayerRange("target", number, number + 1)
        hear(pair, message)
        pair.finish()
        assert pair.decode.room("r").layer_ready("target", number)
        assert pair.polls()[0] is (KVPoll.Success if number == 3 else KVPoll.Transferring)
    assert pair.polls() == (KVPoll.Success, KVPoll.Success)


def test_a_layer_is_ready_when_its_reads_have_ended_and_not_those_of_others(pair):
    hear(pair, *offered(pair, (range(16), None, False), (range(16, 30), range(1), False)))
    first, second = pair.reads
    assert not pair.decode.room("r").layer_ready("target", 0)
    pair.reads = [first]
    pair.read()
    assert not pair.decode.room("r").layer_ready("target", 0)
    hear(pair, *offered(pair, (range(16, 30), range(1, 4), True)))
    third = pair.reads.pop()
    pair.reads = [second]
    pair.read()
    assert [pair.decode.room("r").layer_ready("target", n) for n in range(2)] == [True, False]
    assert (third.tokens, third.layers) == (range(16, 30), LayerRange("target", 1, 4))


def test_parts_that_come_twice_change_nothing(pair):
    halves = [(range(16), range(low, low + 2), False) for low in (0, 2)]
    ready = offered(pair, *halves, (range(16, 30), None, True))
    hear(pair, *(again for message in ready for again in (message, ready[0], message)))
    assert len(pair.reads) == 3
    pair.finish()
    assert pair.polls() == (KVPoll.Success, KVPoll.Success)


WRONG = {
    "a layer twice": ((0, 16, False, (1, 3)), "target layer 1 of chunk 0 to 16 were sent already"),
    "all layers after some": ((0, 16, False, None), "target layers 0-1 of chunk 0 to 16 were sent"),
    "a hole at the end": ((0, 16, True, (2, 3)), "target layer 3 of chunk 0 to 16 were not sent"),
    "a hole before the next": (
        (16, 30, True, None),
        "target layers 2-3 of chunk 0 to 16 were not sent yet, got chunk 16 to 30",
    ),
    "backwards": ((3, 2, False, (2, 4)), "not sent yet, got chunk 3 to 2"),
}


@pytest.mark.parametrize(("wrong", "reason"), WRONG.values(), ids=WRONG)
def test_a_prefill_that_repeats_layers_or_leaves_them_out_fails_the_room(pair, wrong, reason):
    (good,) = offered(pair, (range(16), range(2), False))
    hear(pair, good)
    start, stop, last, layers = wrong
    some = LayerRange("target", *layers) if layers else None
    hear(pair, replace(good, start=start, stop=stop, last=last, layers=some))
    failure = pair.decode.failure("r")
    assert failure.kind == "protocol"
    assert reason in failure.reason
    pair.finish()
    assert pair.polls() == (KVPoll.Failed, KVPoll.Failed)


def test_a_lost_part_never_ends_in_success(pair):
    ready = offered(pair, *((range(30), range(n, n + 1), n == 3) for n in range(4)))
    hear(pair, *ready[:1], *ready[2:])
    pair.read()
    assert "target layer 1 of chunk 0 to 30 were not sent" in pair.decode.failure("r").reason


def test_ranges_of_layers_that_nobody_holds_cost_no_memory(pair):
    (good,) = offered(pair, (range(16), range(2), False))
    hear(pair, good)
    room = pair.decode.rooms()["r"]
    for start in range(4, 1000):
        hear(pair, replace(good, layers=LayerRange("target", start, 1 << 40)))
        hear(pair, replace(good, layers=LayerRange(f"owner {start}", 0, 1 << 40)))
    assert len(room.seen) == len(pair.reads) == 1
    assert pair.decode.failure("r") is None


def test_parts_are_offered_when_the_device_has_computed_them(pair):
    works = [Work() for _ in range(4)]
    for layer, work in enumerate(works):
        pair.offer(last=layer == 3, after=work, layers=range(layer, layer + 1))
    for layer, work in enumerate(works):
        pair.pump()
        assert len(pair.reads) == layer
        work.over = True
        pair.tell(pair.prefill, Tick())
    pair.pump()
    assert [read.layers.start for read in pair.reads] == [0, 1, 2, 3]


@pytest.mark.parametrize("part", [0, 3])
def test_a_lease_that_ends_between_parts_voids_what_was_read(part):
    pair = Pair(lease=5.0, layers=range(4))
    pair.request()
    for layer in range(part + 1):
        pair.offer(last=layer == 3, layers=range(layer, layer + 1))
        pair.wait(3.0)  # each part begins the lease anew
    assert pair.polls() == (KVPoll.Transferring, KVPoll.Transferring)
    pair.wait(6.0)
    assert pair.prefill.failure("r").kind == "lease"
    assert pair.polls() == (KVPoll.Failed, KVPoll.Failed)
    assert not pair.prefill.leases().leased
    pair.read()
    assert not pair.decode.room("r").layer_ready("target", 0)
