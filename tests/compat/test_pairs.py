"""Endpoints of today beside one that speaks an older protocol and no other: bytes arrive, and what
cannot be compared is refused.

The older one is an endpoint of today behind `Older`, which reads and writes frames as that release
did, by the keys of its recorded bytes; `record.py` says how to run the release itself.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from disagg.protocol.versions import PROTOCOL
from disagg.runtime.transport import MemoryNetwork, MemoryTransport
from tests import oracle
from tests.compat.golden import SPOKEN, fields_of, golden, keys_of
from tests.disagg.stepping import Clock, Engine
from tests.pools import mla

OLD = SPOKEN[0]
SAID = {"model": "llama"}


class Older(MemoryNetwork):
    """Carries between an endpoint of today and one of `OLD`, which is the prefill or the decode."""

    def __init__(self, old: str) -> None:
        super().__init__()
        self.old, self.keys, self.refused = old, keys_of(OLD), 0
        self.frames: list[dict[str, Any]] = []

    def carry(self, connection: Any, way: Any, data: bytes) -> None:
        fields = fields_of(data)
        from_old = (way == "up") == (self.old == "decode")
        if fields["type"] == "hello" and from_old:
            fields = self.written(fields)
        elif fields["type"] == "hello" and fields["protocol"] != OLD:
            # with no other answer than that release's own
            self.refused += 1
            self.deliver(connection, "down", bytes.fromhex(golden(OLD)["refusal"]["answer"]))
            return
        self.check(fields)
        self.frames.append(fields)
        if fields["type"] == "hello" and self.old == "decode" and not from_old:
            fields = fields | {"protocol": PROTOCOL}  # its endpoint has said that number
        self.deliver(connection, way, msgspec.msgpack.encode(fields))

    def written(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A hello as that release said it."""
        old = {name: value for name, value in fields.items() if name in self.keys["hello"]}
        layout = fields_of(old["layout"])
        for space in layout.get("spaces", ()):
            for name in space.keys() - self.keys["space"]:
                del space[name]
        return old | {"protocol": OLD, "layout": msgspec.msgpack.encode(layout)}

    def check(self, fields: dict[str, Any]) -> None:
        """That release refused what it did not know."""
        assert fields.keys() <= self.keys[fields["type"]]
        if fields["type"] == "hello":
            assert fields["protocol"] == OLD
            for space in fields_of(fields["layout"]).get("spaces", ()):
                assert space.keys() == self.keys["space"]


@contextmanager
def beside(old: str, prefill: dict[str, Any], decode: dict[str, Any]):
    """A pair of which one side speaks `OLD`, with the conventions of each side."""
    network, clock, pools = Older(old), Clock(), [mla(), mla()]
    common = {"threaded": False, "clock": clock}
    with (
        PrefillEndpoint(
            pools[0].layout,
            create_engine("local"),
            "memory",
            transport=MemoryTransport(network),
            conventions=prefill,
            **common,
        ) as source,
        DecodeEndpoint(
            pools[1].layout,
            create_engine("local"),
            verify="checksum",
            transport=MemoryTransport(network),
            conventions=decode,
            **common,
        ) as dest,
    ):
        engine = Engine([dest], source, clock)
        engine.pools, engine.network = pools, network
        engine.connect()
        yield engine


@pytest.mark.parametrize("old", ["prefill", "decode"])
def test_bytes_arrive_between_an_older_release_and_today(old):
    with beside(old, {}, {}) as engine:
        assert engine.links[0].refusal is None
        assert engine.network.refused == (old == "prefill")  # one hello too many, no more
        source, dest = engine.pools
        table, target = oracle.filled(source, 30), oracle.place(dest, 30, 9)
        oracle.blank(dest)
        engine.decode.receive("r", target)
        engine.prefill.send("r", table, tokens=range(16), last=False)
        engine.prefill.send("r", table, aux={"first": 7})
        assert engine.step_until_ended("r") == [KVPoll.Success, KVPoll.Success]
        assert engine.decode.aux("r") == {"first": 7}
        oracle.assert_holds(dest, target)
        kinds = {fields["type"] for fields in engine.network.frames}
        assert {"read_request", "chunk_ready", "digests", "release_ack"} <= kinds


@pytest.mark.parametrize("old", ["prefill", "decode"])
def test_a_side_with_conventions_refuses_one_that_cannot_say_any(old):
    """Of names that nobody said, no difference can be seen."""
    said = {"prefill": SAID, "decode": SAID} | {old: {}}
    with beside(old, said["prefill"], said["decode"]) as engine:
        refusal = engine.links[0].refusal
        assert f"conventions (model): protocol {OLD}, which the other side speaks" in refusal
        engine.step(5)
        assert refusal in engine.prefill.refusals()[-1]
        engine.decode.receive("r", oracle.place(engine.pools[1], 20))
        assert engine.decode.failure("r").kind == "refused"
