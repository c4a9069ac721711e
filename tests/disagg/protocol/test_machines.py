"""Both machines past the hello, their messages carried by hand: events in, effects out."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from disagg import KVPoll, Phase
from disagg.protocol import messages
from disagg.protocol.events import DigestComputed, ReadEnded, Received, Tick
from disagg.protocol.rooms.offered import LayerRange
from disagg.protocol.status import TRANSITIONS, ProtocolError, RoomEvent
from tests import oracle
from tests.disagg.protocol.pair import Pair, asks, pool


class Work:
    """An event of a device, which ends when the test says so."""

    over = False

    def query(self):
        if isinstance(self.over, Exception):
            raise self.over
        return self.over


@pytest.fixture
def pair():
    return Pair()


def test_messages_of_an_earlier_room_of_the_same_name_do_not_touch_the_new_one(pair):
    pair.ask()
    pair.offer(range(16), False)
    late = pair.lose(pair.prefill)
    pair.abort(pair.decode)
    pair.pump()
    pair.forget(pair.decode, pair.prefill)
    pair.ask()
    for message in late:
        pair.tell(pair.decode, Received(0, message))
    pair.pump()
    assert not pair.reads
    assert pair.polls() == (KVPoll.WaitingForInput, KVPoll.WaitingForInput)


def test_chunks_are_offered_once_the_device_has_computed_them_and_in_order(pair):
    first, second = Work(), Work()
    pair.offer(range(16), False, after=first)
    pair.ask()
    pair.offer(range(16, 30), True, {"token": 7}, second)
    second.over = True  # the first has not ended, so that the second is not looked at
    pair.tell(pair.prefill, Tick())
    pair.pump()
    assert not pair.reads
    assert (pair.prefill.poll("r"), pair.prefill.computed("r")) == (KVPoll.Transferring, 30)
    first.over = True
    pair.tell(pair.prefill, Tick())
    pair.pump()
    assert [read.tokens for read in pair.reads] == [range(16), range(16, 30)]
    pair.finish()
    assert pair.polls() == (KVPoll.Success, KVPoll.Success)


def test_a_reader_that_is_done_with_what_was_not_offered_yet_is_told_no(pair):
    pair.offer(range(30), True, after=Work())
    done = messages.ReadDone(generation="p", room="r", attempt="a")
    for message in (asks(), done):
        pair.tell(pair.prefill, Received(b"d", message))
    assert pair.queues[pair.prefill] == [
        messages.ReleaseAck(generation="p", room="r", attempt="a", leased=False)
    ]


class Odd(Exception):
    """What a device's binding may raise."""


@pytest.mark.parametrize("when", ["in send", "later"])
@pytest.mark.parametrize("kind", [RuntimeError, Odd])
def test_whatever_a_device_raises_fails_its_room_by_name_and_no_other(pair, kind, when):
    work = Work()
    for name in ("r", "other"):
        pair.request(name, oracle.elsewhere(pool(), pair.table) if name == "other" else None)
    pair.offer(range(16), False, name="other", after=Work())
    error = kind("an illegal memory access")
    work.over = error if when == "in send" else False
    pair.offer(after=work)
    work.over = error
    pair.tell(pair.prefill, Tick())
    pair.pump()
    failure = pair.prefill.failure("r")
    assert str(failure) == "prefill: its device failed: an illegal memory access"
    assert (pair.decode.failure("r").reason, failure.kind) == (failure.reason, "device")
    assert pair.polls("other") == (KVPoll.WaitingForInput, KVPoll.Transferring)
    pair.forget(pair.prefill)
    pair.tell(pair.prefill, Tick())


def test_chunks_of_a_room_that_decode_gave_up_are_answered_so_that_pages_come_back(pair):
    pair.ask()
    pair.abort(pair.decode)
    pair.lose(pair.decode)
    pair.serve(range(30), True)
    assert pair.prefill.poll("r") is KVPoll.Failed
    assert "no longer asks" in str(pair.prefill.failure("r"))


def test_a_released_room_that_was_never_done_is_no_success(pair):
    pair.ask()
    attempt = pair.decode.rooms.by_name["r"].attempt
    ack = messages.ReleaseAck(generation="p", room="r", attempt=attempt, leased=True)
    pair.tell(pair.decode, Received(0, ack))
    assert pair.decode.poll("r") is KVPoll.Failed


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_digests_that_cannot_be_made_fail_the_room_by_name(side):
    pair = Pair(verify=True)
    pair.request()
    pair.serve(range(30), True)
    pair.tell(pair.decode, ReadEnded(pair.reads[0], None))
    assert pair.decode.rooms.by_name["r"].phase is Phase.VERIFYING
    pair.pump()
    (digest,) = pair.digests[getattr(pair, side)]
    pair.tell(getattr(pair, side), DigestComputed(digest.key, None, "no such memory"))
    pair.pump()
    assert pair.decode.failure("r").kind == "digest"
    assert pair.decode.failure("r").reason.endswith("no such memory")
    assert pair.polls() == (KVPoll.Failed, KVPoll.Failed)


@pytest.mark.parametrize("side", TRANSITIONS)
def test_every_phase_has_a_state_and_an_end_and_is_reached(side):
    table = TRANSITIONS[side]
    reached = {Phase.HANDSHAKE, *table.values()}
    assert {phase for phase, _ in table} <= reached
    for phase in reached:
        assert ((phase, RoomEvent.FAILED) in table) != phase.poll.ended
    assert all(after is phase for (phase, _), after in table.items() if phase.poll.ended)


def test_an_event_that_cannot_happen_is_refused_by_side_phase_and_name(pair):
    pair.request()
    pair.offer()
    for machine, side in ((pair.decode, "decode"), (pair.prefill, "prefill")):
        room = machine.rooms.by_name["r"]
        with pytest.raises(ProtocolError) as error:
            room.move(RoomEvent.ALL_ACKED)
        phase = room.phase.name
        assert str(error.value) == f"ALL_ACKED cannot happen to a room of {side} in {phase}."


# chunks that come layer by layer, message by message: what decode takes, and what it refuses


@pytest.fixture
def layered():
    layered = Pair(layers=range(4))
    layered.request()
    layered.pump()
    return layered


def offered(layered, *parts):
    """What prefill says of parts `(tokens, layers, last)`; decode has heard nothing of it."""
    for tokens, layers, last in parts:
        layered.offer(tokens, last, layers=layers)
    return layered.lose(layered.prefill)


def hear(layered, *messages):
    for message in messages:
        layered.tell(layered.decode, Received(0, message))


def test_success_needs_every_position_of_every_layer(layered):
    parts = [(range(30), range(n, n + 1), n == 3) for n in range(4)]
    parts = offered(layered, *parts)
    for number, message in enumerate(parts):
        assert message.layers == LayerRange("target", number, number + 1)
        hear(layered, message)
        layered.finish()
        assert layered.decode.rooms.known("r").layer_ready("target", number)
        assert layered.polls()[0] is (KVPoll.Success if number == 3 else KVPoll.Transferring)
    assert layered.polls() == (KVPoll.Success, KVPoll.Success)


def test_a_layer_is_ready_when_its_reads_have_ended_and_not_those_of_others(layered):
    hear(layered, *offered(layered, (range(16), None, False), (range(16, 30), range(1), False)))
    first, second = layered.reads
    assert not layered.decode.rooms.known("r").layer_ready("target", 0)
    layered.reads = [first]
    layered.read()
    assert not layered.decode.rooms.known("r").layer_ready("target", 0)
    hear(layered, *offered(layered, (range(16, 30), range(1, 4), True)))
    third = layered.reads.pop()
    layered.reads = [second]
    layered.read()
    assert [layered.decode.rooms.known("r").layer_ready("target", n) for n in range(2)] == [
        True,
        False,
    ]
    assert (third.tokens, third.layers) == (range(16, 30), LayerRange("target", 1, 4))


def test_parts_that_come_twice_change_nothing(layered):
    halves = [(range(16), range(low, low + 2), False) for low in (0, 2)]
    ready = offered(layered, *halves, (range(16, 30), None, True))
    hear(layered, *(again for message in ready for again in (message, ready[0], message)))
    assert len(layered.reads) == 3
    layered.finish()
    assert layered.polls() == (KVPoll.Success, KVPoll.Success)


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
def test_a_prefill_that_repeats_layers_or_leaves_them_out_fails_the_room(layered, wrong, reason):
    (good,) = offered(layered, (range(16), range(2), False))
    hear(layered, good)
    start, stop, last, layers = wrong
    some = LayerRange("target", *layers) if layers else None
    hear(layered, replace(good, start=start, stop=stop, last=last, layers=some))
    failure = layered.decode.failure("r")
    assert failure.kind == "protocol"
    assert reason in failure.reason
    layered.finish()
    assert layered.polls() == (KVPoll.Failed, KVPoll.Failed)


def test_a_lost_part_never_ends_in_success(layered):
    ready = offered(layered, *((range(30), range(n, n + 1), n == 3) for n in range(4)))
    hear(layered, *ready[:1], *ready[2:])
    layered.read()
    assert "target layer 1 of chunk 0 to 30 were not sent" in layered.decode.failure("r").reason


def test_ranges_of_layers_that_nobody_holds_cost_no_memory(layered):
    (good,) = offered(layered, (range(16), range(2), False))
    hear(layered, good)
    room = layered.decode.rooms.by_name["r"]
    for start in range(4, 1000):
        hear(layered, replace(good, layers=LayerRange("target", start, 1 << 40)))
        hear(layered, replace(good, layers=LayerRange(f"owner {start}", 0, 1 << 40)))
    assert len(room.seen) == len(layered.reads) == 1
    assert layered.decode.failure("r") is None


def test_parts_are_offered_when_the_device_has_computed_them(layered):
    works = [Work() for _ in range(4)]
    for layer, work in enumerate(works):
        layered.offer(last=layer == 3, after=work, layers=range(layer, layer + 1))
    for layer, work in enumerate(works):
        layered.pump()
        assert len(layered.reads) == layer
        work.over = True
        layered.tell(layered.prefill, Tick())
    layered.pump()
    assert [read.layers.start for read in layered.reads] == [0, 1, 2, 3]


@pytest.mark.parametrize("part", [0, 3])
def test_a_lease_that_ends_between_parts_voids_what_was_read(part):
    layered = Pair(lease=5.0, layers=range(4))
    layered.request()
    for layer in range(part + 1):
        layered.offer(last=layer == 3, layers=range(layer, layer + 1))
        layered.wait(3.0)  # each part begins the lease anew
    assert layered.polls() == (KVPoll.Transferring, KVPoll.Transferring)
    layered.wait(6.0)
    assert layered.prefill.failure("r").kind == "lease"
    assert layered.polls() == (KVPoll.Failed, KVPoll.Failed)
    assert not layered.prefill.rooms.leases().leased
    layered.read()
    assert not layered.decode.rooms.known("r").layer_ready("target", 0)
