"""The first room of a link costs what others do: nothing is loaded, planned or connected then."""

from __future__ import annotations

import subprocess
import sys

import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, TransferError
from disagg.engines.base import create_engine
from disagg.engines.local import LocalEngine
from kvpool import MLAPool
from tests import oracle
from tests.disagg.stepping import MLA

TOKENS = 75

FIRST = """
import sys
from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
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


@pytest.mark.parametrize(
    ("sizes", "verify"), [((16, 16), None), ((16, 8), None), ((16, 12), "checksum")]
)
def test_the_first_room_loads_no_module_and_plans_nothing(sizes, verify):
    code = FIRST.format(sizes=sizes, engine="local", verify=verify)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


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


@pytest.fixture
def pair():
    """Makes a prefill and a decode over an engine, connected."""
    pools = [MLAPool(layers=range(2), **MLA) for _ in range(2)]
    given, into = oracle.place(pools[0], TOKENS), oracle.place(pools[1], TOKENS, 9)
    oracle.fill(pools[0], given)
    oracle.blank(pools[1])
    opened = []

    def connected(engine):
        prefill = PrefillEndpoint(pools[0].layout, create_engine("local"))
        decode = DecodeEndpoint(pools[1].layout, engine)
        opened.extend([decode, prefill])
        decode.connect([prefill.address], timeout=30)
        return prefill, decode, given, into

    yield connected
    for endpoint in opened:
        endpoint.close()


def test_the_engine_is_connected_before_the_first_room_and_once(pair):
    engine = Counted()
    prefill, decode, given, into = pair(engine)
    assert engine.connections == 1
    prefill.send("r", given)
    decode.receive("r", into)
    assert decode.wait("r", 30) is KVPoll.Success
    assert engine.connections == 1


def test_an_engine_that_is_refused_at_first_is_connected_by_the_first_room(pair):
    engine = Counted(refused=1)
    prefill, decode, given, into = pair(engine)
    assert engine.connections == 1
    prefill.send("r", given)
    decode.receive("r", into)
    assert decode.wait("r", 30) is KVPoll.Success, decode.failure("r")
    assert engine.connections == 2


def test_an_engine_that_cannot_be_connected_fails_the_room(pair):
    prefill, decode, given, into = pair(Counted(refused=2))
    prefill.send("r", given)
    decode.receive("r", into)
    assert decode.wait("r", 30) is KVPoll.Failed
    assert "not yet" in decode.failure("r").reason
