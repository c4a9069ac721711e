"""What both sides share: a rank's machine, transport, engine and clock, and calls about rooms.
`event_loop.py` is what an endpoint does, `driver.py` decides when, and in which thread.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, Literal, cast

from typing_extensions import Self

from disagg.digest.digest import Digester
from disagg.engines.base import Engine
from disagg.errors import UsageError
from disagg.host import exits
from disagg.host.signals import deferred_signals
from disagg.protocol import events
from disagg.protocol.messages import Hello, Room, checked_conventions, room_name
from disagg.protocol.metrics import Snapshot
from disagg.protocol.peers.liveness import Leases
from disagg.protocol.rooms.decode_room import DecodeRoom
from disagg.protocol.rooms.prefill_rooms import PrefillRoom
from disagg.protocol.status import Ended, Failure, KVPoll
from disagg.protocol.versions import PROTOCOL
from disagg.runtime.driver import Driver
from disagg.runtime.event_loop import EventLoop, M
from disagg.runtime.options import Options, check_options, open_transport
from disagg.runtime.reader import Reader
from disagg.runtime.staging import StagingBuffers
from disagg.runtime.transport import Transport
from kvpool.layout import Pin, PoolLayout


class Endpoint(Generic[M]):
    """The calls of both sides.

    It registers the layout's memory with the engine, and closes the engine with itself. The pool,
    whose memory peers read and reads write, must outlive it. `machine` is to be read between turns.

    What is open when the process ends is closed then, in EXIT_SECONDS at most; an endpoint that is
    dropped without `close` is closed soon after, with a ResourceWarning.
    """

    _released = True  # until the constructor has succeeded

    def __init__(
        self,
        machine: Callable[[Hello, float], M],
        layout: PoolLayout,
        engine: Engine,
        options: Options,
        *,
        stage: StagingBuffers | None = None,
        read_timeout: float = float("inf"),
        listen: Callable[[Transport], None] | None = None,
    ) -> None:
        """`stage` is what decode's reads go through; without, this is a prefill, which has to
        `listen`: it binds the transport, and tells the engine.
        """
        reads, stage = stage is not None, stage or StagingBuffers()
        peer_timeout = check_options(type(self).__name__, options)
        conventions = checked_conventions(options.get("conventions", {}))
        clock = options.get("clock", time.monotonic)
        side: Literal["prefill", "decode"] = "decode" if reads else "prefill"
        transport, self._own_transport = options.get("transport"), None
        if transport is None:
            transport = self._own_transport = open_transport(options, side)
        self.layout = replace(layout, generation=layout.generation or uuid.uuid4().hex)
        self.engine = engine
        try:
            if listen is not None:
                listen(transport)
            engine.register([*self.layout.slabs(), *stage.slabs])
            hello = Hello(
                protocol=PROTOCOL,
                generation=self.layout.generation,
                engine=engine.name,
                layout=self.layout.to_msgpack(),
                metadata=b"" if reads else engine.metadata(),
                timeout=peer_timeout,
                conventions=conventions,
            )
        except Exception:
            if self._own_transport is not None:
                self._own_transport.close()
            raise
        self._loop = EventLoop(
            name=type(self).__name__,
            machine=machine(hello, clock()),
            layout=self.layout,
            engine=engine,
            transport=transport,
            reader=Reader(engine, self.layout, read_timeout, clock, stage),
            digester=Digester(),
            clock=clock,
            telemetry=dict(engine.telemetry()),
        )
        threaded = options.get("threaded", True)
        self.driver = Driver(self._loop, threaded=threaded, peer_timeout=peer_timeout)
        self._releasing, self._releases = threading.RLock(), False
        exits.ABANDONED_IN_CHILD.add(self)
        self._released = False
        exits.CLOSED_AT_EXIT.add(self)

    def __repr__(self) -> str:
        address = getattr(self, "address", "")
        words = "closed" if self._released else self._loop.words()
        return f"{type(self).__name__}({address}{', ' if address else ''}{words})"

    @property
    def machine(self) -> M:
        """The protocol's state."""
        return self._loop.machine

    def poll(self, room: Room) -> KVPoll:
        """State of a room. Raises UnknownRoom, as all calls about a room do."""
        self.driver.turn_for_caller()
        with self._loop.lock:
            return self.machine.poll(room_name(room))

    def wait(self, room: Room, timeout: float | None = None) -> KVPoll:
        """Blocks until the room has ended; returns its state. Raises EndpointClosed if the endpoint
        is closed before, and TimeoutError after `timeout` seconds, with what the room waits for.
        """
        name = room_name(room)
        return self._wait_in_room(name, lambda: self.machine.poll(name).ended, timeout, name)

    def ended(self) -> list[Ended]:
        """The rooms that have ended since the last call, and whose pages may be reused (on decode
        `reading(room)` is false): each once, in that order, unless it was forgotten meanwhile.
        """
        self.driver.turn_for_caller()
        return self._loop.take_ended()

    @property
    def has_ended(self) -> bool:
        """Whether `ended` has something already."""
        return self._loop.has_ended

    def fileno(self) -> int:
        """A file that can be read while `ended()` has something: for `select`, or asyncio's
        `loop.add_reader(endpoint, ...)`. It is the endpoint's: do not read or close it. Raises
        UsageError for an endpoint without a thread of its own, which goes on in `step()`.
        """
        with deferred_signals, self._loop.lock:
            self._loop.check_open()
            if not self.driver.has_thread:
                raise UsageError(
                    "fileno(): with threaded=False nothing happens between two calls of step(). "
                    "Ask ended() after each."
                )
            return self._loop.ended_file()

    def failure(self, room: Room) -> Failure | None:
        """Why the room failed, and on which side; None if it did not."""
        with self._loop.lock:
            return self.machine.failure(room_name(room))

    def abort(self, room: Room, reason: str) -> None:
        """Ends a room that has not ended; the other side is told the reason."""
        self.driver.call(events.AbortRoom(room_name(room), reason))

    def forget(self, room: Room) -> None:
        """Drops what is kept of an ended room. Raises RoomError if it has not ended."""
        with deferred_signals, self._loop.lock:
            self._loop.handle(events.ForgetRoom(room_name(room)))
            self._loop.tell()

    def leases(self) -> Leases:
        """Items that must not be reused now; of decode's also those in quarantine."""
        with self._loop.lock:
            return self.machine.rooms.leases()

    def snapshot(self) -> Snapshot:
        """Numbers now, and since the endpoint was made, for `disagg.exporter`."""
        with self._loop.lock:
            return self.machine.snapshot(self.engine.name, self._loop.telemetry)

    def step(self) -> bool:
        """One turn of the loop, without waiting: messages, reads, digests, time. Returns whether
        the next has something to do at once. Only with `threaded=False`. Python threads of the
        engine that read get the GIL for 50 µs.
        """
        self._loop.check_open()
        if self.driver.has_thread:
            raise UsageError("this endpoint has its own thread. Make it with threaded=False.")
        busy = self.driver.step()
        self.engine.yield_gil()
        return busy

    def drain(self, timeout: float | None = None, *, stopped: bool = False) -> bool:
        """Takes no new rooms from now on: `send` and `receive` raise EndpointDraining, and a decode
        that asks for one is told at once (kind `draining`). Open rooms end normally, links stay.
        `stopped`, for an engine that has stopped, also ends rooms that lack a chunk, and all rooms
        of a decode. Returns `drained`. A drain cannot be undone.

        With `timeout` (seconds), waits until it has drained: raises TimeoutError with what is still
        open, and EndpointClosed if the endpoint is closed before. May be called again.
        """
        self.driver.call(events.Drain(stopped))
        if timeout is None:
            return self.drained
        self.driver.wait(lambda: self.machine.drained, timeout)
        self._loop.check_open()  # first: a close ends what is open by force
        with self._loop.lock:
            if not self.machine.drained:
                rooms = self.machine.rooms.open
                waits = [f"room {name!r} waits for {r.waits_for}" for name, r in rooms.items()]
                first = waits[0] if waits else "a read of a room that has failed has not ended"
                raise TimeoutError(f"{len(waits)} rooms are open after {timeout:g} s: {first}.")
        return True

    @property
    def draining(self) -> bool:
        """Whether it takes no new rooms."""
        return self.machine.draining

    @property
    def drained(self) -> bool:
        """Whether it takes no new rooms, none is open, and no read may write any more: it may be
        closed, and its pool may go. What is declined to a draining decode opens a room again.
        """
        with self._loop.lock:
            return self.machine.drained

    def close(self) -> None:
        """Aborts open rooms, tells peers, ends the loop and closes the engine. If a signal's
        handler ends it before that, it goes on where it was when it is called again.
        """
        with self._releasing:
            if self._released or self._releases:
                return
            try:
                self._releases = True
                self.driver.close(self._release)
                self._released = True
            finally:
                self._releases = False
        exits.CLOSED_AT_EXIT.discard(self)

    def drop(self) -> None:
        """Closes what its owner has left open. Over a transport of the caller's, which only one
        thread at a time may use, no peer is told.
        """
        if self._own_transport is None:
            self.driver.refuse_calls()
        self.close()

    def abandon(self) -> None:
        """In a forked child: closes this copy of the parent's endpoint, and touches nothing else of
        the parent's. Every call then raises EndpointClosed.
        """
        self._releasing, self._released = threading.RLock(), True
        exits.keep_for_ever(self)
        self.driver.abandon(exits.FORKED)
        self._loop.machine = cast(M, exits.ForkedMachine())
        self.engine.abandon()
        if isinstance(self._loop.transport, exits.Abandons):
            self._loop.transport.abandon()

    def __del__(self) -> None:
        if self._released or sys.is_finalizing():
            return
        warnings.warn(
            f"a {type(self).__name__} was dropped without close(). Close it before its pool goes, "
            "whose memory it reads or offers: use it in a with block.",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )
        exits.close_aside(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _release(self) -> None:
        if self._own_transport is not None:
            self._own_transport.close()
        self.engine.close()

    def _call_pinned(self, event: events.OfferChunk | events.RequestRoom) -> None:
        """Gives a block table to a room. Its request, if a holder made the table, is pinned for as
        long as the room needs it; raises what Holder.pin does, and what the call does.
        """
        table, holder = event.table, event.table.holder
        room: PrefillRoom | DecodeRoom | None = None
        chunks, called = 0, False
        if holder is None:
            self.driver.call(event)
            return

        # nothing has to be undone when the room ends, and another room of its name is not meant
        def held() -> bool:
            if not called or room is None:
                return not called
            if isinstance(room, DecodeRoom):
                return room.reading or not room.phase.poll.ended
            # the pin of a later chunk of the same request says at least as much
            later = any(earlier.holder is holder for earlier in room.tables[chunks:])
            return not (later or room.phase.poll.ended)

        pin = Pin(
            room=event.room,
            side="offered" if isinstance(event, events.OfferChunk) else "received",
            address=table,
            layout=self.layout,
            last=event.last if isinstance(event, events.OfferChunk) else True,
            held=held,
            start=0 if isinstance(event, events.OfferChunk) else event.start,
        )
        holder.pin(pin)
        try:
            self.driver.call(event)
        except BaseException:
            holder.unpin(pin)
            raise
        room = self.machine.rooms.by_name.get(event.room)
        chunks = len(room.tables) if isinstance(room, PrefillRoom) else 0
        called = True

    def _wait_in_room(
        self, name: Room, holds: Callable[[], bool], timeout: float | None, room: Room | None = None
    ) -> KVPoll:
        """Waits until `holds()`; the room's state then. Raises as `wait` does."""
        if not self.driver.wait(holds, timeout, room):
            self._loop.check_open()
            with self._loop.lock:
                if not holds():
                    raise TimeoutError(
                        f"room {name!r} is {self.machine.poll(name)} after {timeout:g} s: it waits "
                        f"for {self.machine.rooms.known(name).waits_for}."
                    )
        return self.machine.poll(name)
