"""A conversation that two endpoints of a release had, replayed: today's prefill answers that
release's decode, and today's decode that release's prefill, with the same bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from disagg.digest.digest import Digester, digests
from disagg.protocol import codec, events, messages
from disagg.protocol.decode import DecodeMachine
from disagg.protocol.events import Received, Send
from disagg.protocol.peers.link import Link
from disagg.protocol.prefill import PrefillMachine
from disagg.protocol.rooms.offered import layer_range
from disagg.protocol.versions import PROTOCOL
from kvpool.layout import PoolLayout
from tests.compat.golden import SPOKEN, fields_of, frames, golden
from tests.compat.record import TRACEPARENT, table

START = 1000.0
TRACED = 8
"""The first number with traces."""


def rebuilt(layout: PoolLayout) -> tuple[PoolLayout, list[np.ndarray]]:
    """A layout of memory here, with the bytes that `record.py` had put there."""
    memory = [(np.arange(slab.nbytes) % 251).astype(np.uint8) for slab in layout.slabs()]
    buffers = []
    for buffer in layout.buffers:
        slabs = zip(layout.slabs(), memory)
        (base,) = [
            data.ctypes.data + buffer.base - slab.base
            for slab, data in slabs
            if slab.base <= buffer.base < slab.base + slab.nbytes
        ]
        buffers.append(replace(buffer, base=base))
    return replace(layout, buffers=tuple(buffers)), memory


class Replay:
    """One side of today, told what happened to that side then."""

    def __init__(self, side: str, number: int) -> None:
        recorded = golden(number)["conversation"]
        sent = frames(number, "up" if side == "decode" else "down")
        self.now, self.steps = START, recorded["steps"]
        self.layout = PoolLayout.from_msgpack(bytes.fromhex(recorded["layouts"][side]))
        self.placed, self._memory = rebuilt(self.layout)
        self.sent: list[bytes] = []
        down = map(fields_of, frames(number, "down"))
        self.digests = [fields["values"] for fields in down if fields["type"] == "digests"]
        self.side = side
        hello = next(fields_of(frame) for frame in sent if fields_of(frame)["type"] == "hello")
        self.hello = messages.Hello(
            protocol=PROTOCOL,
            generation=self.layout.generation,
            engine=hello["engine"],
            layout=self.layout.to_msgpack(),
            metadata=hello["metadata"],
            timeout=hello["timeout"],
        )

    def tell(self, machine: Any, event: Any) -> None:
        """An event, and all that follows from it here."""
        for effect in machine.handle(event, self.now):
            match effect:
                case Send(_, data):
                    self.sent.append(data)
                case events.StartRead(read):
                    self.tell(machine, events.ReadEnded(read, None))
                case events.ComputeDigest():
                    values = self.compute(effect)
                    self.tell(machine, events.DigestComputed(effect.key, values))

    def compute(self, effect: events.ComputeDigest) -> bytes:
        if self.side == "decode":  # what it reads has the digests that prefill gave
            return self.digests.pop(0)
        digester = Digester()
        steps = digests(self.placed, effect.table, effect.pieces, effect.each)
        digester.enqueue(effect.key, steps)
        while (answer := digester.step()) is None:
            pass
        assert answer[1] is not None, answer
        return answer[1]


def answered(number: int) -> tuple[list[bytes], PrefillMachine]:
    """What today's prefill answers to the decode of a release."""
    replay = Replay("prefill", number)
    prefill = PrefillMachine(replay.hello, replay.layout, 60.0, now=START)
    peer = b"1"
    for step, *values in replay.steps:
        match step:
            case "connect":
                peer += b"1"
            case "now":
                replay.now = values[0]
            case "up":
                replay.tell(prefill, Received(peer, codec.decode(bytes.fromhex(values[0]))))
            case "send":
                room, start, stop, last, aux, layers = values
                chunk = events.OfferChunk(
                    room=room,
                    table=table(stop, 1),
                    tokens=range(start, stop),
                    last=last,
                    aux=aux,
                    layers=layer_range(None if layers is None else range(*layers), "target"),
                )
                replay.tell(prefill, chunk)
            case "abort" if values[0] == "prefill":
                replay.tell(prefill, events.AbortRoom(values[1], "gave up"))
            case "close":
                replay.tell(prefill, events.AbortAll("the endpoint was closed.", closing=True))
        replay.tell(prefill, events.Tick())
    return replay.sent, prefill


@pytest.mark.parametrize("number", SPOKEN)
def test_todays_prefill_answers_a_decode_of_a_spoken_protocol_with_its_bytes(number):
    sent, prefill = answered(number)
    assert sent == frames(number, "down")
    for room, (state, _) in golden(number)["conversation"]["states"].items():
        assert prefill.poll(int(room) if room.isdigit() else room).name == state


def asked(number: int, attempts: list[str], monkeypatch) -> tuple[list[bytes], DecodeMachine]:
    """What today's decode sends to the prefill of a release, which refuses higher numbers."""
    replay = Replay("decode", number)
    decode = DecodeMachine(
        replay.hello, replay.layout, 1, now=START, verify=True, offer_timeout=300.0
    )
    monkeypatch.setattr(
        "disagg.protocol.decode.os.urandom", lambda size: bytes.fromhex(attempts.pop(0))
    )
    refusal, links = bytes.fromhex(golden(number)["refusal"]["answer"]), []
    for step, *values in replay.steps:
        match step:
            case "connect":
                links.append(Link(("memory",)))
                replay.tell(decode, events.ConnectLink(links[-1]))
                if number < PROTOCOL:
                    replay.tell(decode, Received(len(links) - 1, codec.decode(refusal)))
            case "now":
                replay.now = values[0]
            case "down":
                message = codec.decode(bytes.fromhex(values[0]))
                replay.tell(decode, Received(len(links) - 1, message))
            case "receive":
                room, tokens, start, *traced = values
                request = events.RequestRoom(
                    room=room,
                    table=table(tokens, 2),
                    start=start,
                    link=links[-1],
                    # also to a release that knows of no traces, which is not told of this one
                    traceparent=next(iter(traced), TRACEPARENT if number < TRACED else None),
                )
                replay.tell(decode, request)
            case "abort" if values[0] == "decode":
                replay.tell(decode, events.AbortRoom(values[1], "gave up"))
            case "disconnect":
                replay.tell(decode, events.DisconnectLink(links[-1]))
        if step in ("down", "now"):
            replay.tell(decode, events.Tick())
    return replay.sent, decode


def without(sent: list[bytes], *tags: str) -> list[bytes]:
    return [frame for frame in sent if fields_of(frame)["type"] not in tags]


def in_order(frame: bytes) -> bytes:
    """A frame; pieces of a digest request, whose order decode is free to choose, in one order."""
    fields = fields_of(frame)
    if fields["type"] != "digest_request":
        return frame
    shapes, which, layers = msgspec.msgpack.decode(fields["pieces"])
    pieces = sorted((layer, shapes[shape]) for shape, layer in zip(which, layers))
    return msgspec.msgpack.encode({**fields, "pieces": pieces})


@pytest.mark.parametrize("number", SPOKEN)
def test_todays_decode_asks_a_prefill_of_a_spoken_protocol_with_its_bytes(number, monkeypatch):
    recorded = frames(number, "up")
    requests = [fields for frame in recorded if "attempt" in (fields := fields_of(frame))]
    attempts = list(dict.fromkeys(fields["attempt"] for fields in requests))
    # the room that nobody was asked for has an attempt that nobody heard of
    sent, decode = asked(number, ["00" * 16, *attempts], monkeypatch)
    # of pings, when they are sent is each release's own affair
    asks, then = (list(map(in_order, without(some, "hello", "ping"))) for some in (sent, recorded))
    assert asks == then
    assert {f for f in sent if fields_of(f)["type"] == "ping"} <= {*recorded}
    hellos, old_hellos = (
        [fields_of(frame) for frame in some if fields_of(frame)["type"] == "hello"]
        for some in (sent, recorded)
    )
    spoken = [hello["protocol"] for hello in hellos[: 2 if number < PROTOCOL else 1]]
    assert spoken == ([PROTOCOL, number] if number < PROTOCOL else [PROTOCOL])
    said = hellos[len(spoken) - 1]
    # of its layout, decode says owners and roles only, which is all that prefill has ever read
    assert {**said, "layout": b""} == {**old_hellos[0], "layout": b""}
    for room, (_, state) in golden(number)["conversation"]["states"].items():
        assert decode.poll(int(room) if room.isdigit() else room).name == state
