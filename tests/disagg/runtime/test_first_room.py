"""The first room of a link costs what others do: nothing is loaded, planned or connected then."""

from __future__ import annotations

import subprocess
import sys

import pytest

from disagg import KVPoll, TransferError
from disagg.engines.local import LocalEngine
from kvpool import MLAPool
from tests import oracle
from tests.disagg.runtime.sides import connected, succeeds
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


@pytest.mark.parametrize(("sizes", "verify"), [((16, 16), None), ((16, 12), "checksum")])
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


@pytest.mark.parametrize(("refused", "connections"), [(0, 1), (1, 2), (2, 2)])
def test_the_engine_is_connected_before_the_first_room_or_by_it(refused, connections):
    source, dest = (MLAPool(layers=range(2), **MLA) for _ in range(2))
    given, into = oracle.place(source, TOKENS), oracle.place(dest, TOKENS, 9)
    oracle.fill(source, given)
    oracle.blank(dest)
    engine = Counted(refused)
    with connected(source, dest, engine=engine) as (prefill, decode):
        assert engine.connections == 1
        prefill.send("r", given)
        decode.receive("r", into)
        if refused < 2:
            succeeds(decode, "r")
            oracle.assert_holds(dest, into)
        else:
            assert decode.wait("r", 30) is KVPoll.Failed
            assert "not yet" in decode.failure("r").reason
    assert engine.connections == connections
