"""Everything that decodes a peer's bytes, and what must hold for any bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from disagg.engines.mooncake import MooncakeEngine
from disagg.protocol import codec, messages
from disagg.protocol.versions import PROTOCOL
from kvpool.layout import LayoutError, PoolLayout
from tests.fuzz import (
    build,
    contracts,
    digesting,
    edits,
    local,
    machines,
    planning,
    samples,
    stored,
)
from tests.fuzz.guard import Finding
from tests.fuzz.stretch import stretched

Mutator = Callable[[bytes, random.Random, int], bytes]


class Provided:
    """Choices from Atheris' data provider."""

    def __init__(self, data: bytes) -> None:
        import atheris

        self._provider = atheris.FuzzedDataProvider(data)

    def number(self, low: int, high: int) -> int:
        return int(self._provider.ConsumeIntInRange(low, high))

    def data(self, most: int) -> bytes:
        return bytes(self._provider.ConsumeBytes(self.number(0, most)))


@dataclass(frozen=True)
class Target:
    """`run` takes an input and returns its outcome in a word; it raises if the input is a finding.

    `seeds` are the first inputs, `mutate` makes others of them; without `mutate` the input is a
    sequence of choices.
    """

    run: Callable[[bytes], str]
    seeds: Callable[[], Iterator[bytes]]
    mutate: Mutator | None = edits.mutate


def run_wire(data: bytes) -> str:
    """A message or a WireError; what was read can be encoded again, and its methods work."""
    try:
        message = codec.decode(data)
    except messages.WireError:
        return "refused"
    again = codec.encode(message)
    if codec.encode(codec.decode(again)) != again:
        raise Finding(f"{message} changes in a round trip.")
    if (room := getattr(message, "room", None)) is not None and messages.room_name(room) != room:
        raise Finding(f"{message}: a caller cannot name its room.")
    for name, part in vars(type(message)).items():
        if callable(part) and not name.startswith("_"):
            with suppress(ValueError):
                getattr(message, name)()
    if isinstance(message, messages.Hello):
        with suppress(LayoutError):
            PoolLayout.from_msgpack(message.layout)
    if isinstance(message, messages.ChunkReady):
        with suppress(messages.WireError):
            codec.unpack_aux(message.aux)
    return type(message).__name__


def every_message() -> Iterator[bytes]:
    """Several messages of every type; most hellos with a layout."""
    for kind in build.message_types().values():
        yield build.packed(build.message(kind, build.Seeded(0)))
        for seed, layout in zip(range(1, 8), samples.LAYOUTS):
            fields = {"protocol": PROTOCOL, "layout": layout.to_msgpack()}
            yield build.packed(build.message(kind, build.Seeded(seed), **fields))


def run_aux(data: bytes) -> str:
    """A map of names or a WireError; what was read can be sent again."""
    try:
        values = codec.unpack_aux(data)
    except messages.WireError:
        return "refused"
    again = codec.pack_aux(values)
    if codec.pack_aux(codec.unpack_aux(again)) != again:
        raise Finding(f"{values} change in a round trip.")
    return "read"


def auxes() -> Iterator[bytes]:
    yield build.packed({"token": 7, "logprob": -0.5, "text": "x", "hidden": b"\0" * 32})
    yield build.packed({"nested": [[1, [2]], {"a": {"b": None}}], "yes": True})
    yield build.packed({})


def run_layout(read: Callable[[bytes], PoolLayout], data: bytes) -> str:
    """A layout or a LayoutError; what was read is equal after a round trip."""
    try:
        layout = read(data)
    except LayoutError:
        return "refused"
    if PoolLayout.from_msgpack(layout.to_msgpack()) != layout:
        raise Finding(f"{layout} changes in a round trip.")
    if PoolLayout.from_json(layout.to_json()) != layout:
        raise Finding(f"{layout} changes in a round trip as JSON.")
    layout.fingerprint()
    layout.slabs()
    layout.live_bytes(1 << 40)
    return "read"


def layouts() -> Iterator[bytes]:
    for layout in samples.LAYOUTS:
        yield layout.to_msgpack()


def texts() -> Iterator[bytes]:
    for layout in samples.LAYOUTS:
        yield layout.to_json().encode()


def mutate_layout(data: bytes, source: random.Random, most: int) -> bytes:
    """An edit, or a layout of extreme size."""
    if source.random() < 0.7:
        return edits.mutate(data, source, most)
    return stretched(source.choice(samples.LAYOUTS), build.Seeded(source.getrandbits(32)))[:most]


def mutate_json(data: bytes, source: random.Random, most: int) -> bytes:
    """An edit of the document, if JSON can express it."""
    try:
        edited = edits.mutate(build.packed(json.loads(data)), source, most)
        return msgspec.json.encode(msgspec.msgpack.decode(edited))[:most]
    except (ValueError, TypeError, OverflowError, RecursionError):
        return edits.edit_bytes(data, source)[:most]


def mutate_behind(data: bytes, source: random.Random, most: int) -> bytes:
    return data[:1] + edits.mutate(data[1:], source, most - 1)


TARGETS = {
    "wire": Target(run_wire, every_message),
    "aux": Target(run_aux, auxes),
    "layout": Target(partial(run_layout, PoolLayout.from_msgpack), layouts, mutate_layout),
    "json": Target(partial(run_layout, PoolLayout.from_json), texts, mutate_json),
    "plan": Target(planning.run, planning.seeds, planning.mutate),
    "local": Target(local.run, local.seeds, local.mutate),
    "digest": Target(digesting.run, digesting.seeds, mutate_behind),
    "geometry": Target(stored.run, stored.seeds, stored.mutate),
    "contract": Target(contracts.run, contracts.seeds, mutate_json),
    "prefill": Target(lambda data: machines.prefill(Provided(data)), machines.seeds, None),
    "decode": Target(lambda data: machines.decode(Provided(data)), machines.seeds, None),
}
if MooncakeEngine.availability() is None:
    from tests.fuzz import mooncake

    TARGETS["mooncake"] = Target(mooncake.run, mooncake.seeds)
