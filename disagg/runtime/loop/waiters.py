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
    gate: threading.Lock = field(default_factory=threading.Lock)

    def wakes(self) -> bool:
        """Whether it need not wait any more; what it asked for may be gone, which it will see."""
        try:
            return self.holds()
        except Exception:
            return True


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
            waiter = _Waiter(holds)
            waiter.gate.acquire()
            mine = self._others if room is None else self._of_rooms.setdefault(room, [])
            mine.append(waiter)
        if waiter.gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            return True
        with self._lock:
            if waiter in mine:
                mine.remove(waiter)
            if room is not None and not mine and self._of_rooms.get(room) is mine:
                del self._of_rooms[room]
            return holds()

    def ended(self, room: Room) -> None:
        """Wakes those that wait for a room, which has ended."""
        for waiter in self._of_rooms.pop(room, ()):
            waiter.gate.release()

    def turned(self) -> None:
        """Wakes those that wait for anything else, if it is so."""
        woken = [each for each in self._others if each.wakes()]
        if woken:
            self._others = [each for each in self._others if each not in woken]
        for waiter in woken:
            waiter.gate.release()

    def all(self) -> None:
        """Wakes everybody."""
        rooms, self._of_rooms = self._of_rooms, {}
        others, self._others = self._others, []
        for waiter in (*others, *(each for some in rooms.values() for each in some)):
            waiter.gate.release()
