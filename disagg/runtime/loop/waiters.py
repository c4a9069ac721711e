"""Threads that wait for something of an endpoint. Each is woken for what it waits for, so that a
turn costs the same whether one waits or hundreds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from disagg.protocol.messages import Room


@dataclass(eq=False, slots=True)
class _Waiter:
    holds: Callable[[], bool]
    room: Room | None
    gate: threading.Lock = field(default_factory=threading.Lock)


class Waiters:
    """All are used under `lock`, which a thread that waits does not hold."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._of_rooms: dict[Room, list[_Waiter]] = {}
        self._others: list[_Waiter] = []

    def wait(
        self, holds: Callable[[], bool], timeout: float | None, room: Room | None = None
    ) -> bool:
        """Waits until `holds()`; whether it does. Of a room it is asked once that has ended, and of
        anything else once a turn.
        """
        with self._lock:
            if holds():
                return True
            waiter = _Waiter(holds, room)
            waiter.gate.acquire()
            mine = self._others if room is None else self._of_rooms.setdefault(room, [])
            mine.append(waiter)
        try:
            waiter.gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        finally:
            with self._lock:
                self._drop(waiter)
        with self._lock:
            return holds()

    def ended(self, room: Room) -> None:
        """Wakes those that wait for a room, which has ended."""
        for waiter in self._of_rooms.get(room, ()):
            _open(waiter)

    def turned(self) -> None:
        """Wakes those that wait for anything else, if it is so."""
        for waiter in self._others:
            if waiter.holds():
                _open(waiter)

    def all(self) -> None:
        """Wakes everybody."""
        for waiter in (*self._others, *(each for some in self._of_rooms.values() for each in some)):
            _open(waiter)

    def _drop(self, waiter: _Waiter) -> None:
        if waiter.room is None:
            self._others.remove(waiter)
            return
        left = self._of_rooms[waiter.room]
        left.remove(waiter)
        if not left:
            del self._of_rooms[waiter.room]


def _open(waiter: _Waiter) -> None:
    if waiter.gate.locked():
        waiter.gate.release()
