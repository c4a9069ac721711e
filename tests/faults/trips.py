"""Faults at a chosen point: hooks on an endpoint's messages and on its engine's reads.

A point is `read` or `read after` (an engine call), `send X`, `sent X` or `take X` (a message of
type X). Hooks run on the endpoint's own thread, so a process that signals itself there stops right
at that point.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from disagg import Engine, Lost, SocketTransport
from disagg.protocol import codec
from disagg.runtime.sockets.tls import TLSCredentials


@dataclass(slots=True)
class Trip:
    """What happens when `point` is reached for the `count`-th time from now on."""

    point: str
    count: int
    then: Callable[[], None]


class TrippedTransport(SocketTransport):
    """Stream sockets with hooks on every message, and on the reads of an engine."""

    def __init__(
        self,
        engine: Engine,
        sending: Callable[[Any], None],
        seed: int,
        credentials: TLSCredentials | None,
    ) -> None:
        super().__init__(credentials is None, credentials)
        self.trip: Trip | None = None
        self.doubled = 0.0
        """Share of messages that are sent twice."""
        self._sending, self._random = sending, random.Random(seed)
        read = engine.read

        def tripped_read(peer, batch):
            self._reached("read")
            transfer = read(peer, batch)
            self._reached("read after")
            return transfer

        engine.read = tripped_read

    def send(self, peer, data):
        message = codec.decode(data)
        kind = type(message).__name__
        self._sending(message)
        self._reached(f"send {kind}")
        problem = super().send(peer, data)
        if problem is None and self._random.random() < self.doubled:
            problem = super().send(peer, data)
        self._reached(f"sent {kind}")
        return problem

    def poll(self):
        for peer, data in super().poll():
            if not isinstance(data, Lost):
                self._reached(f"take {type(codec.decode(data)).__name__}")
            yield peer, data

    def _reached(self, point: str) -> None:
        trip = self.trip
        if trip is not None and trip.point == point:
            trip.count -= 1
            if trip.count <= 0:
                self.trip = None
                trip.then()
