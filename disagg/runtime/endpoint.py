"""One rank's side of the hand-off: a machine, a transport, an engine and a clock, in one loop.

Events go in, effects come out and are done in order. The endpoint's own thread runs the loop, or,
with `threaded=False`, the caller does: `step()` is one turn and never waits. Calls may come from
any thread; they change the machine under the lock, and send what follows at once if no turn is
under way.

The thread of a busy host gets the GIL 5 ms late, each time that it has let it go. So a caller that
asks how rooms are (`poll`, `ended`, `reading`) takes a turn itself, without what may wait.

What a caller's thread changes, it changes `with deferred_signals`: a signal's handler runs before
or after, and what it raises reaches the caller. Waits are outside, and end at once.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar, cast

from typing_extensions import Self

from disagg.digest.digester import Digester
from disagg.engines.base import Engine
from disagg.errors import EndpointClosed, UsageError, WireError
from disagg.host.exits import close_aside, close_at_exit, do_not_close_at_exit
from disagg.host.forks import FORKED, Abandons, ForkedMachine, abandon_in_child, keep_for_ever
from disagg.host.prefault import Prefault
from disagg.host.signals import deferred_signals
from disagg.protocol import effects, events
from disagg.protocol.decode import DecodeMachine
from disagg.protocol.effects import Effect, Peer
from disagg.protocol.liveness import CHECKS_PER_TIMEOUT, Leases
from disagg.protocol.messages import (
    PROTOCOL,
    Hello,
    Room,
    checked_conventions,
    decode,
    room_name,
)
from disagg.protocol.metrics import Snapshot
from disagg.protocol.prefill import PrefillMachine
from disagg.protocol.rooms.ended import Ended
from disagg.protocol.status import Failure, KVPoll
from disagg.runtime.loop.ended_file import EndedFile
from disagg.runtime.loop.io_thread import IOThread
from disagg.runtime.loop.pace import Pace
from disagg.runtime.loop.waiters import Waiters
from disagg.runtime.options import Options, check_options, open_transport
from disagg.runtime.reader import Reader
from disagg.runtime.staging import StagingBuffers
from disagg.runtime.transport import Corks, Locates, Lost, WaitsAside
from kvpool.layout import PoolLayout
from kvpool.layout.sentences import one_line
from kvpool.layout.types import MAX_REASON

log = logging.getLogger("disagg")

IDLE_SECONDS = 0.05
READ_PAUSE_SECONDS = 0.001
MOST_PAUSE_SECONDS = 0.01
"""Between two turns in which an engine makes progress, on a host that has no time for more."""
TELEMETRY_SECONDS = 0.5
ASKED_SECONDS = 0.0002
"""Between two turns of callers that ask, at least: they may ask for hundreds of rooms at once."""

M = TypeVar("M", bound=PrefillMachine | DecodeMachine)


class Endpoint(Generic[M]):
    """What both sides share: the loop, and what callers ask of rooms.

    It registers the layout's memory with the engine, and closes the engine with itself. The pool,
    whose memory peers read and reads write, must outlive it. `machine` is to be read between turns.

    What is open when the process ends is closed then, in EXIT_SECONDS at most; an endpoint that is
    dropped without `close` is closed soon after, with a ResourceWarning.
    """

    _released = True  # until it is made

    def __init__(
        self,
        machine: Callable[[Hello, float], M],
        layout: PoolLayout,
        engine: Engine,
        options: Options,
        *,
        serves: bool,
        stage: StagingBuffers | None = None,
        read_timeout: float = math.inf,
    ) -> None:
        peer_timeout = check_options(type(self).__name__, options)
        conventions = checked_conventions(options.get("conventions", {}))
        clock = options.get("clock", time.monotonic)
        side: Literal["prefill", "decode"] = "prefill" if serves else "decode"
        self._transport, self._close_transport = open_transport(options, side)
        stage = stage or StagingBuffers()
        self.layout = replace(layout, generation=layout.generation or uuid.uuid4().hex)
        self.engine = engine
        try:
            engine.register([*self.layout.slabs(), *stage.slabs])
            about = PROTOCOL, self.layout.generation, engine.name, self.layout.to_msgpack()
            metadata = engine.metadata() if serves else b""
            hello = Hello(*about, metadata, peer_timeout, conventions)
        except Exception:
            self._close_transport()
            raise
        self.machine: M = machine(hello, clock())
        self._clock = clock
        self._reader = Reader(engine, read_timeout, clock, stage)
        self._prefault = Prefault()
        if not serves and options.get("prefault", True):
            for slab in (*self.layout.slabs(), *stage.slabs):
                if slab.on_host:
                    self._prefault.own(slab.base, slab.nbytes)
        self._digester = Digester()
        self._pending: deque[Effect] = deque()
        self._busy = False
        self._lock = threading.RLock()
        self._waiters = Waiters(self._lock)
        self._ended_file: EndedFile | None = None
        self._corks = self._transport if isinstance(self._transport, Corks) else None
        self._transport_is_lent = options.get("transport") is not None
        self._waits_aside = isinstance(self._transport, WaitsAside)
        self._locates = self._transport if isinstance(self._transport, Locates) else None
        self._idle = min(IDLE_SECONDS, peer_timeout / CHECKS_PER_TIMEOUT)
        self._pace = Pace(engine.progress_seconds, MOST_PAUSE_SECONDS)
        self._turning = threading.Lock()
        self._next_asked, self._paused = 0.0, 0.0
        self._closing, self._why_closed = False, "the endpoint was closed."
        self._releasing, self._releases = threading.RLock(), False
        self._asked, self._telemetry = clock(), dict(engine.telemetry())
        self._thread: IOThread | None = None
        if options.get("threaded", True):
            self._thread = IOThread(
                self._run_turn, self._transport, self._pace, type(self).__name__
            )
            engine.notify(self._thread.waker)
        abandon_in_child(self)
        self._released = False
        close_at_exit(self)

    def poll(self, room: Room) -> KVPoll:
        """State of a room. Raises UnknownRoom, as all calls about a room do."""
        self._turn_for_caller()
        with self._lock:
            return self.machine.poll(room_name(room))

    def wait(self, room: Room, timeout: float | None = None) -> KVPoll:
        """Blocks until the room has ended; returns its state.

        Raises TimeoutError, which says what the room waits for, if that takes longer than `timeout`
        seconds, and EndpointClosed if the endpoint is closed before.
        """
        name = room_name(room)
        return self._wait_in_room(name, lambda: self.machine.poll(name).ended, timeout, name)

    def ended(self) -> list[Ended]:
        """The rooms that have ended since the last call, and whose pages may be reused (on decode
        `reading(room)` is false): each once, in that order, unless it was forgotten meanwhile.
        """
        self._turn_for_caller()
        return self._take_ended()

    def wait_any(self, timeout: float | None = None) -> list[Ended]:
        """Blocks until `ended()` has something, at most `timeout` seconds; returns that.

        Raises EndpointClosed if the endpoint is closed before.
        """
        if not self._wait(lambda: bool(self.machine.ended), timeout):
            self._check_open()
        return self._take_ended()

    def fileno(self) -> int:
        """A file that can be read while `ended()` has something: for `select`, or asyncio's
        `loop.add_reader(endpoint, ...)`. It is the endpoint's: do not read or close it.

        Raises UsageError for an endpoint without a thread of its own, which goes on in `step()`.
        """
        with deferred_signals, self._lock:
            self._check_open()
            if self._thread is None:
                raise UsageError(
                    "fileno(): with threaded=False nothing happens between two calls of step(). "
                    "Ask ended() after each."
                )
            if self._ended_file is None:
                self._ended_file = EndedFile()
                self._tell_file()
            return self._ended_file.fileno()

    def failure(self, room: Room) -> Failure | None:
        """Why the room failed, and on which side; None if it did not."""
        with self._lock:
            return self.machine.failure(room_name(room))

    def abort(self, room: Room, reason: str) -> None:
        """Ends a room that has not ended; the other side is told the reason."""
        self._call(events.AbortRoom(room_name(room), reason))

    def forget(self, room: Room) -> None:
        """Drops what is kept of an ended room. Raises RoomError if it has not ended."""
        with deferred_signals, self._lock:
            self._handle(events.ForgetRoom(room_name(room)))
            self._tell_file()

    def leases(self) -> Leases:
        """Items that must not be reused now; of decode's also those in quarantine."""
        with self._lock:
            return self.machine.leases()

    def snapshot(self) -> Snapshot:
        """Numbers now, and since the endpoint was made, for `disagg.exporter`."""
        with self._lock:
            return self.machine.snapshot(self.engine.name, self._telemetry)

    def step(self) -> bool:
        """One turn of the loop, without waiting: messages, reads, digests, time. Returns whether
        the next turn has something to do at once. Only with `threaded=False`.
        """
        self._check_open()
        if self._thread is not None:
            raise UsageError("this endpoint has its own thread. Make it with threaded=False.")
        self._step(0.0)
        return self._busy

    def close(self) -> None:
        """Aborts open rooms, tells peers, ends the loop and closes the engine. If a signal's
        handler ends it before that, it goes on where it was when it is called again.
        """
        with self._releasing:
            if self._released or self._releases:
                return
            try:
                self._releases = True
                self._close()
            finally:
                self._releases = False

    def _close(self) -> None:
        with deferred_signals:
            with self._lock:
                first = not self._closing
                if first:
                    self._handle(events.AbortAll("the endpoint was closed.", closing=True))
                    self._closing = True
                    self._waiters.close()
            if first and self._thread is None:
                with self._turning:
                    self._turn()
        self._release()
        with deferred_signals, self._lock:
            for event in self._reader.close():
                self._handle(event)
            if self._ended_file is not None:
                self._ended_file.close()
            self._released = True
        do_not_close_at_exit(self)

    def drop(self) -> None:
        """Closes what its owner has left open. Over a transport of the caller's, which only one
        thread at a time may use, no peer is told.
        """
        if self._transport_is_lent:
            with self._lock:
                self._closing = True
                self._waiters.close()
        self.close()

    def abandon(self) -> None:
        """In a forked child: closes this copy of the parent's endpoint, and touches nothing else of
        the parent's. Every call then raises EndpointClosed.
        """
        self._lock = threading.RLock()  # a thread that is not there may hold the old one
        self._waiters = Waiters(self._lock)
        self._waiters.close()
        self._releasing, self._released = threading.RLock(), True
        self._closing, self._why_closed = True, FORKED
        keep_for_ever(self)
        if self._ended_file is not None:
            self._ended_file.close()
        self.machine = cast(M, ForkedMachine())
        self.engine.abandon()
        if isinstance(self._transport, Abandons):
            self._transport.abandon()

    def __del__(self) -> None:
        if self._released or sys.is_finalizing():
            return
        warnings.warn(
            f"a {type(self).__name__} was dropped without close(). Close it before its pool goes, "
            "whose memory it reads or offers: use it in a with block.",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )
        close_aside(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _release(self) -> None:
        """Gives up thread, transport and engine."""
        self._prefault.close()
        if self._thread is not None:
            self._thread.end()
        with self._turning:  # a caller may be in its turn
            self._close_transport()
            self.engine.close()

    def _call(self, *events: Any) -> None:
        """Events of the caller: handled at once, while the endpoint is open. What follows is done
        at once too, or by the turn that is under way, or by the next.
        """
        with deferred_signals, self._lock:
            self._check_open()
            for event in events:
                self._handle(event)
            if self._turning.acquire(blocking=False):
                try:
                    self._execute()
                except Exception as error:
                    self._failed(error)
                finally:
                    self._turning.release()
            self._waiters.turned()
            self._tell_file()
            if self._thread is not None and (self._pending or self._pause() < self._paused):
                self._thread.wake_up()

    def _handle(self, event: Any) -> None:
        self._pending.extend(self.machine.handle(event, self._clock()))

    def _check_open(self) -> None:
        if self._closing:
            raise EndpointClosed(self._why_closed)

    def _wait(
        self, ended: Callable[[], bool], timeout: float | None, room: Room | None = None
    ) -> bool:
        """Waits until `ended()`; whether it is. Without a thread, turns the loop meanwhile. With
        one, `room` is the room that `ended()` is about, if it holds once that has ended.
        """
        if self._thread is not None:
            return self._waiters.wait(ended, timeout, room)
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not ended():
            left = until - time.monotonic()
            if self._closing or left <= 0:
                return False
            self._step(min(self._pause(), left))
        return True

    def _wait_in_room(
        self, name: Room, ended: Callable[[], bool], timeout: float | None, room: Room | None = None
    ) -> KVPoll:
        """Waits until `ended()`; the room's state then. Raises as `wait` does."""
        if not self._wait(ended, timeout, room):
            self._check_open()
            with self._lock:
                if not ended():
                    raise TimeoutError(
                        f"room {name!r} is {self.machine.poll(name)} after {timeout:g} s: it waits "
                        f"for {self.machine.waits_for(name)}."
                    )
        return self.machine.poll(name)

    def _pause(self) -> float:
        """Seconds that the next turn may wait: until a message comes, or a call."""
        if self._closing or self._busy:
            return 0.0
        if self._reader.waits:
            return READ_PAUSE_SECONDS
        if isinstance(self.machine, PrefillMachine):
            if self.machine.read:
                return self._pace.seconds
            if self.machine.computing:
                return READ_PAUSE_SECONDS
        return self._idle

    def _run_turn(self, thread: IOThread) -> float | None:
        """One turn of the endpoint's thread; the seconds until the next, None after the last."""
        with self._lock:
            closing, pause = self._closing, 0.0 if self._waits_aside else self._pause()
            self._paused = pause
        # one that waits for the lock gets it before the GIL, and holds up all callers until then
        if not self._turning.acquire(blocking=False):
            time.sleep(ASKED_SECONDS)
        else:
            try:
                if pause:
                    thread.pause(pause)
                self._turn(thread.wake)
            finally:
                self._turning.release()
            if closing:
                return None
        with self._lock:
            self._paused = self._pause() if self._waits_aside else 0.0
            return self._paused

    def _turn_for_caller(self) -> None:
        """A turn in the thread of a caller who asks, unless there was one just now."""
        now = time.monotonic()
        if self._thread is None or now < self._next_asked:
            return
        with deferred_signals:
            if not self._turning.acquire(blocking=False):
                return
            try:
                self._next_asked = now + ASKED_SECONDS
                if self._closing:
                    return
                self._turn(waits=False)
            finally:
                self._turning.release()
            if self._busy:
                self._thread.wake_up()

    def _step(self, pause: float) -> None:
        """A turn in the thread of the caller, where the endpoint has none."""
        if pause and self._waits_aside:
            try:
                self._transport.wait(pause)
            except (OSError, ValueError):
                if not self._closing:  # by a signal's handler
                    raise
            pause = 0.0
        with deferred_signals:
            with self._lock:  # under which calls send what follows from them
                if not self._turning.acquire(blocking=False):
                    raise UsageError(
                        "step() and wait() turn the loop: call them from one thread at a time."
                    )
            try:
                if pause:
                    self._transport.wait(pause)
                if not self._closing:
                    self._turn()
            finally:
                self._turning.release()

    def _turn(self, wake: int | None = None, *, waits: bool = True) -> None:
        """Messages, time, reads and digests; with `waits=False`, only what returns at once."""
        try:
            for peer, data in self._transport.poll(0.0, wake):
                if isinstance(data, Lost):
                    self._lost(peer, data.reason)
                else:
                    self._receive(peer, data)
            if wake is not None and self._thread is not None:
                self._thread.clear()
            with self._lock:
                self._handle(events.Tick())
                self._execute()
            self._work(waits)
            self._busy = self._reader.busy or self._digester.busy or bool(self._pending)
        except BaseException as error:  # what a room waits for must not get lost silently
            self._failed(error)
            if not isinstance(error, Exception):
                raise
        finally:
            with self._lock:
                self._waiters.turned()
                self._tell_file()

    def _failed(self, error: BaseException) -> None:
        log.error("%s: a turn failed", type(self).__name__, exc_info=error)
        self._busy = False
        with self._lock:
            self._handle(events.AbortAll(f"the endpoint's loop failed: {error}"))

    def _receive(self, peer: Peer, data: bytes) -> None:
        try:
            message = decode(data)
            with self._lock:
                if not self._closing:  # who has said goodbye answers no hello
                    greets = isinstance(message, Hello)
                    origin = self._locates.where(peer) if greets and self._locates else ""
                    self._handle(events.Received(peer, message, origin))
        except Exception as error:  # one peer's fault must not end what serves all
            problem = f"it sent what cannot be served: {one_line(str(error), MAX_REASON)}"
            unexpected = not isinstance(error, WireError)
            log.warning("%s: a peer: %s", type(self).__name__, problem, exc_info=unexpected)
            with self._lock:
                self._handle(events.Malformed(peer, problem))

    def _lost(self, peer: Peer, reason: str) -> None:
        with self._lock:
            if not self._closing:
                self._handle(events.Unreachable(peer, reason))

    def _work(self, waits: bool) -> None:
        """One step of the engine, of every read and of the digests."""
        if waits:
            self.engine.progress()
            now = self._clock()
            if now - self._asked > TELEMETRY_SECONDS:  # by the one thread that uses the engine
                self._asked, self._telemetry = now, dict(self.engine.telemetry())
        ended: list[Any] = [*self._reader.step(waits)]
        if waits and (digests := self._digester.step()):
            ended.append(events.DigestComputed(*digests))
        with self._lock:
            for event in ended:
                self._handle(event)
            self._execute()

    def _execute(self) -> None:
        """Does what is pending, under the lock: no call of another thread comes between the effects
        of an event. What follows from them is for the next time.
        """
        if not self._pending:
            return
        if self._corks is not None:
            self._corks.cork()
        try:
            for _ in range(len(self._pending)):
                self._do(self._pending.popleft())
        finally:
            if self._corks is not None:
                self._corks.uncork()

    def _do(self, effect: Effect) -> None:
        match effect:
            case effects.Send(peer, data):
                problem = self._transport.send(peer, data)
                if problem is not None:
                    self._handle(events.Unreachable(peer, problem))
            case effects.RoomEnded(room):
                self._waiters.ended(room)
            case effects.StartRead(read):
                self._reader.add(read)
            case effects.Dial(peer, address):
                self._connect(peer, address)
            case effects.HangUp(peer):
                self._connect(peer, None)
            case effects.ConnectEngine(link, source, hello):
                self._reader.connect(link, source, hello)
            case effects.CancelReads(attempt):
                self._reader.cancel(attempt)
            case effects.DropPeer(link, source):
                self._reader.drop_peer(link, source)
            case effects.ComputeDigest(key, address, pieces, each):
                self._digester.add(key, self.layout, address, pieces, each)

    def _connect(self, peer: int, address: str | None) -> None:
        self._transport.connect(peer, address)
        if self._thread is not None:
            self._thread.wake_up()  # in whose next turn the transport does it

    def _take_ended(self) -> list[Ended]:
        taken: list[Ended] = []
        if not self.machine.ended:
            return taken
        try:
            with deferred_signals, self._lock:
                taken = self.machine.ended.take()
                self._tell_file()
        except BaseException:  # of a signal's handler: the caller never sees the list
            with deferred_signals, self._lock:
                self.machine.ended.give_back(taken)
                self._tell_file()
            raise
        return taken

    def _tell_file(self) -> None:
        """Lets the file be read as long as `ended()` has something."""
        if self._ended_file is not None:
            self._ended_file.set(bool(self.machine.ended))
