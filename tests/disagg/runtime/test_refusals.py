"""A hello that prefill refuses is refused on both sides, and listed and logged with its origin."""

from __future__ import annotations

import os

import msgspec
import pytest

from disagg import DecodeEndpoint, HandshakeRefused, PrefillEndpoint, create_engine
from disagg.protocol import codec, messages
from tests.disagg.waiting import until
from tests.pools import mla
from tests.streams import dial

OWN = messages.PROTOCOL
OTHERS = [
    {"type": "hello", "protocol": OWN - 1, "generation": "old"},
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
    said = f"protocol {OWN} here, {hello['protocol']} there. Run the same kvpool."
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
    monkeypatch.setattr("disagg.runtime.endpoint.PROTOCOL", OWN - 1)
    pool = mla()
    with DecodeEndpoint(pool.layout, create_engine("local"), insecure=True) as decode:
        with pytest.raises(HandshakeRefused, match=f"protocol {OWN} here, {OWN - 1} there"):
            decode.connect([prefill.address], timeout=20)
        until(prefill, prefill.refusals)
        (listed,) = prefill.refusals()
        assert f"protocol {OWN} here, {OWN - 1} there" in listed
        assert listed.startswith(f"decode {decode.layout.generation} (")


def test_another_engine_is_listed_too(prefill, caplog):
    other, pool = create_engine("local"), mla()
    other.name = "other"
    with (
        DecodeEndpoint(pool.layout, other, insecure=True) as decode,
        pytest.raises(HandshakeRefused, match="engine 'local' here, 'other' there") as told,
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
