"""What turns an event loop, and the threads that wait for what a turn brings.

A driver has a thread, or its callers turn the loop by `step` and `wait`. Calls may come from any
thread; they change the machine under the lock and `with deferred_signals`, and send what follows at
once if no turn is under way. Waits are outside of both, and a signal ends them at once.

On a busy host the thread gets the GIL 5 ms late each time that it has released it. So a caller that
asks how rooms are takes a turn itself.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from disagg.errors import UsageError
from disagg.host import brief
from disagg.host.signals import deferred_signals
from disagg.protocol import events
from disagg.protocol.messages import Room
from disagg.protocol.peers.liveness import CHECKS_PER_TIMEOUT
from disagg.protocol.prefill import PrefillMachine
from disagg.runtime.event_loop import EventLoop

log = logging.getLogger("disagg")

IDLE_SECONDS = 0.05
READ_PAUSE_SECONDS = 0.001
MOST_PAUSE_SECONDS = 0.01
"""Between two turns in which an engine makes progress, on a host that has no time for more."""
ASKED_SECONDS = 0.0002
"""Between two turns of callers that ask, at least: they may ask for hundreds of rooms at once."""
FAILED_SECONDS = 0.05
"""Before the next turn, after a wait that has failed."""
CLOSED = "the endpoint was closed."


class Driver:
    """Drives one event loop. Two turns are as far apart as `peer_timeout` (seconds) allows, at
    most; without a thread (`threaded=False`) that is the caller's to see to.
    """

    def __init__(self, loop: EventLoop[Any], *, threaded: bool, peer_timeout: float) -> None:
        self._loop = loop
        self._turning = threading.Lock()
        self._waiters = Waiters(loop.lock)
        self._idle = min(IDLE_SECONDS, peer_timeout / CHECKS_PER_TIMEOUT)
        self._pace = loop.engine.progress_seconds
        self._next_asked = 0.0
        self._paused = 0.0
        """How long the thread waits now, at most: a call that leaves less time wakes it."""
        self._thread: threading.Thread | None = None
        self.has_thread = threaded
        """Whether rooms move without `step`."""
        self._wake, self._waker, self._taken = -1, -1, brief.Scratch(4096)
        loop.room_ended = self._waiters.ended
        if threaded:
            self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._thread = threading.Thread(target=self._run, name=loop.name, daemon=True)
            loop.engine.notify(self._waker)

    def start(self) -> None:
        """The thread begins."""
        if self._thread is not None:
            self._thread.start()

    def call(self, *events: Any) -> None:
        """Events of the caller: handled at once, while the endpoint is open. What follows is done
        at once, or by the turn that is under way, or by the next.
        """
        loop = self._loop
        with deferred_signals, loop.lock:
            loop.check_open()
            for event in events:
                loop.handle(event)
            if self._turning.acquire(blocking=False):
                try:
                    loop.execute()
                except Exception as error:
                    loop.fail(error)
                finally:
                    self._turning.release()
            self.tell()
            if self._thread is not None and (loop.pending or self._pause() < self._paused):
                self._wake_up()

    def step(self, pause: float = 0.0) -> bool:
        """A turn in the thread of a caller, where there is no other, after at most `pause` seconds
        without a message; whether the next has something to do at once.
        """
        loop = self._loop
        if pause:
            try:
                loop.transport.wait(pause)
            except (OSError, ValueError):
                if loop.closed is None:  # else a signal's handler has closed it
                    raise
        with deferred_signals:
            with loop.lock:  # under which calls send what follows from them
                if not self._turning.acquire(blocking=False):
                    raise UsageError(
                        "step() and wait() turn the loop: call them from one thread at a time."
                    )
            try:
                if loop.closed is None:
                    self._turn()
            finally:
                self._turning.release()
        return loop.busy

    def turn_for_caller(self, seconds: float = 0.0) -> None:
        """A turn in the thread of a caller that asks, beside the driver's thread, unless one is
        under way or was just now: only what returns at once. With `seconds`, also what may take
        time, turn after turn for so long while there is more to do at once.
        """
        now = time.monotonic()
        if self._thread is None or (now < self._next_asked and not seconds):
            return
        loop = self._loop
        with deferred_signals:
            if not self._turning.acquire(blocking=False):
                return
            try:
                self._next_asked = now + ASKED_SECONDS
                while loop.closed is None:
                    self._turn(waits=seconds > 0)
                    if not loop.busy or time.monotonic() >= now + seconds:
                        break
            finally:
                self._turning.release()
            if loop.busy:
                with loop.lock:
                    self._wake_up()

    def wait(
        self, holds: Callable[[], bool], timeout: float | None, room: Room | None = None
    ) -> bool:
        """Waits until `holds()`; whether it does. Without a thread, turns the loop meanwhile. With
        one, `room` is the room that `holds()` is about, if it holds once that has ended.
        """
        if self._thread is not None:
            return self._waiters.wait(holds, timeout, room)
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not holds():
            left = until - time.monotonic()
            if self._loop.closed is not None or left <= 0:
                return False
            self.step(min(self._pause(), left))
        return True

    def tell(self) -> None:
        """Something has changed, under the lock: wakes those that wait for it."""
        self._waiters.turned()
        self._loop.tell_file()

    def refuse_calls(self, why: str = CLOSED) -> None:
        """From now on the endpoint is closed, and nothing waits."""
        with self._loop.lock:
            self._loop.closed = why
            self._waiters.close()

    def close(self, release: Callable[[], None]) -> None:
        """Aborts open rooms, tells peers and ends the thread; then `release` closes what the loop
        uses. May be called again if that has raised.
        """
        loop = self._loop
        with deferred_signals:
            with loop.lock:
                first = loop.closed is None
                if first:
                    loop.handle(events.AbortAll(CLOSED, closing=True))
                    self.refuse_calls()
            if first and self._thread is None:
                with self._turning:
                    self._turn()
        self._wake_up()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        with self._turning:  # a caller may be in its turn
            release()
        with deferred_signals, loop.lock:
            for event in loop.reader.close():
                loop.handle(event)
            loop.close_file()
            if self._thread is not None:
                os.close(self._wake)
                os.close(self._waker)
                # no cycle keeps the machine, and with it the pools of its block tables
                self._thread, self._wake = None, -1

    def abandon(self, why: str) -> None:
        """In a forked child, where a thread that is not there may hold the locks."""
        self._loop.lock = threading.RLock()
        self._waiters = Waiters(self._loop.lock)
        self.refuse_calls(why)
        self._loop.close_file()

    def _pause(self) -> float:
        """Seconds that the next turn may wait: until a message comes, or a call."""
        loop = self._loop
        if loop.closed is not None or loop.busy:
            return 0.0
        if loop.reader.waits:
            return READ_PAUSE_SECONDS
        if isinstance(loop.machine, PrefillMachine):
            if loop.machine.rooms.read:
                return self._pace
            if loop.machine.rooms.unpublished:  # a device computes what was sent
                return READ_PAUSE_SECONDS
        return self._idle

    def _wake_up(self) -> None:
        """Ends the wait of the thread's current turn, or of the next. Under the lock, or while the
        thread runs: after `close` another file could have the descriptor.
        """
        if self._wake >= 0:
            brief.write_byte(self._waker)  # a full pipe wakes as well

    def _run(self) -> None:
        """The thread."""
        pause: float | None = 0.0
        while pause is not None:
            if pause:
                self._wait_for_news(pause)
            pause = self._run_turn()

    def _wait_for_news(self, seconds: float) -> None:
        """Waits for a message or a call."""
        began, loop = time.monotonic(), self._loop
        try:
            loop.transport.wait(seconds, self._wake)
        except Exception:  # the next turn fails too, or goes on
            log.exception("%s: a wait for messages failed", loop.name)
            time.sleep(FAILED_SECONDS)
        least = loop.engine.progress_seconds
        # a late host: dozens of endpoints on a few cores would keep one another from their turns
        if time.monotonic() - began > 2 * seconds:
            self._pace = min(max(least, MOST_PAUSE_SECONDS), 2 * self._pace)
        else:
            self._pace = max(least, self._pace / 2)

    def _run_turn(self) -> float | None:
        """One turn of the thread; the seconds until the next, None after the last."""
        with self._loop.lock:
            closing = self._loop.closed is not None
            self._paused = 0.0
        # one that waits for the lock gets it before the GIL, and holds up all callers until then
        if not self._turning.acquire(blocking=False):
            time.sleep(ASKED_SECONDS)
        else:
            try:
                self._taken.read(self._wake)  # the turn looks at what woke it after this
                self._turn()
            finally:
                self._turning.release()
            if closing:
                return None
        with self._loop.lock:
            self._paused = self._pause()
            return self._paused

    def _turn(self, *, waits: bool = True) -> None:
        try:
            self._loop.turn(waits=waits)
        finally:
            with self._loop.lock:
                self.tell()


@dataclass(eq=False, slots=True)
class _Waiter:
    holds: Callable[[], bool]
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
    a turn costs the same whether one waits or hundreds. All is used under `lock`, which a thread
    that waits does not hold.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._for_rooms: dict[_Waiter, None] = {}
        self._others: dict[_Waiter, None] = {}
        self._closed = False

    def __len__(self) -> int:
        """How many threads wait."""
        return len(self._for_rooms) + len(self._others)

    def wait(
        self, holds: Callable[[], bool], timeout: float | None, room: Room | None = None
    ) -> bool:
        """Waits until `holds()`, or `close`; whether it held. Of a room it is asked once that has
        ended, and of anything else once a turn.
        """
        waiter = _Waiter(holds, room)
        waiters = self._others if room is None else self._for_rooms
        try:
            with deferred_signals, self._lock:
                if (result := holds()) or self._closed:
                    return result
                waiter.gate.acquire()
                waiters[waiter] = None
            waiter.gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        finally:
            with deferred_signals, self._lock:
                waiters.pop(waiter, None)  # the time is over, or a signal's handler has raised
        with self._lock:
            return waiter.held_once or holds()

    def ended(self, room: Room) -> None:
        """Wakes those that wait for a room, which has ended."""
        self._wake(self._for_rooms, [w for w in self._for_rooms if w.room == room])

    def turned(self) -> None:
        """Wakes those that wait for anything else, if it is so."""
        self._wake(self._others, [waiter for waiter in self._others if waiter.wakes()])

    def close(self) -> None:
        """Wakes all; from now on no call waits."""
        self._closed = True
        for waiters in (self._others, self._for_rooms):
            self._wake(waiters, list(waiters))

    def _wake(self, waiters: dict[_Waiter, None], woken: list[_Waiter]) -> None:
        for waiter in woken:
            del waiters[waiter]
            waiter.gate.release()
