"""The ranks of a fleet: real endpoints without threads, turned when something is due, and an engine
whose reads move nothing and take virtual time. A rank has pages, and its rooms have them from their
begin to the time when their endpoint says that they have ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from disagg.engines.base import Engine, TransferError
from disagg.plan.bind import CopyBatch
from disagg.protocol.peers.liveness import CHECKS_PER_TIMEOUT
from disagg.protocol.status import KVPoll
from disagg.runtime.decode_endpoint import DecodeEndpoint
from disagg.runtime.options import Options
from disagg.runtime.prefill_endpoint import PrefillEndpoint
from kvpool.layout import PoolLayout, RequestAddress, Span
from kvpool.layout.grid import Ints, ragged
from tests.fleet.network import RankTransport
from tests.fleet.spec import PAGE

NOBODY = -1


@dataclass(eq=False, slots=True)
class FleetRoom:
    """One request: between which engines, and how many ranks of decode have a part to end."""

    number: int
    prefill: int
    decode: int
    tokens: int
    compute: float
    began: float
    parts: int
    failed: bool = False

    @property
    def pages(self) -> int:
        return -(-self.tokens // PAGE)


@dataclass(eq=False, slots=True)
class Part:
    """A room on one rank. On decode, `nbytes` have landed; `torn`: some from pages that were no
    longer the room's.
    """

    room: FleetRoom
    address: RequestAddress
    ids: Ints
    nbytes: int = 0
    torn: bool = False


class Rank:
    """One generation of a rank. `engine` and `index` say which, `life` how often it died before."""

    side: str

    def __init__(self, fleet, engine: int, index: int, life: int) -> None:
        self.fleet, self.engine, self.index = fleet, engine, index
        self.life, self.alive = life, True
        self.address = f"{self.side} {engine}.{index}"
        self.name = f"{self.address} life {life}"
        self.layout = replace(fleet.layouts[self.side][index], generation=self.name)
        pages = fleet.spec.pages(self.side)
        self.free = deque(range(1, pages))
        self.owners: Ints = np.full(pages, NOBODY, dtype=np.int64)
        self.parts: dict[int, Part] = {}
        self.ended: set[int] = set()
        self.backlog: deque[FleetRoom] = deque()
        self.busy_until = self.port_free = 0.0
        self.transport = RankTransport(fleet.network, self)
        self._due: float | None = None
        # ranks look at their time-outs at different times
        fleet.timeline.at(fleet.timeline.now + fleet.routes.random() * self._pause, self._look)

    @property
    def _pause(self) -> float:
        return self.fleet.spec.peer_timeout / CHECKS_PER_TIMEOUT

    def options(self) -> Options:
        return Options(
            transport=self.transport,
            clock=self.fleet.timeline.clock,
            threaded=False,
            peer_timeout=self.fleet.spec.peer_timeout,
        )

    def wake(self) -> None:
        """Something is to be done: there is a turn as soon as the thread has time."""
        at = max(self.fleet.timeline.now, self.busy_until)
        if self.alive and (self._due is None or at < self._due):
            self._due = at
            self.fleet.timeline.at(at, partial(self._turn, at))

    def admit(self, room: FleetRoom) -> None:
        """Begins a room here, once there are pages for it."""
        self.backlog.append(room)
        self.fleet.peak(self.side, "backlog", len(self.backlog) - 1)
        self._begin_some()

    def observe(self) -> None:
        for name, state, failure in self.endpoint.ended():
            number = int(name)
            part = self.parts.pop(number, None)
            if part is None:
                self.stray(number)
                continue
            self.ended.add(number)
            self.fleet.note_end(self, part, state, failure)
            self.endpoint.forget(number)
            self.owners[part.ids] = NOBODY
            self.free.extend(part.ids.tolist())
            self.over(part, state)
        self._begin_some()

    def _begin_some(self) -> None:
        while self.alive and self.backlog and self.backlog[0].pages <= len(self.free):
            room = self.backlog.popleft()
            ids = np.array([self.free.popleft() for _ in range(room.pages)], dtype=np.int64)
            self.fleet.check((self.owners[ids] == NOBODY).all(), "a page is given out twice")
            self.owners[ids] = room.number
            address = RequestAddress(room.tokens, {"kv": Span(ids)})
            part = self.parts[room.number] = Part(room, address, ids)
            self.fleet.peak(self.side, "open", len(self.parts))
            self.begin(part)

    def _turn(self, at: float) -> None:
        if at != self._due or not self.alive:
            return  # there was an earlier one
        self._due = None
        waiting = len(self.transport.inbox)
        self.fleet.peak(self.side, "inbox", waiting)
        self.busy_until = at + max(1, waiting) * self.fleet.spec.turn
        if self.endpoint.step():
            self.wake()
        self.observe()

    def _look(self) -> None:
        if self.alive:
            self.look()
            self.fleet.timeline.at(self.fleet.timeline.now + self._pause, self._look)
            self.wake()


class PrefillRank(Rank):
    """Computes requests and offers them."""

    side = "prefill"

    def __init__(self, fleet, engine: int, index: int, life: int) -> None:
        super().__init__(fleet, engine, index, life)
        moves, lease = TimedEngine(self), fleet.spec.lease
        self.endpoint = PrefillEndpoint(
            self.layout, moves, self.address, lease=lease, **self.options()
        )

    def begin(self, part: Part) -> None:
        chunks = min(self.fleet.spec.chunks, part.room.pages)
        edges = [part.room.pages * n // chunks * PAGE for n in range(chunks)]
        edges.append(part.room.tokens)
        for number, (start, stop) in enumerate(pairwise(edges)):
            at = self.fleet.timeline.now + part.room.compute * (number + 1) / chunks
            self.fleet.timeline.at(at, partial(self._offer, part, range(start, stop)))

    def over(self, part: Part, state: KVPoll) -> None:
        self.fleet.open_prefill -= 1

    def look(self) -> None:
        """Prefill has nothing to look at."""

    def stray(self, number: int) -> None:
        """Decode gave up what is not offered yet, and is told once more when it is; or it gave up
        what has ended here before.
        """
        room = self.endpoint.machine.rooms.by_name.get(number)
        known = room is not None and not room.chunks
        self.fleet.check(known, f"room {number} has ended twice on {self.name}")
        if number in self.ended and known:
            self.endpoint.forget(number)

    def _offer(self, part: Part, tokens: range) -> None:
        number, last = part.room.number, tokens.stop == part.room.tokens
        if self.alive and number in self.parts:
            aux = {"token": number} if last else {}
            self.endpoint.send(number, part.address, tokens=tokens, last=last, aux=aux)
            self.wake()
            self.observe()


class DecodeRank(Rank):
    """Asks for rooms. It connects to a prefill engine with the first room from there."""

    side = "decode"

    def __init__(self, fleet, engine: int, index: int, life: int) -> None:
        super().__init__(fleet, engine, index, life)
        self.links, self._used = {}, {}
        spec = fleet.spec
        self.endpoint = DecodeEndpoint(
            self.layout,
            TimedEngine(self),
            ranks=fleet.groups[index] if spec.groups else spec.decode_tp,
            offer_timeout=spec.offer_timeout,
            staging=0,
            **self.options(),
        )

    def begin(self, part: Part) -> None:
        engine, number = part.room.prefill, part.room.number
        if engine not in self.links:
            ranks = range(self.fleet.spec.prefill_tp)
            self.links[engine] = self.endpoint.connect([f"prefill {engine}.{n}" for n in ranks])
        self._used[engine] = self.fleet.timeline.now
        self.endpoint.receive(number, part.address, link=self.links[engine], aux=("token",))
        self.wake()

    def over(self, part: Part, state: KVPoll) -> None:
        self._used[part.room.prefill] = self.fleet.timeline.now
        if state is KVPoll.Success:
            self.fleet.check(not part.torn, f"room {part.room.number}: a wrong Success")
            exact = part.nbytes == self.layout.live_bytes(part.room.tokens)
            self.fleet.check(exact, f"room {part.room.number}: {part.nbytes} bytes were read")
        else:
            part.room.failed = True
        self.fleet.part_over(part.room)

    def look(self) -> None:
        """Disconnects from engines that were not used for long."""
        before = self.fleet.timeline.now - self.fleet.spec.unused
        used = {part.room.prefill for part in self.parts.values()}
        for engine in [e for e, at in self._used.items() if at < before and e not in used]:
            self.endpoint.disconnect(self.links.pop(engine))
            del self._used[engine]

    def stray(self, number: int) -> None:
        self.fleet.check(False, f"room {number} has ended twice on {self.name}")


@dataclass(eq=False, slots=True)
class Transfer:
    """A read from pages of one rank to pages of another."""

    source: Rank
    source_pages: Ints
    pages: Ints
    nbytes: int
    arrives: float


class TimedEngine(Engine):
    """Reads for one rank. Ports are shared: a read waits until both are free, and takes the time of
    its bytes; a message's time later it has arrived. It checks what it would move.
    """

    name = "timed"
    max_bytes = max_runs = 1 << 40
    background = True

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    @classmethod
    def availability(cls):
        return

    def register(self, slabs):
        """Memory is not there."""

    def metadata(self):
        return self._rank.name.encode()

    def connect(self, metadata):
        rank = self._rank.fleet.alive.get(metadata.decode())
        if rank is None:
            raise TransferError("the peer's process is gone.")
        return rank

    def read(self, peer: Rank, batch: CopyBatch) -> Transfer:
        fleet, here = self._rank.fleet, self._rank
        start = max(fleet.timeline.now, peer.port_free, here.port_free)
        peer.port_free = here.port_free = end = start + batch.total / fleet.spec.rate
        arrives = end + fleet.network.delay()
        fleet.timeline.at(arrives, here.wake)
        return Transfer(
            source=peer,
            source_pages=pages_of(peer.layout, batch.src, batch.nbytes),
            pages=pages_of(here.layout, batch.dst, batch.nbytes),
            nbytes=batch.total,
            arrives=arrives,
        )

    def poll(self, transfer: Transfer) -> bool:
        here, source = self._rank, transfer.source
        if here.fleet.timeline.now < transfer.arrives:
            return False
        if not source.alive:
            raise TransferError("the peer's process is gone.")
        rooms = here.owners[transfer.pages]
        room = int(rooms[0])
        here.fleet.check(room >= 0 and (rooms == room).all(), "bytes land in pages of other rooms")
        part = here.parts[room]
        part.nbytes += transfer.nbytes
        # pages have one room from the first chunk to its end, so they had it all the time
        part.torn |= not (source.owners[transfer.source_pages] == room).all()
        return True

    def fence(self, peer, timeout=None):
        """Nothing lands that is not polled."""
        return True

    def close(self):
        """Nothing is open."""


def pages_of(layout: PoolLayout, starts: Ints, nbytes: Ints) -> Ints:
    """The pages that runs touch, each in one buffer."""
    buffers = sorted((buffer.base, buffer.item_stride) for buffer in layout.buffers)
    bases, sizes = np.array(buffers, dtype=np.int64).T
    which = np.searchsorted(bases, starts, side="right") - 1
    offsets, size = starts - bases[which], sizes[which]
    first, last = offsets // size, (offsets + nbytes - 1) // size
    if (first == last).all():
        return first
    run, step = ragged(last - first + 1)
    return first[run] + step
