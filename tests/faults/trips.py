"""Faults at a chosen point: hooks on an endpoint's messages and on its engine's reads.

A point is `read` or `read after` (an engine call), `send X`, `sent X` or `take X` (a message of
type X). All are met on the endpoint's own thread, so that a process which signals itself there
stops in the middle of what it does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from disagg.protocol import messages
from disagg.runtime.io_thread import Driver


@dataclass(slots=True)
class Trip:
    """What happens when `point` is met for the `count`-th time from now on."""

    point: str
    count: int
    then: Callable[[], None]


class Hooks:
    """Goes between an endpoint, its sockets and its engine."""

    def __init__(self, endpoint: Driver, sending: Callable[[Any], None], seed: int) -> None:
        self.trip: Trip | None = None
        self.doubled = 0.0
        """Which part of all messages is sent twice."""
        self._random = random.Random(seed)
        send, take, read = endpoint._send, endpoint._take, endpoint.engine.read

        def hooked_send(socket, frames):
            message = messages.decode(frames[-1])
            kind = type(message).__name__
            sending(message)
            self._met(f"send {kind}")
            problem = send(socket, frames)
            if problem is None and self._random.random() < self.doubled:
                problem = send(socket, frames)
            self._met(f"sent {kind}")
            return problem

        def hooked_take(socket, frames, message):
            self._met(f"take {type(message).__name__}")
            take(socket, frames, message)

        def hooked_read(peer, batch):
            self._met("read")
            transfer = read(peer, batch)
            self._met("read after")
            return transfer

        endpoint._send, endpoint._take, endpoint.engine.read = hooked_send, hooked_take, hooked_read

    def _met(self, point: str) -> None:
        trip = self.trip
        if trip is not None and trip.point == point:
            trip.count -= 1
            if trip.count <= 0:
                self.trip = None
                trip.then()
