"""What turns an event loop, and the threads that wait for what a turn brings.

A driver has a thread, or its callers turn the loop by `step` and `wait`. Calls may come from any
thread; they change the machine under the lock, and send what follows at once if no turn is under
way.

On a busy host the thread gets the GIL 5 ms late each time that it has released it. So a caller that
asks how rooms are takes a turn itself.

What a caller's thread changes, it changes `with deferred_signals`: a signal's handler runs before
or after, and what it raises reaches the caller. Waits are outside, and end at once.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from disagg.errors import UsageError
from disagg.host.signals import deferred_signals
from disagg.protocol import events
from disagg.protocol.messages import Room
from disagg.protocol.peers.liveness import CHECKS_PER_TIMEOUT
from disagg.protocol.prefill import PrefillMachine
from disagg.protocol.rooms.ended import Ended
from disagg.runtime.loop.ended_file import EndedFile
from disagg.runtime.loop.event_loop import EventLoop
from disagg.runtime.loop.io_thread import IOThread, Pace
from disagg.runtime.loop.waiters import Waiters

IDLE_SECONDS = 0.05
READ_PAUSE_SECONDS = 0.001
MOST_PAUSE_SECONDS = 0.01
"""Between two turns in which an engine makes progress, on a host that has no time for more."""
ASKED_SECONDS = 0.0002
"""Between two turns of callers that ask, at least: they may ask for hundreds of rooms at once."""
CLOSED = "the endpoint was closed."


class Driver:
    """Drives one event loop. Two turns are as far apart as `peer_timeout` (seconds) allows, at
    most; without a thread (`threaded=False`) that is the caller's to see to.
    """

    def __init__(self, loop: EventLoop[Any], *, threaded: bool, peer_timeout: float) -> None:
        self._loop = loop
        self._turning = threading.Lock()
        self._waiters = Waiters(loop.lock)
        self._ended_file: EndedFile | None = None
        self._idle = min(IDLE_SECONDS, peer_timeout / CHECKS_PER_TIMEOUT)
        self._pace = Pace(loop.engine.progress_seconds, MOST_PAUSE_SECONDS)
        self._next_asked = 0.0
        self._paused = 0.0
        """How long the thread waits now, at most: a call that leaves less time wakes it."""
        self._thread: IOThread | None = None
        loop.room_ended = self._waiters.ended
        if threaded:
            self._thread = IOThread(self._run_turn, loop.transport, self._pace, loop.name)
            loop.dialled = self._thread.wake_up
            loop.engine.notify(self._thread.waker)

    def start(self) -> None:
        """The thread begins."""
        if self._thread is not None:
            self._thread.start()

    @property
    def has_thread(self) -> bool:
        """Whether rooms move without `step`."""
        return self._thread is not None

    def call(self, *events: Any) -> None:
        """Events of the caller: handled at once, while the endpoint is open. What follows is done
        at once too, or by the turn that is under way, or by the next.
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
                self._thread.wake_up()

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
        now, thread = time.monotonic(), self._thread
        if thread is None or (now < self._next_asked and not seconds):
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
                    thread.wake_up()

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

    def take_ended(self) -> list[Ended]:
        """The rooms that have ended since the last call."""
        loop = self._loop
        taken: list[Ended] = []
        if not loop.machine.ended:
            return taken
        try:
            with deferred_signals, loop.lock:
                taken = loop.machine.ended.take()
                self._tell_file()
        except BaseException:  # of a signal's handler: the caller never sees the list
            with deferred_signals, loop.lock:
                loop.machine.ended.give_back(taken)
                self._tell_file()
            raise
        return taken

    def fileno(self) -> int:
        """A file that can be read while `take_ended` has something. Raises UsageError without a
        thread.
        """
        with deferred_signals, self._loop.lock:
            self._loop.check_open()
            if self._thread is None:
                raise UsageError(
                    "fileno(): with threaded=False nothing happens between two calls of step(). "
                    "Ask ended() after each."
                )
            if self._ended_file is None:
                self._ended_file = EndedFile()
                self._tell_file()
            return self._ended_file.fileno()

    def tell(self) -> None:
        """Something has changed, under the lock: wakes those that wait for it."""
        self._waiters.turned()
        self._tell_file()

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
        if self._thread is not None:
            self._thread.join()
        with self._turning:  # a caller may be in its turn
            release()
        with deferred_signals, loop.lock:
            for event in loop.reader.close():
                loop.handle(event)
            if self._ended_file is not None:
                self._ended_file.close()
            if self._thread is not None:
                self._thread.close()
                # no cycle keeps the machine, and with it the pools of its block tables
                self._thread, loop.dialled = None, lambda: None

    def abandon(self, why: str) -> None:
        """In a forked child, where a thread that is not there may hold the locks."""
        self._loop.lock = threading.RLock()
        self._waiters = Waiters(self._loop.lock)
        self.refuse_calls(why)
        if self._ended_file is not None:
            self._ended_file.close()

    def _pause(self) -> float:
        """Seconds that the next turn may wait: until a message comes, or a call."""
        loop = self._loop
        if loop.closed is not None or loop.busy:
            return 0.0
        if loop.reader.waits:
            return READ_PAUSE_SECONDS
        if isinstance(loop.machine, PrefillMachine):
            if loop.machine.read:
                return self._pace.seconds
            if loop.machine.computing:
                return READ_PAUSE_SECONDS
        return self._idle

    def _run_turn(self, thread: IOThread) -> float | None:
        """One turn of the thread; the seconds until the next, None after the last."""
        with self._loop.lock:
            closing = self._loop.closed is not None
            self._paused = 0.0
        # one that waits for the lock gets it before the GIL, and holds up all callers until then
        if not self._turning.acquire(blocking=False):
            time.sleep(ASKED_SECONDS)
        else:
            try:
                thread.clear()
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

    def _tell_file(self) -> None:
        """Lets the file be read as long as `take_ended` has something."""
        if self._ended_file is not None:
            self._ended_file.set(bool(self._loop.machine.ended))
