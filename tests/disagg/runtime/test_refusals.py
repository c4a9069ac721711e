"""A hello that prefill refuses is refused on both sides, listed and logged with its origin; so
is a difference in what two sides say of what their bytes mean.
"""

from __future__ import annotations

import os

import msgspec
import pytest

from disagg import DecodeEndpoint, HandshakeRefused, KVPoll, PrefillEndpoint, create_engine
from disagg.plan import IncompatibleLayouts
from disagg.protocol import codec, messages
from disagg.protocol.versions import PROTOCOL, spoken
from tests import oracle
from tests.disagg.protocol import pair
from tests.disagg.stepping import stepped
from tests.disagg.waiting import until
from tests.pools import mla
from tests.streams import dial

OWN = PROTOCOL
LOWEST = spoken(OWN)[0]
UNSPOKEN = LOWEST - 1
OTHERS = [
    {"type": "hello", "protocol": UNSPOKEN, "generation": "old"},
    {"type": "hello", "protocol": OWN + 1, "generation": "old", "layout": [1], "more": {"a": 1}},
]


@pytest.fixture(params=[None, "tcp://127.0.0.1:*"], ids=["unix", "tcp"])
def prefill(request):
    pool = mla()
    tcp = request.param is not None
    with PrefillEndpoint(pool.layout, create_engine("local"), request.param, insecure=tcp) as made:
        yield made


def where(prefill, stream):
    """How the kernel knows this end."""
    if prefill.address.startswith("ipc"):
        return f"process {os.getpid()} of this host"
    return "tcp://{}:{}".format(*stream.socket.getsockname())


@pytest.mark.parametrize("hello", OTHERS)
def test_another_protocol_is_refused_with_both_numbers_listed_and_logged(prefill, hello, caplog):
    said = (
        f"protocol {OWN} here, {hello['protocol']} there. This kvpool speaks {LOWEST} to {OWN}: "
        "run the same release on both sides, or one and the next."
    )
    with dial(prefill.address) as stranger:
        stranger.send(msgspec.msgpack.encode(hello))
        refused = msgspec.msgpack.decode(stranger.receive())
        assert refused == {"type": "refuse", "reasons": [said]}  # as every protocol reads it
        listed = f"decode old ({where(prefill, stranger)}): {said}"
    assert prefill.refusals() == [listed]
    assert f"a decode engine cannot read from here: {listed}" in caplog.text


@pytest.mark.parametrize("generation", [7, [1], None, "a\n\x1b[2Kb" + "x" * 1000])
def test_whose_hello_it_was_is_said_as_far_as_it_can_be_read(prefill, generation, caplog):
    hello = {"type": "hello", "protocol": OWN + 1, "generation": generation}
    with dial(prefill.address) as stranger:
        stranger.send(msgspec.msgpack.encode(hello))
        assert f"{OWN + 1} there" in codec.decode(stranger.receive()).why
    (listed,) = prefill.refusals()
    who = r"a \x1b[2Kbxxx" if isinstance(generation, str) else "of another version"
    assert listed.startswith(f"decode {who}") and listed.isprintable() and len(listed) < 400


def test_a_decode_of_another_protocol_is_told_both_numbers(prefill, monkeypatch):
    monkeypatch.setattr("disagg.runtime.endpoint.PROTOCOL", UNSPOKEN)
    pool = mla()
    with DecodeEndpoint(pool.layout, create_engine("local"), insecure=True) as decode:
        with pytest.raises(HandshakeRefused, match=f"protocol {OWN} here, {UNSPOKEN} there"):
            decode.connect([prefill.address], timeout=20)
        until(prefill, prefill.refusals)
        (listed,) = prefill.refusals()
        assert f"protocol {OWN} here, {UNSPOKEN} there" in listed
        assert listed.startswith(f"decode {decode.layout.generation} (")


def test_another_engine_is_listed_too(prefill, caplog):
    other, pool = create_engine("local"), mla()
    other.name = "other"
    with (
        DecodeEndpoint(pool.layout, other, insecure=True) as decode,
        pytest.raises(
            HandshakeRefused, match="engine 'local' on prefill, 'other' on decode"
        ) as told,
    ):
        decode.connect([prefill.address], timeout=20)
    (listed,) = prefill.refusals()
    assert listed.startswith(f"decode {decode.layout.generation} (")
    assert listed.endswith(f"): {told.value}")
    assert f"a decode engine cannot read from here: {listed}" in caplog.text


def test_a_hello_that_is_refused_again_is_listed_once(prefill, caplog):
    with dial(prefill.address) as stranger:
        for _ in range(3):
            stranger.send(msgspec.msgpack.encode(OTHERS[0]))
            stranger.receive()
    assert len(prefill.refusals()) == 1
    assert caplog.text.count("cannot read from here") == 1


@pytest.mark.parametrize(
    "greeting",
    [b"\xff" + bytes(7) + b"\x01\x7f\x03\x00CURVE", b"\x16\x03\x01\x01\x00\x01\x00\x00\xfc"],
)
def test_what_greets_as_zeromq_or_tls_does_may_have_keys_or_be_an_old_kvpool(
    prefill, greeting, caplog
):
    with dial(prefill.address) as stranger:
        stranger.socket.sendall(greeting)
        assert stranger.closed()
    assert "TLS, and ZeroMQ of an older kvpool with keys, read as such a length" in caplog.text
    assert "are keys set on one side only?" in caplog.text


SAID = {"model": "llama", "rope_theta": 10000.0, "layers": 4}


def refused(prefills, decode_says, build=mla):
    """What decode is told by `connect`, and what each prefill knows of it."""
    sources, dest = [mla() for _ in prefills], build()
    ends = [
        PrefillEndpoint(source.layout, create_engine("local"), conventions=says)
        for source, says in zip(sources, prefills)
    ]
    decode = DecodeEndpoint(dest.layout, create_engine("local"), conventions=decode_says)
    try:
        with pytest.raises((HandshakeRefused, IncompatibleLayouts)) as told:
            decode.connect([each.address for each in ends], timeout=20)
        for each in ends:
            until(each, each.refusals)
        return str(told.value), [each.refusals() for each in ends]
    finally:
        for each in (decode, *ends):
            each.close()


def sentence(name, prefill, decode):
    return (
        f"{name}: {prefill!r} on prefill, {decode!r} on decode. Run the same model with the same "
        "settings on both sides, in the same engine where it is the engine that decides."
    )


def one_line(said):
    """As a peer's text is listed."""
    return " ".join(said.split())


def test_every_difference_is_named_with_both_values_on_both_sides():
    decode = {**SAID, "rope_theta": 500000.0, "layers": "4"}
    said, known = refused([SAID], decode)
    assert said.splitlines() == [
        sentence("layers", 4, "4"),
        sentence("rope_theta", 10000.0, 500000.0),
    ]
    assert known == [[one_line(said)]]


def test_one_rank_of_prefill_that_differs_is_enough_and_all_are_told():
    said, known = refused([SAID, {**SAID, "model": "qwen3"}], SAID)
    assert said == sentence("model", "qwen3", "llama")
    assert known == [[said], [said]]


def test_layouts_that_do_not_fit_are_told_of_too():
    said, known = refused([SAID], {**SAID, "model": "qwen3"}, mla.but(kv_lora_rank=12))
    assert said.startswith(sentence("model", "llama", "qwen3"))
    assert "target layers 0-3 latent: 16 elements per cell on prefill, 12" in said
    assert known == [[one_line(said)]]


def test_a_room_that_waits_for_the_hello_fails_with_the_reason_and_it_is_final():
    with stepped(connected=False, prefill_conventions={"model": "a"},
                 decode_conventions={"model": "b"}) as engine:  # fmt: skip
        engine.links = [engine.decode.connect([engine.prefill.address])]
        source, dest = engine.pools
        engine.prefill.send("r", oracle.place(source, 20))
        engine.decode.receive("r", oracle.place(dest, 20))
        assert engine.step_until_ended("r") == [KVPoll.Failed, KVPoll.Failed]
        assert engine.decode.failure("r").kind == "refused"
        for side in engine.all:
            assert sentence("model", "a", "b") in side.failure("r").reason
        engine.clock.now += 1000
        engine.step(5)
        assert engine.links[0].refusal == sentence("model", "a", "b")


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (SAID, {}),
        ({}, SAID),
        (SAID, {"model": "llama", "revision": "5f0c"}),
        ({"layers": 4}, {"layers": 4.0}),
    ],
)
def test_what_only_one_side_says_is_not_compared(prefill, decode, caplog):
    caplog.set_level("INFO", "disagg")
    with stepped(prefill_conventions=prefill, decode_conventions=decode) as engine:
        assert engine.links[0].refusal is None
        alone = sorted(prefill.keys() ^ decode.keys())
        assert (
            not alone
            or f"not compared, as only one side gives it: {', '.join(alone)}" in caplog.text
        )


WRONG = [
    ({"model": "x" * 257}, "model='x"),
    ({"model": "a\nb"}, "model='a.nb': a number, or a text of at most 256 printable"),
    ({"model": None}, "model=None"),
    ({"model": True}, "model=True"),
    ({"model": [1]}, r"model=\[1\]"),
    ({"theta": float("nan")}, "theta=nan"),
    ({"theta": float("inf")}, "theta=inf"),
    ({"count": 1 << 63}, "count=9223372036854775808"),
    ({"": 1}, "name '': 1 to 128 printable characters"),
    ({"a\nb": 1}, "name 'a.nb': 1 to 128 printable characters"),
    ({"x" * 129: 1}, "name 'x+': 1 to 128 printable characters"),
    ({3: 1}, "name 3: 1 to 128 printable characters"),
    ({f"n{number}": 1 for number in range(1025)}, "1025 names, at most 1024 are sent"),
]


@pytest.mark.parametrize(("given", "why"), WRONG)
def test_what_cannot_be_sent_is_the_callers_error_and_malformed_of_a_peer(given, why):
    with pytest.raises(ValueError, match=why):
        DecodeEndpoint(mla().layout, create_engine("local"), conventions=given)
    fields = msgspec.msgpack.decode(codec.encode(pair.hello("g"))) | {"conventions": given}
    with pytest.raises(messages.WireError, match="malformed"):
        codec.decode(msgspec.msgpack.encode(fields))
