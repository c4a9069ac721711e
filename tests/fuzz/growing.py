"""What is grown: snapshots, layouts, hellos, chunks, digests and aux values, and who reads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import msgspec
import numpy as np

from disagg.digest.digest import digests
from disagg.plan import IncompatibleLayouts, plan
from disagg.portable.layout import live_pieces, portable
from disagg.protocol import codec, messages
from disagg.protocol.decode import DecodeMachine
from disagg.protocol.events import ComputeDigest, ConnectLink, OfferChunk, Received, RequestRoom
from disagg.protocol.peers.link import Link
from disagg.protocol.prefill import PrefillMachine
from disagg.snapshot import SnapshotRefused
from disagg.snapshot.header import Header, decode
from kvpool import MLAPool
from kvpool.layout import LayoutError, PoolLayout
from tests import oracle
from tests.fuzz import build, contracts, machines, planning, samples, stored, wide
from tests.fuzz.growth import Growth
from tests.fuzz.trees import Encode, Grower, Pairs, growers, to_json, to_msgpack, tree

OWN = samples.CASES[0].own
COVERED = ("kvpool_snapshot", "tokens", "request", "conventions", "layout", "digests")


# snapshots


def snapshot() -> Pairs:
    """A header as a tree, with the texts inside it as trees as well."""
    layout = portable(long_room()[0], samples.TOKENS)
    keys = [piece.key for piece in live_pieces(layout, samples.TOKENS)]
    header = Header(samples.TOKENS, layout, "r", {"vocab": 7, "name": "x"}, dict.fromkeys(keys, 1))
    value = json.loads(header.encode()[8:])
    for name in ("conventions", "layout", "digests"):
        value["__metadata__"][name] = json.loads(value["__metadata__"][name])
    return tree(value)


def sealed(value: Any) -> bytes:
    """A header with the checksum that its values should have, where these are a map."""
    if not isinstance(value, Pairs):
        return to_json(value)
    parts = Pairs()
    for name, part in value:
        if name == "__metadata__" and isinstance(part, Pairs):
            said = Pairs(
                (n, v if isinstance(v, str) else to_json(v).decode(errors="replace"))
                for n, v in part
                if n != "checksum"
            )
            held = dict(said)
            if held.keys() >= {*COVERED}:
                text = json.dumps([held[n] for n in COVERED], separators=(",", ":"))
                said.append(("checksum", hashlib.sha256(text.encode()).hexdigest()))
            part = said
        parts.append((name, part))
    return to_json(parts)


def read_header(data: bytes) -> None:
    """As a file whose size is what its layout says, if it says one."""
    for size in (0, 1 << 40):
        with suppress(SnapshotRefused):
            decode(data, size)


# layouts


def read_layout(read: Callable[[bytes], PoolLayout], data: bytes) -> None:
    """All that is made of a peer's layout."""
    try:
        layout = read(data)
    except LayoutError:
        return
    layout.slabs()
    layout.live_bytes(1 << 40)
    layout.to_json()
    layout.covers(np.arange(9), np.arange(9))
    for source, dest in ((layout, OWN), (OWN, layout), (layout, layout)):
        with suppress(IncompatibleLayouts):
            str(plan([source], dest).explain(64))


# hellos, chunks, digests


def say_hello(data: bytes) -> None:
    """To prefill, and to decode, which plans."""
    with suppress(messages.WireError):
        message = codec.decode(data)
        prefill = PrefillMachine(machines.hello(OWN, "g1"), OWN, now=0.0)
        prefill.handle(Received(b"d", message), 0.0)
        decode = DecodeMachine(machines.hello(OWN, "d"), OWN, 1, now=0.0)
        decode.handle(ConnectLink(Link(("x",))), 0.0)
        decode.handle(Received(0, message), 0.0)


def in_hello(layout: bytes) -> bytes:
    return codec.encode(msgspec.structs.replace(machines.hello(OWN, "g1"), layout=layout))


def get_chunk(data: bytes) -> None:
    with suppress(messages.WireError, ValueError):
        message = codec.decode(data)
        decode = DecodeMachine(machines.hello(OWN, "d"), OWN, 1, now=0.0)
        decode.handle(ConnectLink(link := Link(("x",))), 0.0)
        decode.handle(Received(0, machines.hello(OWN, "g1")), 0.0)
        decode.handle(RequestRoom(room="r", table=samples.address(OWN), start=0, link=link), 0.0)
        attempt = decode.rooms.by_name["r"].attempt
        decode.handle(Received(0, msgspec.structs.replace(message, attempt=attempt)), 0.0)


TOKENS = 1 << 15


@lru_cache
def long_room() -> tuple[PoolLayout, Any]:
    """A layout in memory, and a long request."""
    sizes = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "num_pages": TOKENS // 16 + 2}
    pool = MLAPool(layers=range(1), dtype="f32", page_size=16, **sizes)
    _kept.append(pool)
    return pool.layout, oracle.place(pool, TOKENS)


_kept: list[object] = []


def ask_for_digests(data: bytes) -> None:
    """Prefill is asked for digests of a room, and makes them."""
    layout, address = long_room()
    prefill = PrefillMachine(machines.hello(layout, "g1"), layout, now=0.0)
    prefill.handle(Received(b"d", machines.hello(layout, "d")), 0.0)
    chunk = OfferChunk(room="r", table=address, tokens=range(TOKENS), last=True)
    prefill.handle(chunk, 0.0)
    attempt = {"generation": "g1", "room": "r", "attempt": "a"}
    request = messages.ReadRequest(**attempt, start=0, num_tokens=TOKENS, readers=1)
    prefill.handle(Received(b"d", request), 0.0)
    for each in (False, True):
        message = messages.DigestRequest(**attempt, each=each, pieces=data)
        for effect in prefill.handle(Received(b"d", message), 0.0):
            if isinstance(effect, ComputeDigest):
                with suppress(ValueError):
                    list(digests(layout, effect.table, effect.pieces, effect.each))


def pieces() -> list[Any]:
    """A shape of pieces, the number of its shape and the layer of each piece."""
    layout, _ = long_room()
    return [[[*layout.regions[0].key[::2], [], 0, 1, []]], [0], [0]]


def many_pieces(number: int) -> bytes:
    """The same piece again and again."""
    shapes, which, layers = pieces()
    return to_msgpack([shapes, which * number, layers * number])


def many_shapes(number: int) -> bytes:
    """Pieces of one entry each, all of other entries."""
    ((*shape, _, _, held),), _, _ = pieces()
    shapes = [[*shape, n % TOKENS, n % TOKENS + 1, held] for n in range(number)]
    return to_msgpack([shapes, [*range(number)], [0] * number])


def unpack(data: bytes) -> None:
    with suppress(messages.WireError):
        codec.unpack_aux(data)


# all of them


def grown(sample: Any, encode: Encode, skip: tuple[str, ...] = ()) -> dict[str, Grower]:
    """All ways to grow a sample."""
    return {name: grow for name, grow in growers(sample, encode) if not name.startswith(skip)}


def unpacked(data: bytes) -> Any:
    return tree(msgspec.msgpack.decode(data))


def _wide(encode: Callable[[bytes], bytes]) -> dict[str, Grower]:
    return {
        name: lambda number, make=make: encode(build.packed(make(number)))
        for name, make in wide.LAYOUTS.items()
    }


_chunk = planning.ready(OWN, 0, samples.TOKENS, {"room": "r", "attempt": "a", "generation": "g1"})
_layout, _states = (unpacked(samples.CASES[number].own.to_msgpack()) for number in (0, 4))
TARGETS: Mapping[str, Growth] = {
    "snapshot": Growth(read_header, grown(snapshot(), sealed, skip=("target.0.rope",))),
    "layout": Growth(
        partial(read_layout, PoolLayout.from_msgpack),
        {**grown(_layout, to_msgpack), **_wide(lambda data: data)},
    ),
    "spaces": Growth(partial(read_layout, PoolLayout.from_msgpack), grown(_states, to_msgpack)),
    "json": Growth(partial(read_layout, PoolLayout.from_json), grown(_layout, to_json)),
    "hello": Growth(
        say_hello,
        {**grown(unpacked(codec.encode(machines.hello(OWN, "g1"))), to_msgpack), **_wide(in_hello)},
    ),
    "chunk": Growth(get_chunk, grown(unpacked(_chunk), to_msgpack)),
    "digest": Growth(
        ask_for_digests,
        {
            **grown(pieces(), to_msgpack),
            "pieces: repeated": many_pieces,
            "pieces: numbered": many_shapes,
        },
    ),
    "geometry": Growth(stored.run, grown(unpacked(next(stored.seeds())), to_msgpack)),
    "contract": Growth(contracts.run, grown(tree(json.loads(next(contracts.seeds()))), to_json)),
    "aux": Growth(unpack, grown(tree({"a": [1, {"b": "x"}], "c": 1.5}), to_msgpack)),
}
