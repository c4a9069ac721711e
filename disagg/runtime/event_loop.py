"""Events in, effects out: a machine, and what it acts on. `EventLoop.turn` is one round over
messages, time, reads and digests, and never waits; threads that do are woken by it.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from disagg.digest.digest import Digester, digests
from disagg.engines.base import Engine
from disagg.errors import EndpointClosed, WireError
from disagg.host.signals import deferred_signals
from disagg.log import log
from disagg.protocol import events
from disagg.protocol.codec import decode
from disagg.protocol.decode import DecodeMachine
from disagg.protocol.events import Effect, Peer
from disagg.protocol.messages import Hello, Room
from disagg.protocol.prefill import PrefillMachine
from disagg.protocol.status import Ended
from disagg.runtime.reader import Reader
from disagg.runtime.transport import Lost, Transport
from disagg.tracing import record_span
from kvpool.layout import PoolLayout
from kvpool.layout.summary import summary
from kvpool.layout.text import counted, one_line
from kvpool.layout.types import MAX_REASON

TELEMETRY_SECONDS = 0.5

M = TypeVar("M", bound=PrefillMachine | DecodeMachine)
Holds = Callable[[], bool]


@dataclass(eq=False, kw_only=True)
class EventLoop(Generic[M]):
    """One thread at a time may be in `turn`. Any thread may `handle` events and `execute` what
    follows while it holds `lock`; `execute` not in another thread's turn. `name` is for the log.
    """

    name: str
    machine: M
    layout: PoolLayout
    engine: Engine
    transport: Transport
    reader: Reader
    digester: Digester
    clock: Callable[[], float]
    lock: threading.RLock = field(default_factory=threading.RLock)
    closed: str | None = None
    """Why no call is taken any more."""
    pending: deque[Effect] = field(default_factory=deque)
    telemetry: dict[str, float] = field(default_factory=dict)
    _telemetry_at: float = -math.inf
    _ended_file: int | None = None
    _file_tells: bool = False
    busy: bool = False
    """Whether the next turn has something to do at once."""

    def __post_init__(self) -> None:
        self.waiters = Waiters(self.lock)

    def words(self) -> str:
        """`engine local, 2 open rooms, layers 0-3, ...`."""
        with self.lock:
            rooms = len(self.machine.rooms.open)
        return f"engine {self.engine.name}, {counted(rooms, 'open room')}, {summary(self.layout)}"

    def check_open(self) -> None:
        """Raises EndpointClosed."""
        if self.closed is not None:
            raise EndpointClosed(self.closed)

    def handle(self, event: Any) -> None:
        """Changes the machine, under `lock`. What follows is pending."""
        self.pending.extend(self.machine.handle(event, self.clock()))

    def execute(self) -> None:
        """Does what is pending, under the lock: no call of another thread comes between the effects
        of an event. What follows from them is for the next time.
        """
        if not self.pending:
            return
        try:
            for _ in range(len(self.pending)):
                self._do(self.pending.popleft())
        finally:
            self.transport.flush()

    def turn(self, *, waits: bool = True) -> None:
        """Messages, time, reads and digests; with `waits=False`, only what returns at once."""
        try:
            for peer, data in self.transport.poll():
                if not isinstance(data, Lost):
                    self._receive(peer, data)
                    continue
                with self.lock:
                    if self.closed is None:
                        self.handle(events.Unreachable(peer, data.reason))
            with self.lock:
                self.handle(events.Tick())
                self.execute()
            if waits:
                self.engine.progress()
                self._renew()
                now = self.clock()
                if now - self._telemetry_at > TELEMETRY_SECONDS:
                    # here, because only the thread of the turn may use the engine
                    self._telemetry_at, self.telemetry = now, dict(self.engine.telemetry())
            happened: list[Any] = [*self.reader.step(waits)]
            if waits and (answer := self.digester.step()):
                key, values, problem = answer
                happened.append(events.DigestComputed(key=key, values=values, problem=problem))
            with self.lock:
                for event in happened:
                    self.handle(event)
                self.execute()
            self.busy = self.reader.busy or self.digester.busy or bool(self.pending)
        except BaseException as error:  # what a room waits for must not get lost silently
            self.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            with self.lock:
                self.tell()

    def _renew(self) -> None:
        """Lets peers connect again if the engine says so."""
        reason = self.engine.take_renewal()
        if reason is not None:
            with self.lock:
                self.handle(events.EngineRenewed(reason, self.engine.metadata()))
                self.execute()

    def fail(self, error: BaseException) -> None:
        """A turn has raised: open rooms end with the reason."""
        log.error("%s: a turn failed", self.name, exc_info=error)
        self.busy = False
        with self.lock:
            self.handle(events.AbortAll(f"the endpoint's loop failed: {error}"))

    @property
    def has_ended(self) -> bool:
        return bool(self.machine.ended)

    def take_ended(self) -> list[Ended]:
        """The rooms that have ended since the last call."""
        taken: list[Ended] = []
        if not self.machine.ended:
            return taken
        try:
            with deferred_signals, self.lock:
                taken = self.machine.ended.take_ended()
                self.tell_file()
        except BaseException:  # of a signal's handler: the caller never sees the list
            with deferred_signals, self.lock:
                self.machine.ended.give_back(taken)
                self.tell_file()
            raise
        return taken

    def ended_file(self) -> int:
        """A file that can be read while `take_ended` has something; to be called under the lock."""
        if self._ended_file is None:
            self._ended_file = os.eventfd(0)
            self.tell_file()
        return self._ended_file

    def tell(self) -> None:
        """Something has changed, under the lock: wakes those that wait for it."""
        self.waiters.turned()
        self.tell_file()

    def tell_file(self) -> None:
        """Lets the file be read as long as `take_ended` has something."""
        if self._ended_file is not None and bool(self.machine.ended) != self._file_tells:
            self._file_tells = not self._file_tells
            if self._file_tells:
                os.eventfd_write(self._ended_file, 1)
            else:
                os.eventfd_read(self._ended_file)

    def close_file(self) -> None:
        if self._ended_file is not None:
            os.close(self._ended_file)
            self._ended_file = None

    def _receive(self, peer: Peer, data: bytes) -> None:
        try:
            message = decode(data)
            with self.lock:
                # after the goodbye of a closed endpoint no hello is answered
                if self.closed is None:
                    origin = self.transport.where(peer) if isinstance(message, Hello) else ""
                    self.handle(events.Received(peer, message, origin))
        except Exception as error:  # one peer's fault must not end what serves all
            problem = one_line(str(error), MAX_REASON)
            log.warning(
                "%s: a peer sent what cannot be served: %s",
                self.name,
                problem,
                exc_info=not isinstance(error, WireError),
            )
            with self.lock:
                self.handle(events.Malformed(peer, f"it sent what cannot be served: {problem}"))

    def _do(self, effect: Effect) -> None:
        match effect:
            case events.Send(peer, data):
                problem = self.transport.send(peer, data)
                if problem is not None:
                    self.handle(events.Unreachable(peer, problem))
            case events.RoomEnded(room, span):
                if span is not None:
                    record_span(span)
                self.waiters.ended(room)
            case events.StartRead(read):
                self.reader.add_read(read)
            case events.Connect(peer, address):
                self.transport.connect(peer, address)
            case events.ConnectEngine(rank, hello):
                self.reader.connect(rank, hello)
            case events.CancelReads(attempt):
                self.reader.cancel(attempt)
            case events.DropPeer(rank):
                self.reader.drop_peer(rank)
            case events.ComputeDigest(key, table, pieces, each, arrived):
                of = digests if arrived is None else arrived.with_others
                self.digester.enqueue(key, of(self.layout, table, pieces, each))


@dataclass(eq=False, slots=True)
class _Waiter:
    holds: Holds
    room: Room | None
    gate: threading.Lock = field(default_factory=threading.Lock)
    held_once: bool = False
    """Whether it was woken because `holds()`. That may have changed since."""

    def wakes(self) -> bool:
        """Whether it need not wait any more; what it asked for may be gone, which it will see."""
        try:
            self.held_once = self.holds()
        except Exception:
            return True
        return self.held_once


class Waiters:
    """Threads that wait for something of an endpoint. Each is woken for what it waits for, so that
    a turn costs the same for one and for hundreds. Used under `lock`, which no waiting thread has.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self.for_rooms: dict[_Waiter, None] = {}
        self.others: dict[_Waiter, None] = {}
        self._closed = False

    def wait(self, holds: Holds, timeout: float | None, room: Room | None = None) -> bool:
        """Waits until `holds()`, or `close`; whether it held. Of a room it is asked once that has
        ended, and of anything else once a turn.
        """
        waiter = _Waiter(holds, room)
        waiters, woken = self.others if room is None else self.for_rooms, False
        try:
            with deferred_signals, self._lock:
                if (result := holds()) or self._closed:
                    return result
                waiter.gate.acquire()
                waiters[waiter] = None
            woken = waiter.gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        finally:
            if not woken:  # the time is over, or a signal's handler has raised
                with deferred_signals, self._lock:
                    waiters.pop(waiter, None)
        with self._lock:
            return waiter.held_once or holds()

    def ended(self, room: Room) -> None:
        """Wakes those that wait for a room, which has ended."""
        self._wake(self.for_rooms, [w for w in self.for_rooms if w.room == room])

    def turned(self) -> None:
        """Wakes those that wait for anything else, if it is so."""
        self._wake(self.others, [waiter for waiter in self.others if waiter.wakes()])

    def close(self) -> None:
        """Wakes all; from now on no call waits."""
        self._closed = True
        for waiters in (self.others, self.for_rooms):
            self._wake(waiters, list(waiters))

    def _wake(self, waiters: dict[_Waiter, None], woken: list[_Waiter]) -> None:
        for waiter in woken:
            del waiters[waiter]
            waiter.gate.release()
