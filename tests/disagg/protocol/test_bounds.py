"""Every room ends within its bound, whatever message is lost; what forgotten rooms leave behind."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from disagg import Failure, KVPoll, Phase
from disagg.digest.digest import from_wire, to_wire
from disagg.protocol import codec, messages
from disagg.protocol.decode import DecodeMachine
from disagg.protocol.events import ConnectLink, DigestComputed, Received, RejectRoom, Send, Tick
from disagg.protocol.peers.link import Link
from disagg.protocol.prefill import PrefillMachine
from disagg.protocol.rooms import prefill_rooms
from tests import oracle
from tests.disagg.protocol.pair import TIMEOUT, Pair, asks, hello, pool

OFFER = 3.0


def aborts(pair, machine):
    return [m for m in pair.queues[machine] if isinstance(m, messages.Abort)]


# decode's own bound


def in_handshake(pair):
    pair.link = Link(("y", "z"))
    pair.tell(pair.decode, ConnectLink(pair.link))
    pair.tell(pair.decode, Received(1, hello("p")))  # and rank 1 never answers
    pair.request()
    return "the hello of rank 1 of prefill (z)"


def request_lost(pair):
    pair.request()
    pair.lose(pair.decode)
    return "chunks from position 0 on, of rank 0 of prefill (x)"


def last_chunk_lost(pair):
    pair.request()
    pair.serve(range(16), False)
    pair.offer(range(16, 30))
    pair.lose(pair.prefill)
    pair.read()
    return "chunks from position 16 on, of rank 0 of prefill (x)"


def digests_lost(pair):
    read_all(pair)
    pair.lose(pair.decode)
    (digest,) = pair.digests[pair.decode]
    pair.tell(pair.decode, DigestComputed(digest.key, b"\0" * 8 * len(digest.pieces)))
    return "digests of rank 0 of prefill (x)"


def ack_lost(pair):
    read_all(pair)
    pair.lose(pair.decode)
    return "the ack of rank 0 of prefill (x)"


def read_all(pair):
    pair.request()
    pair.serve()
    pair.read()


@pytest.mark.parametrize(
    ("lost", "phase"),
    [
        (in_handshake, Phase.HANDSHAKE),
        (request_lost, Phase.REQUESTED),
        (last_chunk_lost, Phase.TRANSFERRING),
        (digests_lost, Phase.VERIFYING),
        (ack_lost, Phase.RELEASING),
    ],
)
def test_a_room_of_decode_in_which_nothing_happens_fails_and_says_what_it_waited_for(lost, phase):
    pair = Pair(verify=phase is Phase.VERIFYING, offer_timeout=OFFER)
    pair.now = 5.0
    waits_for = lost(pair)
    room = pair.decode.rooms.by_name["r"]
    assert room.phase is phase
    pair.now += OFFER
    pair.tell(pair.decode, Tick())
    assert pair.decode.failure("r") is None
    pair.now += OFFER / 8
    pair.tell(pair.decode, Tick())
    failure = pair.decode.failure("r")
    assert (failure.side, failure.kind) == ("decode", "timeout")
    assert failure.reason == f"nothing has happened for 3 s: it waits for {waits_for}."
    told = [] if phase is Phase.HANDSHAKE else [failure.reason]
    assert [abort.reason for abort in aborts(pair, pair.decode)] == told


def test_what_happens_in_a_room_begins_its_bound_anew_and_a_read_in_flight_is_not_counted():
    pair = Pair(offer_timeout=OFFER)
    pair.ask()
    for stop in (10, 20):
        pair.now += 0.9 * OFFER
        pair.serve(range(stop - 10, stop), False)
    pair.wait(3 * OFFER)
    assert pair.decode.poll("r") is KVPoll.Transferring
    pair.read()
    pair.wait(0.9 * OFFER)
    assert pair.decode.poll("r") is KVPoll.Transferring
    pair.wait(0.3 * OFFER)
    assert pair.polls() == (KVPoll.Failed, KVPoll.Failed)


# what a decode may ask of prefill


def digest_request(pair):
    """Decode's request for digests, taken from the wire."""
    read_all(pair)
    (request,) = (m for m in pair.lose(pair.decode) if isinstance(m, messages.DigestRequest))
    return request


def test_more_digests_than_prefill_has_regions_are_refused_before_one_is_computed():
    pair = Pair(verify=True)
    request = digest_request(pair)
    asked = from_wire(request.pieces)
    regions = len(pool().layout.regions)
    assert len(asked) == regions
    many = msgspec.structs.replace(request, pieces=to_wire(asked + asked[:1]))
    pair.tell(pair.prefill, Received(pair.peer, many))
    assert not pair.digests[pair.prefill]
    (refused,) = pair.queues[pair.prefill]
    assert f"{regions + 1} pieces: at most {regions} are digested at once" in refused.reasons[0]


def test_a_decode_gets_the_digests_of_a_room_once_and_those_of_its_entries_once():
    pair = Pair(verify=True)
    request = digest_request(pair)
    finer = msgspec.structs.replace(request, each=True)
    for _ in range(3):
        for message in (request, finer):
            pair.tell(pair.prefill, Received(pair.peer, message))
        for digest in pair.digests[pair.prefill]:
            pair.tell(pair.prefill, DigestComputed(digest.key, b""))
    assert [digest.each for digest in pair.digests[pair.prefill]] == [False, True]


# prefill's lease


def test_a_room_that_was_asked_for_and_not_yet_computed_has_no_lease_and_without_a_bound_waits():
    pair = Pair(lease=6.0)
    pair.ask()
    pair.wait(30.0, step=1.0)
    assert pair.polls() == (KVPoll.WaitingForInput, KVPoll.WaitingForInput)
    pair.serve()
    assert pair.polls() == (KVPoll.Transferring, KVPoll.Transferring)


def test_a_room_that_was_not_computed_ends_once_no_decode_waits_for_it_any_more():
    """Their aborts were lost."""
    prefill = PrefillMachine(hello("p"), pool().layout, None, now=0.0)
    for now, peer in ((0.0, b"1"), (5.0, b"2")):
        prefill.handle(Received(peer, hello(f"d{peer}")), now)
        prefill.handle(Received(peer, asks(readers=3, timeout=6.0)), now)
    alive = [Received(peer, messages.Ping(generation="p")) for peer in (b"1", b"2")]
    for now in np.arange(5.0, 11.0 + TIMEOUT, TIMEOUT / 4).tolist():
        for event in (*alive, Tick()):
            prefill.handle(event, now)
        assert prefill.poll("r") is KVPoll.WaitingForInput
    for event in (*alive, Tick()):
        prefill.handle(event, 11.5 + TIMEOUT)
    assert prefill.failure("r") == Failure(
        "prefill", "no chunk of it was sent while the decodes that asked for it waited.", "timeout"
    )


# names of forgotten rooms


@pytest.fixture
def pair():
    return Pair()


@pytest.mark.parametrize("known", ["nobody has heard of it", "decode has asked", "forgotten"])
def test_a_decode_is_told_why_a_room_was_rejected(pair, known):
    if known == "decode has asked":
        pair.ask()
    pair.tell(pair.prefill, RejectRoom("r", "too long"))
    if known == "forgotten":
        pair.forget(pair.prefill)
    if known != "decode has asked":
        pair.request()
    pair.pump()
    assert str(pair.decode.failure("r")) == "prefill: too long"


def test_a_room_that_has_ended_is_not_rejected(pair):
    pair.hand_over()
    pair.tell(pair.prefill, RejectRoom("r", "too long"))
    pair.pump()
    assert pair.polls() == (KVPoll.Success, KVPoll.Success)


@pytest.mark.parametrize("who", ["prefill", "decode", "nobody"])
def test_a_decode_that_knew_how_a_room_ended_before_it_was_forgotten_may_use_the_name_again(
    pair, who
):
    if who == "nobody":
        pair.hand_over()
    else:
        pair.ask()
        pair.abort(getattr(pair, who))
        pair.pump()
    pair.forget(pair.prefill, pair.decode)
    pair.ask()
    assert pair.polls() == (KVPoll.WaitingForInput, KVPoll.WaitingForInput)


def test_a_new_chunk_ends_the_memory_of_a_failed_room(pair):
    pair.fail_and_forget()
    pair.serve()
    pair.ask()
    assert pair.polls() == (KVPoll.Transferring, KVPoll.Transferring)


class Readers:
    """A prefill, and decodes that have said hello, by peer."""

    def __init__(self, **generations) -> None:
        self.now = 0.0
        self.pair = Pair()
        self.prefill = self.pair.prefill
        for peer, generation in generations.items():
            self.told(peer, hello(generation))

    def fail_and_forget(self, reason="gave up", name="r") -> None:
        self.pair.abort(self.prefill, reason, name)
        self.pair.forget(self.prefill, name=name)

    def told(self, peer, message) -> list:
        """What prefill answers to a message."""
        effects = self.prefill.handle(Received(peer.encode(), message), self.now)
        sent = [effect for effect in effects if isinstance(effect, Send)]
        return [codec.decode(s.data) for s in sent if s.peer == peer.encode()]

    def ask(self, peer, attempt, readers=2, name="r") -> list[str]:
        """Asks for a room; the reasons of aborts."""
        answers = self.told(peer, asks(room=name, attempt=attempt, readers=readers))
        return [m.reason for m in answers if isinstance(m, messages.Abort)]


def test_of_two_readers_each_is_told_once_and_the_others_may_retry_meanwhile():
    world = Readers(one="g1", two="g2")
    assert world.ask("one", "a1") == []
    world.fail_and_forget()
    assert world.ask("one", "a2") == []  # it was told when the room failed: this is a new use
    assert world.ask("two", "b1") == ["gave up"]  # of the first use, for all that it knows
    assert world.ask("two", "b2") == []
    assert world.prefill.rooms.by_name["r"].requests.keys() == {b"one", b"two"}


def test_a_decode_that_has_restarted_is_another_one_and_is_told_as_well():
    world = Readers(one="g1", again="g1", restarted="g2")
    world.ask("one", "a1")
    world.fail_and_forget()
    assert world.ask("restarted", "b1") == ["gave up"]
    assert world.ask("restarted", "b2") == []
    world.fail_and_forget("again")
    # the same generation over another connection
    assert world.ask("again", "a2") == ["again"]
    assert world.ask("again", "a3") == []


@pytest.mark.parametrize("readers", [("one",), ("one", "two")], ids=["one reader", "two readers"])
def test_a_name_is_free_for_any_decode_once_every_reader_of_the_failed_room_knows(readers):
    world = Readers(one="g1", two="g2", other="g3")
    for peer in readers:
        world.ask(peer, peer, len(readers))
    world.fail_and_forget()
    assert world.ask("other", "c1", len(readers)) == []


def test_no_more_decodes_are_told_than_the_failed_room_had_readers():
    world = Readers(one="g1", two="g2", other="g3")
    world.pair.offer()
    world.pair.abort(world.prefill)
    assert world.ask("one", "a1") == ["gave up"]
    world.pair.forget(world.prefill)
    assert world.ask("two", "b1") == ["gave up"]
    assert world.ask("other", "c1") == []


@pytest.mark.parametrize("lease", [300.0, None])
def test_pages_do_not_wait_for_the_lease_if_who_asked_for_them_was_told_of_an_earlier_room(lease):
    pair = Pair(lease=lease)
    pair.fail_and_forget()
    pair.ask()
    assert str(pair.decode.failure("r")) == "prefill: gave up"
    for tokens in (range(16), range(16, 30)):
        pair.offer(tokens, tokens.stop == 30)
        pair.wait(TIMEOUT / 2)
        assert pair.prefill.poll("r") is KVPoll.Bootstrapping
    pair.wait(TIMEOUT * 3 / 4)
    failure = pair.prefill.failure("r")
    assert failure.kind == "lease"
    assert failure.reason == (
        "its lease ended: a decode was told of an earlier room of this name, and no decode asked "
        "for it within 10 s."
    )


def test_a_retry_has_its_whole_lease_once_a_decode_has_asked():
    pair = Pair(lease=300.0)
    pair.fail_and_forget()
    pair.ask()
    pair.forget(pair.decode)
    pair.offer()
    pair.request()
    pair.wait(3 * TIMEOUT)
    assert pair.polls() == (KVPoll.Transferring, KVPoll.Transferring)
    pair.finish()
    assert pair.polls() == (KVPoll.Success, KVPoll.Success)


def test_a_request_that_comes_twice_is_answered_from_memory_and_opens_no_room():
    world = Readers(one="g1")
    world.pair.offer()
    world.fail_and_forget()
    assert world.ask("one", "a1") == ["gave up"]
    assert world.ask("one", "a1") == []
    assert not world.prefill.rooms.by_name


def test_a_failed_room_is_remembered_for_some_time_and_of_many_the_latest(monkeypatch):
    monkeypatch.setattr(prefill_rooms, "MAX_FORGOTTEN", 3)
    world = Readers(one="g1")
    for name in range(5):
        world.pair.offer(name=name)
        world.fail_and_forget(f"{name}", name)
    assert [world.ask("one", f"{n}", 1, n) for n in range(4)] == [[], [], ["2"], ["3"]]
    world.now = prefill_rooms.FORGOTTEN_SECONDS + 1
    world.told("one", hello("g1"))
    assert world.ask("one", "4", 1, 4) == []


def test_rooms_that_prefill_drops_by_itself_are_remembered_as_well(monkeypatch):
    monkeypatch.setattr("disagg.protocol.rooms.prefill_rooms.MAX_FAILED_UNSENT", 1)
    world = Readers(one="g1", two="g2")
    for name in range(2):
        world.ask("one", f"{name}", 2, name)
        world.pair.abort(world.prefill, f"{name}", name)
    assert [*world.prefill.rooms.by_name] == [1]
    assert world.ask("two", "b", 2, 0) == ["0"]


# a room that fails on decode before prefill was asked for it gives prefill's pages back


FAILED = KVPoll.Failed


def misfit(pair, **changes):
    """The pair with a new decode that has another layout, or says another hello."""
    layout = pool(layers=(5,), total_kv_layers=6).layout
    greeting = replace(hello("d", layout), **changes)
    pair.decode = DecodeMachine(greeting, layout, 1, now=pair.now)
    pair.queues[pair.decode] = []
    pair.link = Link(("y",))
    return pair


@pytest.mark.parametrize("changes", [{}, {"engine": "nixl"}, {"protocol": 1}])
@pytest.mark.parametrize("when", ["before the hello", "after it"])
def test_a_refusal_of_either_side_ends_prefills_room(changes, when):
    """{}: decode refuses the plan. Else prefill refuses the hello."""
    pair = misfit(Pair(), **changes)
    pair.offer()
    pair.tell(pair.decode, ConnectLink(pair.link))
    if when == "after it":
        pair.pump()
        assert pair.prefill.poll("r") is KVPoll.Bootstrapping
    pair.ask()
    assert pair.polls() == (FAILED, FAILED)
    assert not pair.prefill.rooms.leases().leased
    why = pair.prefill.failure("r")
    assert (why.side, why.kind) == ("decode", "abort")
    assert why.reason == " ".join(pair.decode.failure("r").reason.split())


def test_a_room_that_is_aborted_before_prefill_has_answered_is_ended_there():
    pair = Pair()
    pair.offer()
    pair.link = Link(("y",))
    pair.tell(pair.decode, ConnectLink(pair.link))
    pair.request()
    pair.abort(pair.decode)
    pair.pump()
    assert pair.polls() == (FAILED, FAILED)
    assert pair.prefill.failure("r").reason == "gave up"


def test_who_is_no_reader_ends_no_room_that_its_readers_have_asked_for():
    pair = Pair()
    pair.offer()
    pair.ask()
    pair.tell(pair.prefill, Received(b"stranger", messages.DropRoom("r", "no")))
    pair.finish()
    assert pair.polls() == (KVPoll.Success, KVPoll.Success)


def test_rooms_that_nobody_sends_are_kept_in_bounds(monkeypatch):
    monkeypatch.setattr("disagg.protocol.rooms.prefill_rooms.MAX_FAILED_UNSENT", 3)
    prefill = PrefillMachine(hello("p"), pool().layout, now=0.0)
    for number in range(10):
        prefill.handle(Received(b"d", messages.DropRoom(number, "no")), 0.0)
    assert not prefill.rooms.open
    assert len(prefill.rooms.by_name) == 3


def test_every_rank_of_a_prefill_is_told():
    """Rank 0 has another model, rank 1 has not answered."""
    decode = DecodeMachine(hello("d"), pool().layout, 1, now=0.0)
    link = Link(("x", "y"))
    decode.handle(ConnectLink(link), 0.0)
    pair = Pair()
    pair.decode, pair.link, pair.queues[decode] = decode, link, []
    pair.request(table=oracle.place(pool(), 30))
    pair.tell(decode, Received(0, replace(hello("p"), engine="nixl")))
    told = [message for message in pair.lose(decode) if isinstance(message, messages.DropRoom)]
    assert [message.room for message in told] == ["r", "r"]
