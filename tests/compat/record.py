"""Writes what a release says, as bytes: every message, some layouts, and a conversation of two of
its endpoints. It runs the code of that release, which has to be first on the path:

    git worktree add --detach /tmp/six c24fd4d3
    PYTHONPATH=/tmp/six python tests/compat/record.py > tests/compat/golden/6.json

6 was written by c24fd4d3, 7 by bedf554f, 8 by the commit that has added it. A file is never written
again once its number is released.
"""

from __future__ import annotations

import ctypes
import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, get_args

import msgspec
import numpy as np

from disagg import DecodeEndpoint, PrefillEndpoint, create_engine
from disagg.protocol import messages
from disagg.runtime.transport import MemoryNetwork, MemoryTransport
from kvpool import MHAPool, MLAPool, NSAPool, RequestAddress
from kvpool.layout import Axis, Buffer, Interleave, PoolLayout, Region, Space, Span

try:
    from disagg.protocol.codec import decode, encode
    from disagg.protocol.rooms.offered import LayerRange
    from disagg.protocol.versions import PROTOCOL
except ImportError:
    try:
        from disagg.protocol.codec import decode, encode
        from disagg.protocol.rooms.offered import LayerRange
    except ImportError:
        from disagg.plan.offered import LayerRange

        from disagg.protocol.messages import decode, encode
    from disagg.protocol.versions import PROTOCOL

PAGES = {"num_pages": 9, "page_size": 16, "dtype": "bf16"}
MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8}
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HAS_TRACES = "traceparent" in messages.ReadRequest.__struct_fields__
STEPS = 200
"""Turns in which everything has happened that will."""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


# messages


def traced() -> dict[str, str]:
    """What a request says of its trace, in a release that knows of any."""
    return {"traceparent": TRACEPARENT} if HAS_TRACES else {}


def every_message() -> dict[str, Any]:
    """One of each, with every field; names end with what is special."""
    room = {"generation": "5f0c", "room": "r1", "attempt": "a3e9"}
    said = {"conventions": {"model_type": "llama", "rope_theta": 5e5, "layers": 4}}
    can_say = "conventions" in messages.Hello.__struct_fields__
    hello = {"generation": "5f0c", "engine": "nixl", "layout": b"\x80", "timeout": 10.0}
    spans = {"kv": messages.WireSpan(ids=np.arange(3, dtype="<i8").tobytes(), first_item=2)}
    chunk = {"start": 16, "stop": 32, "last": False, "num_tokens": 100, "spans": spans}
    layers = LayerRange(owner="target", start=2, stop=4)
    return {
        "hello": messages.Hello(
            protocol=PROTOCOL, metadata=b"\x01\xff", **hello, **(said if can_say else {})
        ),
        "ping": messages.Ping(generation="5f0c"),
        "pong": messages.Pong(generation="5f0c"),
        "unknown_peer": messages.UnknownPeer(generation="5f0c"),
        "refuse": messages.Refuse(reasons=["one thing.", "another."]),
        "refuse not final": messages.Refuse(reasons=["not now."], final=False),
        "disconnect": messages.Disconnect(),
        "drop_room": messages.DropRoom(room="r1", reason="gave up"),
        "read_request": messages.ReadRequest(
            **room, start=20, num_tokens=100, readers=2, timeout=30.0, **traced()
        ),
        "read_request of a number": messages.ReadRequest(
            generation="5f0c", room=1 << 40, attempt="a3e9", start=0, num_tokens=0, readers=1
        ),
        "chunk_ready": messages.ChunkReady(**room, **chunk, aux=b"", layers=layers),
        "chunk_ready last": messages.ChunkReady(
            **room, **chunk | {"last": True}, aux=msgspec.msgpack.encode({"first": 7})
        ),
        "digest_request": messages.DigestRequest(**room, each=True, pieces=b"\x93\x90\x90\x90"),
        "digests": messages.Digests(**room, each=True, values=bytes(range(8)), problem=""),
        "read_done": messages.ReadDone(**room),
        "release_ack": messages.ReleaseAck(**room, leased=True),
        "abort": messages.Abort(**room, reason="gave up"),
    }


def record_messages() -> dict[str, Any]:
    every = every_message()
    assert {type(message) for message in every.values()} == set(get_args(messages.Message))
    return {
        name: {"bytes": encode(message).hex(), "fields": msgspec.to_builtins(message)}
        for name, message in every.items()
    }


# layouts


def by_hand() -> PoolLayout:
    """Windows, slots, rings, shared ids, stretches of ranks, packed rows, foreign bytes."""
    entry, head = Axis("entry", 4, 64), Axis("head", 2, 32, start=2, total=8)
    spaces = (
        Space("kv", "paged", entries_per_item=4, reserved=1, interleave=Interleave(4, 1, 2)),
        Space("window", "paged", entries_per_item=4, window=8, block_pool="blocks"),
        Space("compressed", "paged", 1, 4, ids="kv", interleave=Interleave(4, 1, 2)),
        Space("state", "slot"),
        Space("tail", "ring", entries_per_item=4, tokens_per_entry=1, window=2, window_step=2),
    )
    buffers = tuple(
        Buffer(space.name, space.name, base=4096 * n, item_stride=512, item_bytes=384, items=8)
        for n, space in enumerate(spaces, start=1)
    )
    regions = [
        Region("target", 0, "k", "kv", 0, "bfloat16", (entry, head), 32),
        Region("target", 1, "latent", "window", 0, "uint8", (), 384, packing="fp8_ds_mla"),
        Region("target", 0, "index_key", "compressed", 0, "float8_e4m3fn", (), 32),
        Region("target", 2, "conv", "state", 8, "float32", (Axis("dim", 4, 16),), 16),
        Region("draft", 3, "k", "tail", 0, "bfloat16", (entry,), 64),
    ]
    buffers = (replace(buffers[0], padding=True, memory="cuda:1"), *buffers[1:])
    return PoolLayout(buffers, tuple(regions), spaces, total_kv_layers=4, model="m", generation="g")


def record_layouts() -> dict[str, Any]:
    meta = {"layers": range(2), "device": "meta"} | PAGES
    layouts = {
        "mha": MHAPool(num_kv_heads=2, head_dim=8, **meta).layout,
        "mla": MLAPool(**MLA, **meta).layout,
        "nsa": NSAPool(**MLA, **meta).layout,
        "by hand": by_hand(),
    }
    return {
        name: {"bytes": layout.to_msgpack().hex(), "json": layout.to_json()}
        for name, layout in layouts.items()
    }


# conversations


class Recording(MemoryNetwork):
    """Keeps every frame, beside what the callers did."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[Any]] = []

    def carry(self, connection: Any, way: Any, data: bytes) -> None:
        self.steps.append([way, data.hex()])
        super().carry(connection, way, data)


def filled(pool: MLAPool) -> MLAPool:
    """A pool whose memory has a byte for each place, which `tests/compat` knows too."""
    for slab in pool.layout.slabs():
        data = (np.arange(slab.nbytes) % 251).astype(np.uint8)
        ctypes.memmove(slab.base, data.ctypes.data, slab.nbytes)
    return pool


def table(tokens: int, first: int) -> RequestAddress:
    ids = np.arange(first, first + -(-tokens // 16), dtype=np.int64)
    return RequestAddress(tokens, {"kv": Span(ids, 0)})


class Session:
    """A prefill and a decode, turned by hand; what is called is written down."""

    def __init__(self, stack: ExitStack) -> None:
        self.network, self.clock = Recording(), Clock()
        self.pools = [filled(MLAPool(layers=range(2), **MLA, **PAGES)) for _ in range(2)]
        layouts = [
            replace(pool.layout, generation=name)
            for pool, name in zip(self.pools, ("prefill's", "decode's"))
        ]
        options = {"threaded": False, "clock": self.clock, "peer_timeout": 10.0}
        engines = [create_engine("local") for _ in range(2)]
        # what an engine says of this machine stays here
        offer, connect = engines[0].metadata, engines[1].connect
        engines[0].metadata = lambda: b"metadata"
        engines[1].connect = lambda _: connect(offer())
        self.prefill = stack.enter_context(
            PrefillEndpoint(
                layouts[0],
                engines[0],
                "memory",
                transport=MemoryTransport(self.network),
                **options,
            )
        )
        self.decode = stack.enter_context(
            DecodeEndpoint(
                layouts[1],
                engines[1],
                verify="checksum",
                transport=MemoryTransport(self.network),
                **options,
            )
        )
        self.layouts = {"prefill": layouts[0], "decode": layouts[1]}

    def note(self, *step: Any) -> None:
        self.network.steps.append([*step])

    def connect(self) -> None:
        self.note("connect")
        self.link = self.decode.connect(["memory"])

    def turn(self, seconds: float = 0.0) -> None:
        """All that happens now, some time later."""
        if seconds:
            self.clock.now += seconds
            self.note("now", self.clock.now)
        for _ in range(STEPS):
            self.prefill.step()
            self.decode.step()

    def receive(self, room: Any, tokens: int, start: int = 0, **more: str) -> None:
        self.note("receive", room, tokens, start, *more.values())
        self.decode.receive(room, table(tokens, 2), start=start, **more)

    def send(self, room: Any, tokens: range, last: bool, layers: range | None = None) -> None:
        aux = {"first": 7, "text": "yes"} if last else {}
        span = None if layers is None else [layers.start, layers.stop]
        self.note("send", room, tokens.start, tokens.stop, last, aux, span)
        address = table(tokens.stop, 1)
        self.prefill.send(room, address, tokens=tokens, last=last, aux=aux, layers=layers)

    def abort(self, side: str, room: Any) -> None:
        self.note("abort", side, room)
        getattr(self, side).abort(room, "gave up")


def record_conversation() -> dict[str, Any]:
    """Every message but refusals, between two endpoints of this release."""
    with ExitStack() as stack:
        session = Session(stack)
        session.connect()
        session.receive("early", 20)
        session.abort("decode", "early")
        session.turn()
        session.turn(2.5)  # a ping
        session.receive("whole", 60, 16, **traced())
        session.turn()
        session.send("whole", range(32), False)
        session.turn()
        session.send("whole", range(32, 60), True)
        session.turn()
        session.send(7, range(40), False, range(1))  # before it is asked for
        session.receive(7, 40)
        session.turn()
        session.send(7, range(40), True, range(1, 2))
        session.turn()
        session.receive("prefill gives up", 40)
        session.send("prefill gives up", range(16), False)
        session.turn()
        session.abort("prefill", "prefill gives up")
        session.turn()
        session.receive("decode gives up", 40)
        session.turn()
        session.abort("decode", "decode gives up")
        session.turn()
        states = {
            str(room): [session.prefill.poll(room).name, session.decode.poll(room).name]
            for room in ("whole", 7, "prefill gives up", "decode gives up")
        }
        session.note("disconnect")
        session.decode.disconnect(session.link)
        session.turn()
        session.connect()
        session.turn()
        session.note("close")
        end = len(session.network.steps)
        session.prefill.close()
        steps = session.network.steps[: end + 1]
        layouts = {name: layout.to_msgpack().hex() for name, layout in session.layouts.items()}
    return {"layouts": layouts, "steps": steps, "states": states}


def record_refusal() -> dict[str, str]:
    """What a prefill answers to a hello of the next number, with a field that it does not know."""
    with ExitStack() as stack:
        session = Session(stack)
        stranger = MemoryTransport(session.network)
        stranger.connect(0, "memory")
        hello = {"type": "hello", "protocol": PROTOCOL + 1, "generation": "next", "more": 1}
        stranger.send(0, msgspec.msgpack.encode(hello))
        session.turn()
        ((_, answer),) = stranger.inbox
        assert type(decode(answer)) is messages.Refuse
        return {"hello": msgspec.msgpack.encode(hello).hex(), "answer": answer.hex()}


if __name__ == "__main__":
    recorded = {
        "protocol": PROTOCOL,
        "messages": record_messages(),
        "layouts": record_layouts(),
        "conversation": record_conversation(),
        "refusal": record_refusal(),
    }
    encoded = msgspec.json.encode(recorded)  # bytes as base64
    json.dump(json.loads(encoded), sys.stdout, indent=1, sort_keys=False)
    print()
