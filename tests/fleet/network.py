"""Virtual time, and a network in it: messages take time, and some are lost."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from disagg.runtime.transport import MemoryConnection, MemoryNetwork, MemoryTransport
from tests.fleet.spec import Spec

FIRST_SECOND = 1000.0


class Timeline:
    """What happens when; nothing happens between. What is due at the same time happens in the order
    in which it was planned. `trace` is a digest of everything that is noted, in order.
    """

    def __init__(self) -> None:
        self.now = FIRST_SECOND
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._hash = hashlib.blake2b(digest_size=8)

    def clock(self) -> float:
        return self.now

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), call))

    def step(self) -> None:
        self.now, _, call = heapq.heappop(self._due)
        call()

    def note(self, *what: object) -> None:
        self._hash.update(repr((self.now, *what)).encode())

    @property
    def trace(self) -> str:
        return self._hash.hexdigest()


class _Tagged(msgspec.Struct):
    """A message, of which only the type is read."""

    type: str


_tag = msgspec.msgpack.Decoder(_Tagged)


@dataclass(eq=False, slots=True)
class Line(MemoryConnection):
    """A connection. Its messages keep their order; `broken` counts how often all that was under way
    was lost.
    """

    last: dict[str, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})
    broken: int = 0
    gone: bool = False
    """Who dialled died."""


class RankTransport(MemoryTransport):
    def __init__(self, network, rank):
        super().__init__(network)
        self.rank = rank


class FleetNetwork(MemoryNetwork):
    """Counts messages by type (`sent`, and their bytes `nbytes`) and those that it lost."""

    def __init__(self, spec: Spec, timeline: Timeline) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.lost = 0
        self._spec, self._timeline = spec, timeline
        self._random = random.Random(f"network {spec.seed}")

    def dial(self, dialler: MemoryTransport, peer: int, address: str) -> Line:
        return Line(dialler, peer, address, self.identity())

    def delay(self) -> float:
        """How long one message is under way: half the mean or more."""
        return self._spec.latency / 2 * (1 + self._random.expovariate(1))

    def carry(self, line: Line, way: str, data: bytes) -> None:
        tag = _tag.decode(data).type
        self.sent[tag] += 1
        self.nbytes[tag] += len(data)
        if line.gone or self._random.random() < self._spec.loss:
            self.lost += 1
            return
        sender = line.dialler if way == "up" else self.listeners[line.address]
        left = max(self._timeline.now, sender.rank.busy_until)
        at = line.last[way] = max(line.last[way], left + self.delay())
        self._timeline.at(at, partial(self._arrive, line, way, line.broken, tag, data))

    def break_all(self, lines: Iterable[Line], *, gone: bool) -> None:
        """An end of these connections died: what is under way is lost, and so is what follows, if
        it is the end that dialled; to another listener at the address they are new.
        """
        for line in lines:
            line.broken += 1
            line.gone = line.gone or gone
            line.identity = self.identity()

    def _arrive(self, line: Line, way: str, broken: int, tag: str, data: bytes) -> None:
        if way == "up":
            receiver = self.listeners.get(line.address)
        else:
            receiver = None if line.closed else line.dialler
        if broken != line.broken or receiver is None:
            self.lost += 1
            return
        self._timeline.note(tag, len(data), receiver.rank.name)
        self.deliver(line, way, data)
        receiver.rank.wake()
