"""Two releases at one link: which number they speak, and what is refused. What each number says, as
bytes, is in tests/compat.
"""

from __future__ import annotations

import msgspec
import pytest

from disagg import KVPoll
from disagg.protocol import codec, messages, versions
from disagg.protocol.decode import DecodeMachine
from disagg.protocol.events import ConnectLink, Received, Send
from disagg.protocol.peers.link import Link
from disagg.protocol.prefill import PrefillMachine
from disagg.protocol.versions import EARLIER, PROTOCOL, spoken
from tests.disagg.protocol.pair import Pair, asks, hello, pool
from tests.disagg.protocol.test_handshakes import answers

OLD = PROTOCOL - 1
LOWEST = spoken(PROTOCOL)[0]
PEERS = range(LOWEST, spoken(PROTOCOL)[-1] + EARLIER + 1)
"""The highest numbers of releases with which today's has one in common."""


def of(number, generation, **more):
    """A hello of an endpoint whose highest number is that."""
    return msgspec.structs.replace(hello(generation), protocol=number, **more)


def refusal(own, peer):
    return messages.Refuse([f"protocol {own} here, {peer} there. Whatever a release says of it."])


class Dialled:
    """A decode that has dialled one prefill, and the hellos that it has said."""

    def __init__(self, number=PROTOCOL, **more) -> None:
        self.machine = DecodeMachine(of(number, "d", **more), pool().layout, 1, now=0.0)
        self.link, self.hellos = Link(("x",)), []
        self.tell(ConnectLink(self.link))

    def tell(self, event, now=0.0) -> None:
        for effect in self.machine.handle(event, now):
            if isinstance(effect, Send):
                message = codec.decode(effect.data)
                if isinstance(message, messages.Hello):
                    self.hellos.append(message.protocol)

    def hears(self, message, now=0.0) -> None:
        self.tell(Received(0, message), now)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (PROTOCOL, PROTOCOL),
        *((peer, PROTOCOL) for peer in PEERS if peer != PROTOCOL),
        *((PROTOCOL, peer) for peer in PEERS if peer != PROTOCOL),
    ],
)
def test_releases_that_follow_one_another_speak_the_highest_number_that_both_know(
    prefill, decode, monkeypatch
):
    monkeypatch.setattr("tests.disagg.protocol.pair.PROTOCOLS", (prefill, decode))
    pair = Pair(verify=True)
    assert pair.link.refusal is None
    assert pair.link.ranks[0].hello.protocol == min(prefill, decode)
    pair.ask()
    assert pair.polls() == (KVPoll.WaitingForInput, KVPoll.WaitingForInput)


@pytest.mark.parametrize("apart", [EARLIER + 1, EARLIER + 2, -EARLIER - 1])
def test_releases_that_do_not_are_refused_with_both_numbers(apart, monkeypatch):
    monkeypatch.setattr("tests.disagg.protocol.pair.PROTOCOLS", (PROTOCOL, PROTOCOL + apart))
    pair = Pair()
    reason = f"protocol {PROTOCOL} here, {PROTOCOL + apart} there. This kvpool speaks {LOWEST} to"
    assert pair.link.refusal.startswith(reason)
    (listed,) = pair.prefill.peers.refusals
    assert reason in listed


def test_a_refused_number_is_said_again_once_and_lower():
    decode = Dialled()
    decode.hears(refusal(OLD, PROTOCOL))
    assert decode.hellos == [PROTOCOL, OLD]
    assert decode.link.refusal is None
    decode.hears(refusal(OLD, OLD))  # of a prefill that contradicts itself
    assert decode.hellos == [PROTOCOL, OLD]
    assert decode.link.refusal.startswith(f"protocol {OLD} here, {OLD} there")


@pytest.mark.parametrize(
    "reason",
    [
        f"protocol {LOWEST - 1} here, {PROTOCOL} there.",
        f"protocol {PROTOCOL + 1} here, {PROTOCOL} there.",
        "engine 'nixl' here, 'local' there.",
        "protocol six here, 7 there.",
        f"protocol {'9' * 5000} here, 7 there.",
    ],
)
def test_other_refusals_are_final(reason):
    decode = Dialled()
    decode.hears(messages.Refuse([reason]))
    assert decode.hellos == [PROTOCOL]
    assert decode.link.refusal == reason


def test_a_rank_that_is_back_may_be_of_another_release():
    """It was replaced by a newer one, or by an older one, while it was gone."""
    decode = Dialled()
    decode.hears(refusal(OLD, PROTOCOL))
    decode.hears(of(OLD, "old"))
    assert decode.link.plan is not None
    decode.hears(messages.UnknownPeer(generation="old"))
    assert decode.hellos == [PROTOCOL, OLD, PROTOCOL]
    decode.hears(of(PROTOCOL, "new"))
    assert decode.link.ranks[0].hello.protocol == PROTOCOL
    decode.hears(messages.UnknownPeer(generation="new"))
    decode.hears(refusal(OLD, PROTOCOL))
    decode.hears(of(OLD, "old again"))
    assert decode.link.plan is not None
    assert decode.link.lost is None


def test_an_answer_in_another_number_than_the_hellos_is_refused():
    decode = Dialled()
    decode.hears(of(OLD, "p"))
    assert decode.link.refusal.startswith(f"protocol {PROTOCOL} here, {OLD} there")


def test_a_hello_with_what_its_number_lacks_is_malformed(monkeypatch):
    monkeypatch.setitem(versions.LACKED, OLD, versions.lacked_by(OLD) | {"hello.conventions"})
    said = of(OLD, "d", conventions={"model": "llama"})
    prefill = PrefillMachine(hello("p"), pool().layout, now=0.0)
    (refused,) = answers(prefill, b"d", said)
    assert not refused.final
    assert f"protocol {OLD}, which it speaks, has no hello.conventions" in refused.why
    decode = Dialled()
    decode.hears(refusal(OLD, PROTOCOL))
    decode.hears(of(OLD, "p", conventions={"model": "llama"}))
    assert "has no hello.conventions" in decode.link.lost


def test_messages_and_fields_of_a_later_number_are_neither_sent_nor_taken(monkeypatch):
    """As if `Pong` and `ReadRequest.timeout` had come with the current number."""
    lacked = versions.lacked_by(OLD) | {"pong", "read_request.timeout"}
    monkeypatch.setitem(versions.LACKED, OLD, lacked)
    prefill = PrefillMachine(hello("p"), pool().layout, now=0.0)
    answers(prefill, b"old", of(OLD, "d"))
    answers(prefill, b"new", of(PROTOCOL, "e"))
    ping = messages.Ping(generation="p")
    assert not answers(prefill, b"old", ping)
    assert answers(prefill, b"new", ping) == [messages.Pong(generation="p")]
    assert not answers(prefill, b"new", asks(timeout=30.0))
    (refused,) = answers(prefill, b"old", asks(room="s", timeout=30.0))
    assert "has no read_request.timeout" in refused.why
    fields = msgspec.msgpack.decode(codec.encode(asks(timeout=30.0), OLD))
    lacked = {"timeout", "traceparent"}
    assert fields.keys() == {*messages.ReadRequest.__struct_fields__, "type"} - lacked
    decode = Dialled()
    decode.hears(refusal(OLD, PROTOCOL))
    decode.hears(of(OLD, "p"))
    decode.hears(messages.Pong(generation="p"))
    assert "has no pong" in decode.link.lost
