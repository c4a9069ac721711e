"""A host whose main thread never lets the GIL go: who asks how a room is moves it on."""

from __future__ import annotations

import time

import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from kvpool import MHAPool, _native
from tests import oracle
from tests.disagg.engines.peers import prefills
from tests.gil import gil_held

TOKENS = 150
MHA = {"num_kv_heads": 4, "head_dim": 64, "dtype": "bf16", "num_pages": 24, "page_size": 16}
LAYERS = {"layers": range(3)}
needs_native = pytest.mark.skipif(
    _native.availability() is not None, reason="copies in Python need the GIL"
)


def ask(holds, seconds=20):
    """Asks without a pause; whether it held in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
    return False


@needs_native
@pytest.mark.parametrize("call", ["poll", "ended", "layer_ready"])
def test_a_room_is_read_while_its_caller_only_asks(call):
    dest = MHAPool(**LAYERS, **MHA)
    address = oracle.place(dest, TOKENS, seed=99)
    oracle.blank(dest)
    with (
        prefills("local", "MHAPool", [{**LAYERS, **MHA}], TOKENS) as [source],
        DecodeEndpoint(dest.layout, create_engine("local")) as decode,
    ):
        asks = {
            "poll": lambda: decode.poll("r").ended,
            "ended": lambda: decode.ended(),
            "layer_ready": lambda: decode.layer_ready("r", 2),
        }
        decode.connect([source.address], timeout=60)
        source.send("r", 0, TOKENS)
        with gil_held():
            decode.receive("r", address)
            assert ask(asks[call])
        assert decode.wait("r", 20) is KVPoll.Success
        oracle.assert_holds(dest, address)


def test_a_request_leaves_in_the_call_that_makes_it():
    source, dest = (MHAPool(**LAYERS, **MHA) for _ in range(2))
    with (
        PrefillEndpoint(source.layout, create_engine("local"), threaded=False) as prefill,
        DecodeEndpoint(dest.layout, create_engine("local"), threaded=False) as decode,
    ):
        link = decode.connect([prefill.address])
        while not link.settled:
            prefill.step()
            decode.step()
        prefill.send("r", oracle.place(source, TOKENS))
        decode.receive("r", oracle.place(dest, TOKENS))
        assert prefill.poll("r") is KVPoll.Bootstrapping
        prefill.step()
        assert prefill.poll("r") is not KVPoll.Bootstrapping
