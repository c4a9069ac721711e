"""Threads that wait for something of an endpoint. Each is woken for what it waits for, so that a
turn costs the same whether one waits or hundreds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from disagg.host.signals import deferred_signals
from disagg.protocol.messages import Room


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
    """All are used under `lock`, which a thread that waits does not hold."""

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
