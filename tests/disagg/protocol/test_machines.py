"""Both machines past the hello, their messages carried by hand: events in, effects out."""

from __future__ import annotations

import pytest

from disagg import KVPoll, Phase, UnknownRoom
from disagg.protocol import messages
from disagg.protocol.events import DigestComputed, ReadEnded, Received, Tick
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


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_room_that_is_not_known_is_the_callers_error_on_either_side(pair, side):
    machine = getattr(pair, side)
    for call in (
        lambda: machine.poll("typo"),
        lambda: machine.failure("typo"),
        lambda: machine.room("typo").waits_for,
        lambda: pair.abort(machine, name="typo"),
        lambda: pair.forget(machine, name="typo"),
    ):
        with pytest.raises(UnknownRoom, match=r"'typo' is not known here: .* makes it known"):
            call()
    assert not machine.rooms()
    assert pair.prefill.computed("typo") == 0


def test_chunks_of_a_room_that_decode_gave_up_are_answered_so_that_pages_come_back(pair):
    pair.ask()
    pair.abort(pair.decode)
    pair.lose(pair.decode)
    pair.serve(range(30), True)
    assert pair.prefill.poll("r") is KVPoll.Failed
    assert "no longer asks" in str(pair.prefill.failure("r"))


def test_a_released_room_that_was_never_done_is_no_success(pair):
    pair.ask()
    attempt = pair.decode.rooms()["r"].attempt
    ack = messages.ReleaseAck(generation="p", room="r", attempt=attempt, leased=True)
    pair.tell(pair.decode, Received(0, ack))
    assert pair.decode.poll("r") is KVPoll.Failed


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_digests_that_cannot_be_made_fail_the_room_by_name(side):
    pair = Pair(verify=True)
    pair.request()
    pair.serve(range(30), True)
    pair.tell(pair.decode, ReadEnded(pair.reads[0], None))
    assert pair.decode.rooms()["r"].phase is Phase.VERIFYING
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
    assert {*table} <= {*Phase}
    for phase, events in table.items():
        assert (RoomEvent.FAILED in events) != phase.poll.ended
        assert {*events.values()} <= ({phase} if phase.poll.ended else {*table})
    reached = {Phase.HANDSHAKE}.union(*(events.values() for events in table.values()))
    assert reached == {*table}


def test_an_event_that_cannot_happen_is_refused_by_side_phase_and_name(pair):
    pair.request()
    pair.offer()
    for machine, side in ((pair.decode, "decode"), (pair.prefill, "prefill")):
        room = machine.rooms()["r"]
        with pytest.raises(ProtocolError) as error:
            room.move(RoomEvent.ALL_ACKED)
        phase = room.phase.name
        assert str(error.value) == f"ALL_ACKED cannot happen to a room of {side} in {phase}."
