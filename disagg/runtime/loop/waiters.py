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
        self._of_rooms: dict[Room, dict[_Waiter, None]] = {}
        self._others: dict[_Waiter, None] = {}
        self._closed = False

    def wait(
        self, holds: Callable[[], bool], timeout: float | None, room: Room | None = None
    ) -> bool:
        """Waits until `holds()`, or `close`; whether it held. Of a room it is asked once that has
        ended, and of anything else once a turn.
        """
        waiter, woken = _Waiter(holds), False
        try:
            with deferred_signals, self._lock:
                if (result := holds()) or self._closed:
                    woken = True
                    return result
                waiter.gate.acquire()
                if room is None:
                    self._others[waiter] = None
                else:
                    self._of_rooms.setdefault(room, {})[waiter] = None
            woken = waiter.gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        finally:
            if not woken:  # the time is over, or a signal's handler has raised
                self._discard(waiter, room)
        with self._lock:
            return waiter.held_once or holds()

    def _discard(self, waiter: _Waiter, room: Room | None) -> None:
        with deferred_signals, self._lock:
            self._others.pop(waiter, None)
            of_room = self._of_rooms.get(room, {}) if room is not None else {}
            of_room.pop(waiter, None)
            if room is not None and not of_room:
                self._of_rooms.pop(room, None)

    def ended(self, room: Room) -> None:
        """Wakes those that wait for a room, which has ended."""
        for waiter in self._of_rooms.pop(room, ()):
            waiter.gate.release()

    def turned(self) -> None:
        """Wakes those that wait for anything else, if it is so."""
        for waiter in [waiter for waiter in self._others if waiter.wakes()]:
            del self._others[waiter]
            waiter.gate.release()

    def close(self) -> None:
        """Wakes all; from now on no call waits."""
        self._closed = True
        for waiters in (self._others, *self._of_rooms.values()):
            for waiter in waiters:
                waiter.gate.release()
        self._of_rooms, self._others = {}, {}
