"""What turns an event loop, and waits for what a turn brings.

A driver has a thread, or its callers turn the loop by `step` and `wait`. Calls may come from any
thread; they change the machine under the lock and `with deferred_signals`, and send what follows at
once if no turn is under way. Waits are outside of both, and a signal ends them at once.

On a busy host the thread gets the GIL 5 ms late each time that it has released it. So a caller that
asks how rooms are takes a turn itself.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from disagg.errors import UsageError
from disagg.host import system_calls
from disagg.host.signals import deferred_signals
from disagg.log import log
from disagg.protocol import events
from disagg.protocol.messages import Room
from disagg.protocol.peers.liveness import CHECKS_PER_TIMEOUT
from disagg.protocol.prefill import PrefillMachine
from disagg.runtime.event_loop import EventLoop, Holds, Waiters

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
        self._idle = min(IDLE_SECONDS, peer_timeout / CHECKS_PER_TIMEOUT)
        self._pace = loop.engine.progress_seconds
        self._next_asked = 0.0
        self._paused = 0.0
        """How long the thread waits now, at most: a call that leaves less time wakes it."""
        self._thread: threading.Thread | None = None
        self.has_thread = threaded
        """Whether rooms move without `step`."""
        self._wake, self._waker, self._taken = -1, -1, system_calls.Scratch(4096)
        if threaded:
            self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._thread = threading.Thread(target=self._run, name=loop.name, daemon=True)
            loop.engine.notify(self._waker)

    def start(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def call(self, *events: Any) -> None:
        """Handles events of the caller now. What follows is done now, or by the turn under way."""
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
            loop.tell()
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
                    loop.turn()
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
                    loop.turn(waits=seconds > 0)
                    if not loop.busy or time.monotonic() >= now + seconds:
                        break
            finally:
                self._turning.release()
            if loop.busy:
                with loop.lock:
                    self._wake_up()

    def wait(self, holds: Holds, timeout: float | None, room: Room | None = None) -> bool:
        """Waits until `holds()`; whether it does. Without a thread, turns the loop meanwhile. With
        one, `room` is the room that `holds()` is about, if it holds once that has ended.
        """
        if self._thread is not None:
            return self._loop.waiters.wait(holds, timeout, room)
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not holds():
            left = until - time.monotonic()
            if self._loop.closed is not None or left <= 0:
                return False
            self.step(min(self._pause(), left))
        return True

    def refuse_calls(self, why: str = CLOSED) -> None:
        """From now on the endpoint is closed, and nothing waits."""
        with self._loop.lock:
            self._loop.closed = why
            self._loop.waiters.close()

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
                    loop.turn()
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
        self._loop.waiters = Waiters(self._loop.lock)
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
        """Ends the wait of the thread's current turn, or of the next."""
        # under the lock, or while the thread runs: after `close` it may be another file's number
        if self._wake >= 0:
            system_calls.write_byte(self._waker)  # a full pipe wakes as well

    def _run(self) -> None:
        pause = 0.0
        while True:
            if pause:
                self._wait_for_news(pause)
            with self._loop.lock:
                closing = self._loop.closed is not None
                self._paused = 0.0
            # a thread that waits for it gets it before the GIL, and holds up callers until then
            if not self._turning.acquire(blocking=False):
                time.sleep(ASKED_SECONDS)
            else:
                try:
                    self._taken.read(self._wake)  # the turn looks at what woke it after this
                    self._loop.turn()
                finally:
                    self._turning.release()
                if closing:
                    return
            with self._loop.lock:
                pause = self._paused = self._pause()

    def _wait_for_news(self, seconds: float) -> None:
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
