"""What the machines of both sides have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic

from disagg.protocol.events import AbortAll, AbortRoom, Drain, Effects, ForgetRoom, RoomEnded
from disagg.protocol.messages import Hello, Room
from disagg.protocol.metrics import (
    RoomMetrics,
    RoomSpan,
    Snapshot,
    Totals,
    is_logged,
    log_end,
)
from disagg.protocol.peers.decode_peers import DecodePeers
from disagg.protocol.peers.prefill_peers import PrefillPeers
from disagg.protocol.status import STOPPED, Failure, KVPoll, R, Rooms, Side
from disagg.protocol.trace_context import trace_of


class Machine(ABC, Generic[R]):
    """One side's rooms. Calls about a room raise UnknownRoom."""

    side: ClassVar[Side]
    peers: DecodePeers | PrefillPeers

    def __init__(self, hello: Hello, rooms: Rooms[R], now: float) -> None:
        self.hello, self.rooms, self._now = hello, rooms, now
        self._effects, self.ended, self.totals = Effects(), rooms.ended, Totals()
        self.draining = False
        """Whether new rooms are refused."""

    def poll(self, name: Room) -> KVPoll:
        return self.rooms.known(name).phase.poll

    def failure(self, name: Room) -> Failure | None:
        return self.rooms.known(name).failure

    @property
    def drained(self) -> bool:
        """Whether no room is open, no item is held, and none will be."""
        return self.draining and self.rooms.idle

    def snapshot(self, engine: str, telemetry: Mapping[str, float]) -> Snapshot:
        """Numbers now, and since the machine was made."""
        return Snapshot(
            totals=self.totals.copy(),
            open_rooms=len(self.rooms.open),
            peers=self.peers.live(),
            losses=self.peers.counts.losses,
            refusals=dict(self.peers.counts.refusals),
            leases=self.rooms.leases(),
            quarantined_rooms=self.rooms.quarantined(),
            draining=self.draining,
            engine=engine,
            telemetry=telemetry,
        )

    def _handle_common(self, event: object) -> None:
        match event:
            case ForgetRoom(name):
                self.rooms.forget(name, self._now)
            case AbortRoom(name, reason):
                if not self.poll(name).ended:
                    self._fail(self.rooms.known(name), Failure(self.side, reason, "abort"))
            case Drain(stopped):
                self.draining = True
                for room in list(self.rooms.open.values()) if stopped else ():
                    if room.needs_caller:
                        self._fail(room, Failure(self.side, STOPPED, "draining"))
            case AbortAll(reason, closing):
                for room in list(self.rooms.open.values()):
                    self._fail(room, Failure(self.side, reason, "abort"))
                if closing:
                    self.peers.notify_shutdown()
            case _:
                raise TypeError(f"{event!r} is not {self.side}'s.")

    @abstractmethod
    def _fail(self, room: R, failure: Failure) -> None:
        """Ends a room, and tells the other side."""

    def _record_end(self, room: R, metrics: RoomMetrics) -> None:
        self.totals.count_ended(metrics, room.failure)
        traceparent, logged = room.traceparent, is_logged(room.failure)
        span, facts = None, dict[str, Any]()
        if traceparent is not None or logged:
            # the generation is always prefill's: a room of decode says it
            facts = {"room": room.name, "generation": self.hello.generation} | room.facts()
        if traceparent is not None:
            span = RoomSpan(
                side=self.side,
                traceparent=traceparent,
                failure=room.failure,
                metrics=metrics,
                facts=facts,
            )
        self._effects.append(RoomEnded(room.name, span))
        if logged:
            log_end(
                self.side,
                room.failure,
                **facts,
                trace=traceparent and trace_of(traceparent),
                bytes_moved=metrics.bytes_moved,
                seconds=round(metrics.total_seconds, 6),
                times=metrics.times(),
            )
