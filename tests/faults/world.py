"""Two prefill and two decode processes: orders to them, and events from them."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from disagg.engines.base import Engine
from disagg.protocol.status import KVPoll
from disagg.runtime.keys import write_keys
from tests.faults.child import FaultyChild, main
from tests.faults.orders import Course, Order, Setup, Shape
from tests.ports import free_port
from tests.processes import Child, stands_still

PATIENCE = 60.0
"""Seconds after which a process that does not answer counts as stuck."""
PEER_TIMEOUT, LEASE, READ_TIMEOUT = 0.6, 2.2, 1.2
BOUND = 3 * PEER_TIMEOUT
"""Seconds within which a death must be noticed."""
PREFILL_SALTS, DECODE_SALTS = range(100, 116), range(200, 216)


class Violation(AssertionError):
    """Something happened that must never happen."""


class Late(Violation):
    """Something did not happen in time, which a starved machine can also cause."""


class Peer(Child):
    """A process and its pipe."""

    generation = ""
    """The endpoint's, once it is up."""


@dataclass(eq=False, kw_only=True)
class Room:
    """One request, and its state on each side by process name."""

    number: int
    name: str
    link: str
    sources: list[str]
    sinks: list[str]
    course: Course
    begun: dict[str, float] = field(default_factory=dict)
    """When decode asked for it, and when prefill learned of that."""
    ended: dict[str, tuple[float, KVPoll, str]] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    """Decodes that sent ReadDone, and how many bytes were wrong then."""
    back: dict[str, float] = field(default_factory=dict)
    """When each process ended it and freed its pages, or died."""

    @property
    def who(self) -> list[str]:
        return [*self.sources, *self.sinks]

    def over(self) -> bool:
        """Whether it has ended and its pages are freed everywhere."""
        return self.back.keys() >= {*self.who}

    def succeeded(self) -> bool:
        states = [state for _, state, _ in self.ended.values()]
        return len(states) == len(self.who) and all(s is KVPoll.Success for s in states)

    def __str__(self) -> str:
        ends = {who: f"{state} {reason}".strip() for who, (_, state, reason) in self.ended.items()}
        return f"room {self.name} of {self.sources} to {self.sinks}: {ends}, back {[*self.back]}"


class World:
    """The processes p0, p1, d0 and d1. `ensure` replaces those that have died.

    `engines` makes the engines of some processes. `child` is what runs in each. `mortal` are
    processes that may die; the death of any other is a violation. `logs` is the folder of their
    output, in `folder`; it is kept unless all of them close properly.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        peer_timeout: float = PEER_TIMEOUT,
        lease: float = LEASE,
        read_timeout: float = READ_TIMEOUT,
        engines: Mapping[str, Callable[[], Engine]] | None = None,
        child: type[FaultyChild] = FaultyChild,
        folder: str | None = None,
    ) -> None:
        self._kind = child
        self.shape, self._peer_timeout, self._lease = shape, peer_timeout, lease
        self._read_timeout = read_timeout
        self._engines = engines or {}
        self.peers: dict[str, Peer] = {}
        self.rooms: dict[int, Room] = {}
        self.tripped: float | None = None
        self.answers: dict[tuple[str, str], Any] = {}
        self.mortal: set[str] = set()
        self.logs = tempfile.mkdtemp(prefix="faults-", dir=folder)
        self._keys = f"{self.logs}/keys" if shape.keys else None
        if self._keys is not None:
            write_keys(self._keys)
        self._numbers = 0
        self._ports: dict[str, str] = {}

    def ensure(self, stopped: Sequence[str] = ()) -> None:
        """Starts missing processes; returns when all links are ready except those of `stopped`."""
        fresh = [name for name in ("p0", "p1", "d0", "d1") if name not in self.peers]
        for name in fresh:
            self._start(name)
        if not self.until(lambda: all(p.generation for p in self.peers.values()), PATIENCE):
            raise Violation("a process does not start")
        for link in self.shape.links():
            for decode in ("d0", "d1"):
                if decode in fresh:
                    self.tell(decode, "connect", link, self.addresses(link))
        until = time.monotonic() + PATIENCE
        while not all(self._settled(d) for d in ("d0", "d1") if d not in stopped):
            if time.monotonic() > until:
                raise Violation("a link does not become ready")
            self.pump(0.01)

    def addresses(self, link: str) -> list[str]:
        return [self._ports[prefill] for prefill in self.shape.links()[link]]

    def tell(self, name: str, *order: Any) -> None:
        """Sends an order to one process; it is lost if the process has died."""
        peer = self.peers.get(name)
        if peer is not None:
            try:
                peer.pipe.send(order)
            except (BrokenPipeError, ConnectionResetError):
                self._gone(name)

    def trip(self, holder: str, point: str, count: int, victim: str, number: int) -> None:
        """When `holder` reaches a point for the `count`-th time, the victim is signalled."""
        if number == signal.SIGKILL:
            self.mortal.add(victim)
        self.tripped = None
        pid = 0 if victim == holder else self.peers[victim].process.pid
        self.tell(holder, "trip", point, count, pid, number)

    def ask(self, name: str, question: str) -> Any:
        """The answer of a process to an order without arguments."""
        self.answers.pop((name, question), None)
        self.tell(name, question)
        self.until(lambda: (name, question) in self.answers or name not in self.peers, PATIENCE)
        return self.answers.pop((name, question), None)

    def order(
        self,
        link: str,
        sinks: Sequence[str],
        course: Course,
        name: str | None = None,
        offered: bool = True,
    ) -> Room:
        """One request over a link; unless `offered`, only decode gets the order."""
        self._numbers += 1
        number = self._numbers
        sources = self.shape.links()[link] if offered else []
        room = Room(
            number=number,
            name=name or f"r{number}",
            link=link,
            sources=list(sources),
            sinks=list(sinks),
            course=course,
        )
        self.rooms[number] = room
        for who in room.who:
            if who not in self.peers:
                room.back[who] = time.monotonic()
            self.tell(who, "order", Order(number, room.name, course, link))
        return room

    def ends(self, room: Room) -> dict[str, tuple[KVPoll, str]]:
        """How a room ends on each side that lives: state and reason."""
        if not self.until(room.over, PATIENCE):
            raise Violation(f"stuck: {room}")
        return {who: (state, reason) for who, (_, state, reason) in room.ended.items()}

    def failed(self, pairs: Sequence[tuple[str, str]], course: Course) -> list[tuple[str, str]]:
        """The pairs of a prefill and a decode between which a new request fails."""
        rooms = {pair: self.order(pair[0], [pair[1]], course) for pair in pairs}
        for room in rooms.values():
            self.ends(room)
        return [pair for pair, room in rooms.items() if not room.succeeded()]

    def check_pages(self) -> None:
        """No page is lost or held, and no other request's byte has changed."""
        for name in self.peers:
            audit = self.ask(name, "audit")
            lost = any(every != free for every, free in audit["items"].values())
            held = [*audit["leases"].leased.values(), *audit["leases"].quarantined.values()]
            if audit["problems"] or audit["orders"] or lost or any(held):
                raise Violation(f"{name}: {audit}")

    def signal(self, name: str, number: int) -> None:
        """Signals a process; SIGCONT waits until it has stopped."""
        pid = self.peers[name].process.pid
        if number == signal.SIGKILL:
            self.mortal.add(name)
        elif number == signal.SIGCONT and not self.until(lambda: stands_still(pid), PATIENCE):
            raise Violation(f"{name} does not stop")
        os.kill(pid, number)

    def bury(self, name: str) -> None:
        """Waits until a process that was killed is dead, and reads its last events."""
        until = time.monotonic() + PATIENCE
        while name in self.peers:
            if time.monotonic() > until:
                raise Violation(f"{name} does not die")
            self.pump(0.01)

    def pump(self, seconds: float) -> None:
        pipes = {peer.pipe: name for name, peer in self.peers.items()}
        for pipe in wait(list(pipes), seconds):
            name = pipes[pipe]
            try:
                while pipe.poll():
                    self._event(name, *pipe.recv())
            except (EOFError, OSError):
                self._gone(name)

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Reads events until a condition holds; whether it does."""
        end = time.monotonic() + seconds
        while not condition():
            left = end - time.monotonic()
            if left <= 0:
                return False
            self.pump(min(left, 0.05))
        return True

    def close(self) -> None:
        self.mortal.update(self.peers)
        for name, peer in list(self.peers.items()):
            closed = self.ask(name, "close")
            if closed is None:
                raise Violation(f"{name} does not close")
            if closed["problems"]:
                raise Violation(f"{name}: {closed['problems']}")
            peer.process.join(PATIENCE)
            if peer.process.exitcode != 0:
                raise Violation(f"{name} ended with {peer.process.exitcode}")
        shutil.rmtree(self.logs)

    def kill(self) -> None:
        for peer in self.peers.values():
            peer.process.kill()
            peer.process.join()

    def bind(self, name: str) -> str:
        """Where a prefill listens, whenever it is started."""
        return f"tcp://127.0.0.1:{free_port()}"

    def setup(self, name: str) -> Setup:
        """How a process is started."""
        which, shape = int(name[1]), self.shape
        options: dict[str, Any] = {"peer_timeout": self._peer_timeout}
        bind = None
        if name[0] == "p":
            if name not in self._ports:
                self._ports[name] = self.bind(name)
            bind = self._ports[name]
            options["lease"] = self._lease
        else:
            options["read_timeout"], options["ranks"] = self._read_timeout, shape.readers
            options["verify"] = "checksum" if which == 0 else None
        return Setup(
            engine=shape.engine,
            pool=(shape.prefill if bind else shape.decode)[which],
            salts=PREFILL_SALTS if bind else DECODE_SALTS,
            options=options,
            bind=bind,
            max_bytes=parts(shape.engine)[which],
            environment=shape.environment,
            log=f"{self.logs}/{name}",
            keys=self._keys,
            make=self._engines.get(name),
        )

    def started(self, name: str, *arguments: Any) -> Peer:
        """A process that runs `main(pipe, *arguments)`."""
        return Peer(main, *arguments)

    def _start(self, name: str) -> None:
        self.peers[name] = self.started(name, self.setup(name), self._kind)

    def _settled(self, decode: str) -> bool:
        generations = {
            n: [self.peers[p].generation for p in ps] for n, ps in self.shape.links().items()
        }
        return bool(self.ask(decode, "settled") == generations)

    def _gone(self, name: str) -> None:
        for room in self.rooms.values():
            if name in room.who:
                room.back.setdefault(name, time.monotonic())
        peer = self.peers.pop(name)
        peer.process.join(PATIENCE)
        peer.pipe.close()
        if name not in self.mortal:
            raise Violation(f"{name} has died by itself, exit code {peer.process.exitcode}")
        self.mortal.remove(name)

    def _event(self, name: str, at: float, event: str, *given: Any) -> None:
        if event == "up":
            self.peers[name].generation = given[0]
        elif event == "tripped":
            self.tripped = at
        elif event == "problem":
            raise Violation(f"{name}: {given[0]}")
        elif event in ("settled", "audit", "untrip", "closed"):
            self.answers[name, "close" if event == "closed" else event] = given[0]
        elif (room := self.rooms.get(given[0])) is not None:
            self._room_event(room, name, at, event, *given[1:])

    def _room_event(self, room: Room, name: str, at: float, event: str, *given: Any) -> None:
        if event == "begun":
            room.begun[name] = at
        elif event == "back":
            room.back[name] = at
        elif event == "done":
            room.done[name] = given[0]
        else:
            state, reason, count = given
            room.ended[name] = at, state, reason
            if count:
                raise Violation(f"{name}: {room} succeeded with {count} wrong bytes")
            if state is KVPoll.Failed and not reason:
                raise Violation(f"{name}: {room} failed without a reason")


def parts(engine: str) -> tuple[int, int]:
    """Most bytes of one part of a read, on d0 and d1: few, so that reads take long."""
    return (8192, 16384) if engine == "mooncake" else (512, 1024)
