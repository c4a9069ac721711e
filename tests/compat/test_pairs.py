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
from disagg.protocol.versions import PROTOCOL, fields_lacked
from disagg.runtime.transport import MemoryNetwork, MemoryTransport
from tests import oracle
from tests.compat.golden import SPOKEN, fields_of, golden, keys_of
from tests.compat.record import TRACEPARENT
from tests.disagg.stepping import Clock, Engine
from tests.pools import mla

OLDER = SPOKEN[:-1]
WITHOUT_CONVENTIONS = [n for n in OLDER if "conventions" in fields_lacked("hello", n)]
SAID = {"model": "llama"}


class Older(MemoryNetwork):
    """Carries between an endpoint of today and one of an older `number`, which is the prefill or
    the decode.
    """

    def __init__(self, old: str, number: int) -> None:
        super().__init__()
        self.old, self.number, self.keys, self.refused = old, number, keys_of(number), 0
        self.frames: list[dict[str, Any]] = []

    def carry(self, connection: Any, way: Any, data: bytes) -> None:
        fields = fields_of(data)
        from_old = (way == "up") == (self.old == "decode")
        if from_old:
            fields = self.written(fields)
        elif fields["type"] == "hello" and fields["protocol"] != self.number:
            # with no other answer than that release's own
            self.refused += 1
            answer = golden(self.number)["refusal"]["answer"]
            self.deliver(connection, "down", bytes.fromhex(answer))
            return
        self.check(fields)
        self.frames.append(fields)
        if fields["type"] == "hello" and self.old == "decode" and not from_old:
            fields = fields | {"protocol": PROTOCOL}  # its endpoint has said that number
        self.deliver(connection, way, msgspec.msgpack.encode(fields))

    def written(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A message as that release wrote it."""
        known = self.keys[fields["type"]]
        old = {name: value for name, value in fields.items() if name in known}
        if fields["type"] != "hello":
            assert not any(fields[name] for name in fields.keys() - known)
            return old
        layout = fields_of(old["layout"])
        for space in layout.get("spaces", ()):
            for name in space.keys() - self.keys["space"]:
                del space[name]
        return old | {"protocol": self.number, "layout": msgspec.msgpack.encode(layout)}

    def check(self, fields: dict[str, Any]) -> None:
        """That release refused what it did not know."""
        assert fields.keys() <= self.keys[fields["type"]]
        if fields["type"] == "hello":
            assert fields["protocol"] == self.number
            for space in fields_of(fields["layout"]).get("spaces", ()):
                assert space.keys() == self.keys["space"]


@contextmanager
def beside(old: str, number: int, prefill: dict[str, Any], decode: dict[str, Any]):
    """A pair of which one side speaks an older number, with the conventions of each side."""
    network, clock, pools = Older(old, number), Clock(), [mla(), mla()]
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


@pytest.mark.parametrize("number", OLDER)
@pytest.mark.parametrize("old", ["prefill", "decode"])
def test_bytes_arrive_between_an_older_release_and_today(old, number):
    with beside(old, number, {}, {}) as engine:
        assert engine.links[0].refusal is None
        assert engine.network.refused == (old == "prefill")  # one hello too many, no more
        source, dest = engine.pools
        table, target = oracle.filled(source, 30), oracle.place(dest, 30, 9)
        oracle.blank(dest)
        # what an older decode has of a trace stays with it, as an older release has none
        traceparent = TRACEPARENT if old == "prefill" else None
        engine.decode.receive("r", target, traceparent=traceparent)
        engine.prefill.send("r", table, tokens=range(16), last=False)
        engine.prefill.send("r", table, aux={"first": 7})
        assert engine.step_until_ended("r") == [KVPoll.Success, KVPoll.Success]
        assert engine.decode.aux("r") == {"first": 7}
        oracle.assert_holds(dest, target)
        kinds = {fields["type"] for fields in engine.network.frames}
        assert {"read_request", "chunk_ready", "digests", "release_ack"} <= kinds


@pytest.mark.parametrize("number", WITHOUT_CONVENTIONS)
@pytest.mark.parametrize("old", ["prefill", "decode"])
def test_a_side_with_conventions_refuses_one_that_cannot_say_any(old, number):
    """Of names that nobody said, no difference can be seen."""
    said = {"prefill": SAID, "decode": SAID} | {old: {}}
    with beside(old, number, said["prefill"], said["decode"]) as engine:
        refusal = engine.links[0].refusal
        assert f"conventions (model): protocol {number}, which the other side speaks" in refusal
        engine.step(5)
        assert refusal in engine.prefill.refusals()[-1]
        engine.decode.receive("r", oracle.place(engine.pools[1], 20))
        assert engine.decode.failure("r").kind == "refused"
