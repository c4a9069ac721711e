"""Decode's reads, one after another: bound, cut into parts, posted to the engine and polled."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from disagg.bind import Columns, CopyBatch
from disagg.decode_room import Read
from disagg.engines.base import Engine
from disagg.metrics import RoomMetrics

log = logging.getLogger("disagg")


@dataclass(eq=False, slots=True)
class _Active:
    """A read that has begun: the parts still to be posted, and the one that is in flight."""

    read: Read
    peer: Any
    parts: Iterator[CopyBatch]
    metrics: RoomMetrics
    in_flight: bool = False
    transfer: Any = None
    nbytes: int = 0
    posted: float = 0.0


class Reader:
    """Works through reads with one engine; used by one thread.

    `wanted(read)` gives the metrics to count in, or None if the room has failed meanwhile.
    `ended(read, problem, quiet)` is called for each; `quiet` if nothing of it can still land.
    """

    def __init__(
        self,
        engine: Engine,
        wanted: Callable[[Read], RoomMetrics | None],
        ended: Callable[[Read, str | None, bool], None],
    ) -> None:
        self.queue: deque[Read] = deque()
        self._engine, self._wanted, self._ended = engine, wanted, ended
        self._peers: dict[tuple[int, int], Any] = {}
        self._columns = Columns()
        self._active: _Active | None = None

    def step(self) -> bool:
        """Begins, posts or polls one thing; whether there is more to do."""
        active = self._active
        read = active.read if active else self.queue.popleft() if self.queue else None
        if read is None:
            return False
        try:
            if active is None:
                self._begin(read)
            else:
                self._go_on(active)
        except Exception as error:  # whatever goes wrong in one read fails that room and no other
            self._give_up(read, error, touched=active is not None)
        return True

    def _begin(self, read: Read) -> None:
        metrics, plan = self._wanted(read), read.link.plan
        if metrics is None or plan is None:
            self._end(read, None)
            return
        peer = self._peer(read)
        began = time.perf_counter()
        batch = plan.bind(
            read.source,
            read.source_address,
            read.dest_address,
            tokens=read.tokens,
            columns=self._columns,
        )
        metrics.bound(batch, time.perf_counter() - began)
        parts = batch.split(self._engine.max_bytes, self._engine.max_runs)
        self._active = _Active(read, peer, parts, metrics)

    def _go_on(self, active: _Active) -> None:
        if not active.in_flight:
            part = next(active.parts, None) if self._wanted(active.read) else None
            if part is None:
                self._end(active.read, None)
                return
            active.posted, active.nbytes = time.perf_counter(), part.total
            active.transfer, active.in_flight = self._engine.read(active.peer, part), True
        if self._engine.poll(active.transfer):
            active.in_flight = False
            active.metrics.moved(active.nbytes, time.perf_counter() - active.posted)

    def _peer(self, read: Read) -> Any:
        key = id(read.link), read.source
        if key not in self._peers:
            hello, plan = read.link.hellos[read.source], read.link.plan
            if hello is None or plan is None:
                raise RuntimeError("a read before the hello.")
            self._peers[key] = self._engine.connect(hello.metadata)
            self._engine.prepare(self._peers[key], plan)
        return self._peers[key]

    def _give_up(self, read: Read, error: Exception, touched: bool) -> None:
        """Once its room is told, nothing of a failed read may land; the next one reconnects."""
        problem = f"read from rank {read.source} of prefill: {error}"
        log.warning("room %r: %s", read.room, problem)
        quiet = True
        if touched:
            try:
                self._engine.fence(self._peers.pop((id(read.link), read.source)))
            except Exception as fault:  # the room fails, and keeps its pages
                log.error("room %r: its pages stay leased: %s", read.room, fault)
                quiet = False
        self._end(read, problem, quiet)

    def stop(self) -> None:
        """Ends what is left, once the engine is closed."""
        if self._active is not None:
            self._end(self._active.read, "the endpoint was closed.")
        while self.queue:
            self._end(self.queue.popleft(), "the endpoint was closed.")

    def _end(self, read: Read, problem: str | None, quiet: bool = True) -> None:
        self._active = None
        self._ended(read, problem, quiet)
