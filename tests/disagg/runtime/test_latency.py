"""What no room waits for: on a busy host, a thread that gets the GIL late, as who asks how a room
is moves it on; and the first of a link, that something is loaded, planned or connected.
"""

from __future__ import annotations

import time
from functools import partial

import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, TransferError, create_engine
from disagg.engines.local import LocalEngine
from kvpool import MHAPool, _native
from tests import oracle
from tests.disagg.engines.peers import ENGINES
from tests.disagg.runtime.sides import arrives, connected, prefill_process, request, settle
from tests.gil import gil_held
from tests.processes import python

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
        prefill_process(build=partial(MHAPool, **LAYERS, **MHA), tokens=TOKENS) as source,
        DecodeEndpoint(dest.layout, create_engine("local")) as decode,
    ):
        asks = {
            "poll": lambda: decode.poll("r").ended,
            "ended": lambda: decode.ended(),
            "layer_ready": lambda: decode.layer_ready("r", 2),
        }
        decode.connect([source.address], timeout=60)
        source.ask("r")
        with gil_held():
            decode.receive("r", address)
            assert ask(asks[call])
        assert decode.wait("r", 20) is KVPoll.Success
        oracle.assert_holds(dest, address)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_reads_while_a_busy_caller_steps(engine):
    """Mooncake's thread needs the GIL several times a read."""
    dest = MHAPool(**LAYERS, **MHA)
    address = oracle.place(dest, TOKENS, seed=99)
    oracle.blank(dest)
    prefill = {"engine": engine, "build": partial(MHAPool, **LAYERS, **MHA), "tokens": TOKENS}
    with (
        prefill_process(**prefill) as source,
        DecodeEndpoint(dest.layout, create_engine(engine), threaded=False) as decode,
    ):
        decode.connect([source.address], timeout=60)
        source.ask("r")
        with gil_held():
            decode.receive("r", address)
            assert ask(lambda: decode.step() is not None and decode.poll("r").ended)
        assert decode.poll("r") is KVPoll.Success
        oracle.assert_holds(dest, address)


def test_a_request_leaves_in_the_call_that_makes_it():
    source, dest = (MHAPool(**LAYERS, **MHA) for _ in range(2))
    with (
        PrefillEndpoint(source.layout, create_engine("local"), threaded=False) as prefill,
        DecodeEndpoint(dest.layout, create_engine("local"), threaded=False) as decode,
    ):
        link = decode.connect([prefill.address])
        settle(link, prefill, decode)
        prefill.send("r", oracle.place(source, TOKENS))
        decode.receive("r", oracle.place(dest, TOKENS))
        assert prefill.poll("r") is KVPoll.Bootstrapping
        prefill.step()
        assert prefill.poll("r") is not KVPoll.Bootstrapping


FIRST = """
import sys
from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, TransferError, create_engine
from disagg.engines.local import LocalEngine
from kvpool import MLAPool
from tests import oracle

numbers = dict(layers=range(3), kv_lora_rank=16, qk_rope_head_dim=8, num_pages=40, dtype="bf16")
source, dest = (MLAPool(**numbers, page_size=size) for size in {sizes})
given, into = oracle.place(source, 75), oracle.place(dest, 75, 9)
oracle.fill(source, given)
oracle.blank(dest)
with (
    PrefillEndpoint(source.layout, create_engine({engine!r})) as prefill,
    DecodeEndpoint(dest.layout, create_engine({engine!r}), verify={verify!r}) as decode,
):
    decode.connect([prefill.address], timeout=30)
    modules, plans = set(sys.modules), decode.snapshot().plans
    prefill.send("r", given)
    decode.receive("r", into)
    state = decode.wait("r", 30)
    loaded = sorted(set(sys.modules) - modules)
    again = decode.snapshot().plans
oracle.assert_holds(dest, into)
assert state is KVPoll.Success, state
assert not loaded, loaded
assert again == plans == {{"hit": 0, "miss": 1}}, (plans, again)
"""


@pytest.mark.parametrize(("sizes", "verify"), [((16, 16), None), ((16, 12), "checksum")])
def test_the_first_room_loads_no_module_and_plans_nothing(sizes, verify):
    python("-c", FIRST.format(sizes=sizes, engine="local", verify=verify))


class Counted(LocalEngine):
    """Counts connections, of which the first `refused` fail."""

    connections = 0

    def __init__(self, refused: int = 0) -> None:
        super().__init__()
        self.refused = refused

    def connect(self, metadata):
        self.connections += 1
        if self.connections <= self.refused:
            raise TransferError("not yet.")
        return super().connect(metadata)


@pytest.mark.parametrize(("refused", "connections"), [(0, 1), (1, 2), (2, 2)])
def test_the_engine_is_connected_before_the_first_room_or_by_it(refused, connections):
    source, dest = (MHAPool(**LAYERS, **MHA) for _ in range(2))
    given, into = request(source, dest, TOKENS)
    engine = Counted(refused)
    with connected(source, dest, engine=engine) as (prefill, decode):
        assert engine.connections == 1
        prefill.send("r", given)
        decode.receive("r", into)
        if refused < 2:
            arrives(decode, "r", dest, into)
        else:
            assert decode.wait("r", 30) is KVPoll.Failed
            assert "not yet" in decode.failure("r").reason
    assert engine.connections == connections
