"""Faults at a chosen point: hooks on an endpoint's messages and on its engine's reads; and
an engine one read of which fails although its bytes land later.

A point is `read` or `read after` (an engine call), `send X`, `sent X` or `take X` (a message of
type X). Hooks run on the endpoint's own thread, so a process that signals itself there stops right
at that point.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg import Engine, Lost, SocketTransport
from disagg.engines.base import TransferError
from disagg.engines.local import LocalEngine
from disagg.plan.bind import CopyBatch
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


WHICH = 5
"""Number of the read that fails."""


class LateEngine(LocalEngine):
    """The bytes land once there is a file `gate`, which is removed then. `fence` is the answer of a
    fence before that: False, True (wrongly), or None (TransferError, then and later).
    """

    def __init__(self, fence: bool | None, gate: Path) -> None:
        super().__init__()
        self._answer, self._gate = fence, gate
        self._reads = 0
        self._broken: object = None
        self._landed = threading.Event()

    def read(self, peer, batch):
        self._reads += 1
        if self._reads != WHICH:
            return super().read(peer, batch)
        self._broken = peer
        kept = CopyBatch(batch.src.copy(), batch.dst.copy(), batch.nbytes.copy())
        threading.Thread(target=self._land, args=(peer, kept), daemon=True).start()
        raise TransferError("the cable was pulled")

    def fence(self, peer, timeout=None):
        if peer is self._broken:
            if self._answer is None:
                raise TransferError("the engine cannot tell")
            if not self._landed.is_set():
                return self._answer
        return super().fence(peer, timeout)

    def close(self):
        self._broken = None
        super().close()

    def _land(self, peer, batch):
        while not self._gate.exists():
            time.sleep(0.001)
        transfer = super().read(peer, batch)
        while not self.poll(transfer):
            time.sleep(0.001)
        self._landed.set()
        self._gate.unlink()
