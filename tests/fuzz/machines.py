"""Both endpoints, in their own loop, against peers that send anything at any time.

What an endpoint sends must decode, an ended room must stay ended, reads must stay in memory, and no
message may raise. Only memory is replaced: results of reads and digests are chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from inspect import getgeneratorlocals
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from disagg import DecodeEndpoint, Engine, Group, KVPoll, PrefillEndpoint, TransferError, UsageError
from disagg.digest.digest import from_wire
from disagg.protocol import codec, messages
from disagg.protocol.events import ReadEnded
from disagg.protocol.peers.link import Read
from disagg.protocol.versions import PROTOCOL, spoken
from disagg.runtime.reader import Reader
from disagg.runtime.staging import StagingBuffers
from disagg.runtime.transport import MemoryNetwork, MemoryTransport
from kvpool.layout import PoolLayout, RequestAddress
from tests.disagg.protocol import pair
from tests.disagg.stepping import Clock
from tests.fuzz import build, planning, samples
from tests.fuzz.build import Choices, pick
from tests.fuzz.guard import Finding
from tests.fuzz.stretch import stretched

MOST_STEPS = 40
ROOMS: tuple[messages.Room, ...] = (0, 1, "r", "x" * messages.MAX_ROOM_NAME)
PEERS = (b"a", b"b", b"\x00" * 255)
KINDS = build.message_types()
LAYERS = [
    {"owner": owner, "start": start, "stop": stop}
    for owner in ("target", "draft", "nobody")
    for start, stop in ((0, 1), (1, 2), (1, 99), (0, 1 << 40), (3, 2))
]
AUXES = b"\x81\xa1x\x07", b"\x81\xa1x\x08", b"\x81\xa2ab\x91\x07", b"\xc1"


@lru_cache
def hello(layout: PoolLayout, generation: str) -> messages.Hello:
    return msgspec.structs.replace(pair.hello(generation, layout), timeout=1.0)


def sent(kind: type[Any], choices: Choices, **fields: Any) -> Any:
    """A message of these fields, and others, encoded and decoded."""
    return codec.decode(build.packed(build.message(kind, choices, **fields)))


def hostile(
    choices: Choices, rooms: Iterable[object], attempts: Iterable[str], generation: str
) -> Any:
    """Any message: often about an existing room, of its attempt and its prefill's generation."""
    kind = pick(choices, list(KINDS.values()))
    fields = build.message(kind, choices)
    given = {
        "generation": (*[generation] * 3, "other"),
        "room": tuple(rooms),
        "attempt": (*attempts, "other"),
        "readers": (1, 1, 2, 1 << 16),
        "timeout": (1.0, messages.MIN_TIMEOUT, messages.MAX_TIMEOUT),
        "engine": ("local",) * 5 + ("nixl",),
        "protocol": (PROTOCOL,) * 4 + (*spoken(PROTOCOL)[:-1], 99),
        "leased": (True, False),
        "final": (True, False, False),
        "aux": (*[b"\x80"] * 2, *AUXES),
        "layers": (*[None] * 5, *LAYERS),
        "values": (b"", bytes(8), bytes(7), bytes(800)),
        "problem": ("", "", "no"),
    }
    for name, options in given.items():
        if name in fields and choices.number(0, 9):
            fields[name] = pick(choices, options)
    if kind is messages.Hello and choices.number(0, 9):
        layout = pick(choices, samples.LAYOUTS)
        fields["layout"] = pick(choices, (layout.to_msgpack(), stretched(layout, choices)))
    return fields


class Wire(MemoryTransport):
    """A transport whose incoming messages the test makes, and whose outgoing ones it reads."""

    def __init__(self) -> None:
        super().__init__(MemoryNetwork())
        self.sent: list[tuple[Any, bytes]] = []

    def send(self, peer: Any, data: bytes) -> str | None:
        self.sent.append((peer, data))
        return None


class ChosenEngine(Engine):
    """An engine without memory, whose reads end as chosen."""

    name = "local"

    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    @classmethod
    def availability(cls) -> None:
        return None

    def metadata(self) -> bytes:
        return b""

    def _nothing(self, *_: Any) -> None:
        return

    register = connect = read = close = _nothing

    def poll(self, transfer: Any) -> bool:
        end = self._choices.number(0, 9)
        if end == 0:
            raise TransferError("own")
        return end > 3

    def fence(self, peer: Any, timeout: float | None = None) -> bool:
        return bool(self._choices.number(0, 1))


class ChosenDigests:
    """A digester whose digests are chosen."""

    def __init__(self, choices: Choices) -> None:
        self._choices, self._jobs = choices, list[Any]()

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def enqueue(self, key: Any, steps: Generator[Any, None, None]) -> None:
        self._jobs.append((key, len(getgeneratorlocals(steps)["pieces"])))

    def step(self) -> Any:
        if not self._jobs or self._choices.number(0, 1):
            return None
        key, count = self._jobs.pop()
        return pick(self._choices, ((key, bytes(8 * count), ""), (key, None, "no")))


class CountedReader(Reader):
    """A reader that checks its batches and counts the reads of each room."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.open: dict[object, int] = {}

    def add_read(self, read: Read) -> None:
        self.open[read.room] = self.open.get(read.room, 0) + 1
        _bind(read)
        super().add_read(read)

    def step(self, waits: bool = True) -> list[Any]:
        events = super().step(waits)
        for event in events:
            if isinstance(event, ReadEnded):
                self.open[event.read.room] -= 1
        return events


class Unexpected(logging.Handler):
    """Raises if an endpoint logs an exception that it did not expect."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1]:
            raise Finding(self.format(record)) from record.exc_info[1]


@contextmanager
def no_message_raises() -> Iterator[None]:
    """Makes a finding of every exception that the loop catches and did not expect."""
    handler = Unexpected()
    logging.getLogger("disagg").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("disagg").removeHandler(handler)


def made(kind: Any, layout: PoolLayout, wire: Wire, clock: Clock, choices: Choices, **more: Any):
    """An endpoint in whose loop only memory is replaced."""
    digests = ChosenDigests(choices)
    with (
        patch("disagg.runtime.endpoint.Digester", lambda: digests),
        patch("disagg.runtime.endpoint.Reader", CountedReader),
        patch("disagg.runtime.decode_endpoint.staging_buffers", lambda *_, **__: StagingBuffers()),
    ):
        options = {"transport": wire, "clock": clock, "threaded": False, "peer_timeout": 1.0}
        return kind(layout, ChosenEngine(choices), **options, **more)


def decode_sent(wire: Wire) -> list[tuple[Any, Any]]:
    """Takes what an endpoint has sent; raises WireError if no peer could decode it."""
    found = [(to, codec.decode(data)) for to, data in wire.sent]
    wire.sent.clear()
    return found


@no_message_raises()
def prefill(choices: Choices) -> str:
    layout, clock, wire = samples.CASES[0].own, Clock(), Wire()
    lease = pick(choices, (None, 5.0))
    endpoint = made(PrefillEndpoint, layout, wire, clock, choices, bind="x", lease=lease)
    ended: dict[messages.Room, KVPoll] = {}
    address = samples.address(layout)
    wire.inbox += [(peer, codec.encode(hello(layout, "d"))) for peer in PEERS[:2]]
    for _ in range(choices.number(1, MOST_STEPS)):
        step, name = choices.number(0, 9), pick(choices, ROOMS)
        if step in (0, 4):
            clock.now += pick(choices, (0.01, 0.3, 2.0, 9.0))
        elif step == 1:
            _own(_offer, endpoint, name, choices, address)
        elif step == 2:
            _own(endpoint.abort, name, "own")
        elif step == 3 and _own(endpoint.forget, name):
            ended.pop(name, None)
        elif step in (5, 6):
            kind = pick(choices, (messages.ReadRequest, messages.ReadDone))
            about = {"generation": "g1", "room": name, "attempt": "a", "readers": 1}
            wire.inbox.append((PEERS[0], build.packed(build.message(kind, choices, **about))))
        else:
            fields = hostile(choices, ROOMS, ("a", "b"), "g1")
            wire.inbox.append((pick(choices, PEERS), build.packed(fields)))
        endpoint.step()
        decode_sent(wire)
        known = endpoint.machine.rooms.by_name
        _check_ended(endpoint, ended, [name for name in ROOMS if name in known])
    return "Success" if KVPoll.Success in ended.values() else "went on"


def _offer(endpoint: Any, name: Any, choices: Choices, address: RequestAddress) -> None:
    stop = choices.number(endpoint.machine.computed(name), samples.TOKENS)
    last = stop == samples.TOKENS
    tokens = range(endpoint.machine.computed(name), stop)
    layers = pick(choices, (None, None, range(1), range(1, 9)))
    aux = {"first": 7} if last else {}
    endpoint.send(name, address, tokens=tokens, layers=layers, last=last, aux=aux)


@no_message_raises()
def decode(choices: Choices) -> str:
    """Decode's endpoint against the ranks of a prefill, which learn attempts from its messages."""
    case, clock, wire = pick(choices, samples.CASES), Clock(), Wire()
    peers = pick(choices, case.peers)
    options = {
        "verify": pick(choices, (None, "checksum")),
        "offer_timeout": pick(choices, (None, 5.0)),
        "ranks": pick(choices, (1, Group((case.own,) * 2, choices.number(0, 1)))),
    }
    endpoint = made(DecodeEndpoint, case.own, wire, clock, choices, **options)
    link = endpoint.connect([f"rank{number}" for number in range(len(peers))])
    requests: dict[tuple[object, int], Any] = {}
    attempts: dict[messages.Room, str] = {}
    known: set[messages.Room] = set()
    ended: dict[messages.Room, KVPoll] = {}
    for rank in range(len(peers) if choices.number(0, 3) else 0):
        wire.inbox.append((rank, codec.encode(hello(peers[rank], "g1"))))
    for _ in range(choices.number(1, MOST_STEPS)):
        step, name = choices.number(0, 19), pick(choices, ROOMS[:2])
        rank = choices.number(0, len(peers) - 1)
        if step == 0:
            clock.now += pick(choices, (0.01, 0.3, 2.0, 9.0))
        elif step in (1, 2) and name not in known:
            start, aux = pick(choices, (0, 0, 5, samples.TOKENS)), pick(choices, ((), ("x",)))
            address, asked = samples.address(case.own), {"start": start, "link": link, "aux": aux}
            if choices.number(0, 3) == 0:
                endpoint.decline(name, link)
                known.add(name)
            elif _own(endpoint.receive, name, address, **asked):  # both rooms write the same items
                known.add(name)
        elif step == 3 and name in known and choices.number(0, 1):
            endpoint.abort(name, "own")
        elif step == 4 and name in known:
            if endpoint.poll(name).ended and not endpoint.reading(name):
                endpoint.forget(name)
                known.remove(name)
                ended.pop(name, None)
        elif step in (5, 6):
            wire.inbox.append((rank, codec.encode(hello(peers[rank], "g1"))))
        elif step < 16 and (name, rank) in requests:
            answer = _honest(choices, peers[rank], requests[name, rank])
            wire.inbox.append((rank, codec.encode(answer)))
        elif step > 16:
            fields = hostile(choices, ROOMS, attempts.values(), "g1")
            wire.inbox.append((rank, build.packed(fields)))
        endpoint.step()
        answered = messages.ReadRequest | messages.DigestRequest | messages.ReadDone
        for to, message in decode_sent(wire):
            if isinstance(message, answered):
                requests[message.room, to] = message
                attempts[message.room] = message.attempt
        _check_ended(endpoint, ended, known)
        counts = endpoint._loop.reader.open
        if any(endpoint.reading(room) != (counts.get(room, 0) > 0) for room in known):
            raise Finding(f"reads are counted wrongly: {counts}.")
    return "Success" if KVPoll.Success in ended.values() else "went on"


def _honest(choices: Choices, peer: PoolLayout, asked: Any) -> Any:
    """What a prefill answers; a chunk may not be the next one."""
    about = {"room": asked.room, "attempt": asked.attempt, "generation": asked.generation}
    if isinstance(asked, messages.ReadRequest):
        start, stop = pick(choices, ((0, samples.TOKENS), (0, samples.TOKENS), (0, 9), (9, 21)))
        layers = pick(choices, (*[None] * 3, *LAYERS))
        last = stop == samples.TOKENS and choices.number(0, 2) > 0
        more = {"layers": layers, "last": last} if layers else {}
        return codec.decode(planning.ready(peer, start, stop, {**about, **more}))
    if isinstance(asked, messages.ReadDone):
        return sent(messages.ReleaseAck, choices, **about, leased=True)
    count = 8 * len(from_wire(asked.pieces))
    values = pick(choices, (bytes(count), bytes(count), bytes(count - 1), b"\x01" * count))
    return sent(messages.Digests, choices, **about, each=asked.each, values=values, problem="")


def _bind(read: Read) -> None:
    """Binds a read as the reader does, and checks the batch."""
    try:
        batch = read.bound_runs()
    except ValueError:
        return
    source = read.plan.sources[read.rank.source]
    planning.check(batch, source, read.source_address, read.plan.dest, read.dest_address)


def _own(call: Any, *arguments: Any, **options: Any) -> bool:
    """A call of one's own side, which may be refused; whether it was not."""
    try:
        call(*arguments, **options)
    except UsageError:
        return False
    return True


def _check_ended(
    rooms: Any, ended: dict[messages.Room, KVPoll], names: Collection[messages.Room]
) -> None:
    """Raises if one of the rooms `names` has ended and changed, or is listed otherwise."""
    for name in names:
        state = rooms.poll(name)
        if ended.get(name, state) is not state:
            raise Finding(f"room {name!r} was {ended[name]}, and is {state}.")
        if state.ended:
            ended[name] = state
            if (state is KVPoll.Failed) != (rooms.failure(name) is not None):
                raise Finding(f"room {name!r} is {state}, its failure {rooms.failure(name)}.")
    for name, state, _ in rooms.ended():
        if name in names and ended.get(name) is not state:
            raise Finding(f"room {name!r} is {ended.get(name)}, and listed as {state}.")


def seeds() -> Iterator[bytes]:
    random = np.random.default_rng(0)
    for size in (0, 16, 100, 400, 1500):
        yield random.bytes(size)
