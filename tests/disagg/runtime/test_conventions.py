"""What two sides say of what their bytes mean: a difference is a refusal by name."""

from __future__ import annotations

import msgspec
import pytest

from disagg import DecodeEndpoint, HandshakeRefused, KVPoll, PrefillEndpoint, create_engine
from disagg.plan import IncompatibleLayouts
from disagg.protocol import codec, messages
from tests import oracle
from tests.disagg.stepping import stepped
from tests.disagg.waiting import until
from tests.pools import mla

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
        "settings on both sides."
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
            or f"not compared is what only one side says: {', '.join(alone)}" in caplog.text
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
    ({f"n{number}": 1 for number in range(65)}, "65 names, at most 64 are sent"),
]


@pytest.mark.parametrize(("given", "why"), WRONG)
def test_what_cannot_be_sent_is_the_callers_error_and_malformed_of_a_peer(given, why):
    with pytest.raises(ValueError, match=why):
        DecodeEndpoint(mla().layout, create_engine("local"), conventions=given)
    hello = messages.Hello(
        protocol=messages.PROTOCOL,
        generation="g",
        engine="local",
        layout=b"",
        metadata=b"",
        timeout=10.0,
    )
    fields = msgspec.msgpack.decode(codec.encode(hello)) | {"conventions": given}
    with pytest.raises(messages.WireError, match="malformed"):
        codec.decode(msgspec.msgpack.encode(fields))
