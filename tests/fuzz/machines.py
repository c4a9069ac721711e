"""Both state machines against a peer that says what it likes, while their own side goes on.

What a machine says must be readable, what has ended must stay so, reads must stay in memory, and no
message may raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from disagg.digest.digest import from_wire
from disagg.protocol import messages
from disagg.protocol.decode import DecodeRooms
from disagg.protocol.decode_state import Read
from disagg.protocol.prefill import PrefillRooms
from disagg.protocol.status import KVPoll
from kvpool.layout import PoolLayout, RequestAddress
from tests.fuzz import build, planning, samples
from tests.fuzz.build import Choices, pick
from tests.fuzz.guard import Finding
from tests.fuzz.stretch import stretched

MOST_STEPS = 40
ROOMS: tuple[messages.Room, ...] = (0, 1, "r", "x" * messages.MAX_ROOM)
PEERS = (b"a", b"b", b"\x00" * 255)
KINDS = build.message_types()


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


@lru_cache
def hello(layout: PoolLayout, generation: str) -> messages.Hello:
    """What a side says first."""
    common: dict[str, Any] = {"timeout": 1.0, "protocol": messages.PROTOCOL, "engine": "local"}
    more = {"generation": generation, "layout": layout.to_msgpack(), "metadata": b""}
    said: messages.Hello = sent(
        build.message(messages.Hello, build.Seeded(0), **common, **more), messages.Hello
    )
    return said


def sent(fields: dict[str, Any], kind: type[Any]) -> Any:
    """A message as it arrives; raises Finding if it does not."""
    message = messages.decode(build.packed(fields))
    if not isinstance(message, kind):
        raise Finding(f"{fields} are read as {type(message).__name__}.")
    return message


def hostile(choices: Choices, rooms: Iterable[object], attempts: Iterable[str], life: str) -> Any:
    """Any message: often about a room that there is, in the attempt and of the life that it has."""
    kind = pick(choices, list(KINDS.values()))
    fields = build.message(kind, choices)
    given = {
        "generation": (life, life, life, "other"),
        "room": tuple(rooms),
        "attempt": (*attempts, "other"),
        "readers": (1, 1, 2, 1 << 16),
        "timeout": (1.0, messages.LEAST_TIMEOUT, messages.MOST_TIMEOUT),
        "engine": ("local",) * 5 + ("nixl",),
        "protocol": (messages.PROTOCOL,) * 5 + (99,),
        "leased": (True, False),
        "aux": (
            b"\x80",
            b"\x80",
            b"\x81\xa1x\x07",
            b"\x81\xa1x\x08",
            b"\x81\xa2ab\x91\x07",
            b"\xc1",
        ),
        "values": (b"", bytes(8), bytes(7), bytes(800)),
        "problem": ("", "", "no"),
    }
    for name, options in given.items():
        if name in fields and choices.number(0, 9):
            fields[name] = pick(choices, options)
    if kind is messages.Hello and choices.number(0, 9):
        layout = pick(choices, samples.LAYOUTS)
        fields["layout"] = pick(
            choices, (PoolLayout.to_msgpack(layout), stretched(layout, choices))
        )
    return kind, fields


def check_said(outbox: list[tuple[Any, bytes]]) -> list[tuple[Any, Any]]:
    """Reads and empties what a machine has to say; raises WireError if no peer could."""
    said = [(to, messages.decode(data)) for to, data in outbox]
    outbox.clear()
    return said


def prefill(choices: Choices) -> str:
    """Prefill's rooms against decodes."""
    layout, clock = samples.CASES[0].own, Clock()
    rooms = PrefillRooms(hello(layout, "life"), pick(choices, (None, 5.0)), clock)
    ended: dict[messages.Room, KVPoll] = {}
    address = samples.address(layout)
    for peer in PEERS[:2]:
        rooms.receive(peer, hello(layout, "d"))
    for _ in range(choices.number(1, MOST_STEPS)):
        step, name = choices.number(0, 9), pick(choices, ROOMS)
        if step == 0:
            clock.now += pick(choices, (0.01, 0.3, 2.0, 9.0))
            rooms.tick()
        elif step == 1:
            _own(rooms.send, name, *_chunk(choices, rooms.computed(name), address))
        elif step == 2:
            rooms.abort(name, "own")
        elif step == 3:
            if rooms.poll(name).ended:
                rooms.forget(name)
                ended.pop(name, None)
        elif step == 4 and rooms.checks:
            peer, check, _ = rooms.checks.pop()
            rooms.checked(peer, check, *pick(choices, ((bytes(8),), (b"", "not here"))))
        elif step in (5, 6):
            kind = pick(choices, (messages.ReadRequest, messages.ReadDone))
            about = {"generation": "life", "room": name, "attempt": "a", "readers": 1}
            rooms.receive(PEERS[0], sent(build.message(kind, choices, **about), kind))
        elif step > 6:
            kind, fields = hostile(choices, ROOMS, ("a", "b"), "life")
            rooms.receive(pick(choices, PEERS), sent(fields, kind))
        check_said(rooms.outbox)
        _check_ended(rooms, ended, ROOMS)
    return "Success" if KVPoll.Success in ended.values() else "went on"


def _chunk(choices: Choices, start: int, address: RequestAddress) -> tuple[Any, ...]:
    stop = choices.number(start, samples.TOKENS)
    last = stop == samples.TOKENS
    return address, range(start, stop), last, {"first": 7} if last else {}


def decode(choices: Choices) -> str:
    """Decode's rooms against two ranks of a prefill, which learn of attempts as real ones do."""
    case, clock = pick(choices, samples.CASES), Clock()
    peers = pick(choices, case.peers)
    rooms = DecodeRooms(hello(case.own, "d"), case.own, 1, bool(choices.number(0, 1)), clock)
    link = rooms.links.connect([f"rank{number}" for number in range(len(peers))])
    said: dict[tuple[object, int], Any] = {}
    attempts: dict[messages.Room, str] = {}
    known: dict[messages.Room, int] = {}
    ended: dict[messages.Room, KVPoll] = {}
    reads: list[Read] = []
    for rank in range(len(peers) if choices.number(0, 3) else 0):
        rooms.receive(rank, hello(peers[rank], "life"))
    for _ in range(choices.number(1, MOST_STEPS)):
        step, name, rank = (
            choices.number(0, 19),
            pick(choices, ROOMS[:2]),
            choices.number(0, len(peers) - 1),
        )
        if step == 0:
            clock.now += pick(choices, (0.01, 0.3, 2.0))
            rooms.tick()
        elif step in (1, 2) and name not in known:
            start = pick(choices, (0, 0, 5, samples.TOKENS))
            rooms.want(name, samples.address(case.own), start, link, pick(choices, ((), ("x",))))
            known[name] = 0
        elif step == 3 and name in known and choices.number(0, 1):
            rooms.abort(name, "own")
        elif step == 4 and name in known and rooms.poll(name).ended and not rooms.reading(name):
            rooms.forget(name)
            del known[name]
            ended.pop(name, None)
        elif step in (5, 6, 7) and reads:
            read = reads.pop(choices.number(0, len(reads) - 1))
            _bind(read)
            if choices.number(0, 9) == 0:
                rooms.read_failed(read, "own")
            rooms.read_ended(read, None)
            known[read.room] -= 1
        elif step == 8 and rooms.checks:
            check = rooms.checks.pop()
            rooms.checked(check, *pick(choices, ((bytes(8 * len(check.pieces)),), (None, "no"))))
        elif step == 9 and choices.number(0, 3) == 0:
            rooms.lost(rank, "own")
        elif step in (10, 11):
            rooms.receive(rank, hello(peers[rank], "life"))
        elif step in (12, 13, 14, 15, 16, 17) and (name, rank) in said:
            rooms.receive(rank, _honest(choices, peers[rank], said[name, rank]))
        elif step > 17:
            kind, fields = hostile(choices, ROOMS, attempts.values(), "life")
            rooms.receive(rank, sent(fields, kind))
        for to, message in check_said(rooms.links.outbox):
            if isinstance(
                message, (messages.ReadRequest, messages.DigestRequest, messages.ReadDone)
            ):
                said[message.room, to] = message
                attempts[message.room] = message.attempt
        for read in rooms.reads:
            known[read.room] += 1
        reads += rooms.reads
        rooms.reads.clear()
        _check_ended(rooms, ended, known)
        if any(rooms.reading(room) != (count > 0) for room, count in known.items()):
            raise Finding(f"reads are counted wrongly: {known}.")
    return "Success" if KVPoll.Success in ended.values() else "went on"


def _honest(choices: Choices, peer: PoolLayout, asked: Any) -> Any:
    """What a prefill answers; of chunks, one that may not be next."""
    about = {"room": asked.room, "attempt": asked.attempt, "generation": asked.generation}
    if isinstance(asked, messages.ReadRequest):
        start, stop = pick(choices, ((0, samples.TOKENS), (0, samples.TOKENS), (0, 9), (9, 21)))
        return messages.decode(planning.ready(peer, start, stop, about))
    if isinstance(asked, messages.ReadDone):
        released = build.message(messages.ReleaseAck, choices, **about, leased=True)
        return sent(released, messages.ReleaseAck)
    count = 8 * len(from_wire(asked.pieces))
    values = pick(choices, (bytes(count), bytes(count), bytes(count - 1), b"\x01" * count))
    found = {**about, "each": asked.each, "values": values, "problem": ""}
    return sent(build.message(messages.Digests, choices, **found), messages.Digests)


def _bind(read: Read) -> None:
    """What a reader does first."""
    try:
        batch = read.plan.bind(
            read.source, read.source_address, read.dest_address, tokens=read.tokens
        )
    except ValueError:
        return
    source = read.plan.sources[read.source]
    planning.check(batch, source, read.source_address, read.plan.dest, read.dest_address)


def _own(call: Any, *arguments: Any) -> None:
    """A call of one's own side, which may be one that makes no sense."""
    try:
        call(*arguments)
    except ValueError:
        return


def _check_ended(
    rooms: Any, ended: dict[messages.Room, KVPoll], names: Iterable[messages.Room]
) -> None:
    """What has ended stays as it is."""
    for name in names:
        state = rooms.poll(name)
        if ended.get(name, state) is not state:
            raise Finding(f"room {name!r} was {ended[name]}, and is {state}.")
        if state.ended:
            ended[name] = state
            if (state is KVPoll.Failed) != (rooms.failure(name) is not None):
                raise Finding(f"room {name!r} is {state}, its failure {rooms.failure(name)}.")


def seeds() -> Iterator[bytes]:
    """Choices at random: no document."""
    random = np.random.default_rng(0)
    for size in (0, 16, 100, 400, 1500):
        yield random.bytes(size)
