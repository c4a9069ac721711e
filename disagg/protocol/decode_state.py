"""What decode knows of a prefill, of rooms that it has asked for, and of a chunk to be read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from disagg.digest.digester import Verification
from disagg.errors import RoomError, UnknownRoom
from disagg.plan import IncompatibleLayouts, TransferPlan
from disagg.plan.bind import Columns
from disagg.plan.block_pools import id_clash
from disagg.protocol.liveness import CHECKS_PER_TIMEOUT, Leases, count_items
from disagg.protocol.messages import Aux, ChunkReady, Hello, Room, pack_aux, unpack_aux
from disagg.protocol.metrics import RoomMetrics
from disagg.protocol.status import Failure, Phase
from disagg.protocol.written_items import WrittenItems
from kvpool.layout import PoolLayout, RequestAddress


@dataclass(eq=False, slots=True)
class Link:
    """All ranks of one prefill, by endpoint address. `plan` is there once all have answered the
    hello.

    `lost` says why a rank is not there (any more); it is dialled until it answers. `refusal` is
    final.
    """

    addresses: tuple[str, ...]
    first: int = -1
    """Number of its rank 0 among all ranks that this decode has ever talked to."""
    hellos: list[Hello | None] = field(default_factory=list)
    pinged: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    """Seconds before each rank is dialled again that refuses this decode for now."""
    redials: list[float | None] = field(default_factory=list)
    """When that will be; the rank is not connected until then."""
    plan: TransferPlan | None = None
    plan_seconds: float = 0.0
    lost: str | None = None
    refusal: str | None = None
    error: IncompatibleLayouts | None = None

    def __post_init__(self) -> None:
        self.hellos = [None] * len(self.addresses)
        self.pinged = [0.0] * len(self.addresses)
        self.pauses = [0.0] * len(self.addresses)
        self.redials = [None] * len(self.addresses)

    @property
    def settled(self) -> bool:
        """Whether the handshake has ended, either way."""
        return self.plan is not None or self.refusal is not None

    def name(self, source: int) -> str:
        """A rank, as sentences name it."""
        return f"rank {source} of prefill ({self.addresses[source]})"

    def names(self, sources: Iterable[int]) -> str:
        """Several ranks."""
        return ", ".join(self.name(source) for source in sources)


@dataclass(eq=False, slots=True)
class Read:
    """A chunk to be read from rank `source` of a link: positions `tokens`, of the request that lies
    at `source_address` there and at `dest_address` here.

    `hello` is that rank's, `plan` what was planned with it. `metrics` are the room's.
    """

    room: Room
    attempt: str
    link: Link
    source: int
    hello: Hello
    plan: TransferPlan
    tokens: range
    source_address: RequestAddress
    dest_address: RequestAddress
    metrics: RoomMetrics
    cancelled: bool = False


@dataclass(eq=False, slots=True)
class DecodeRoom:
    """One request that decode has asked for."""

    link: Link
    address: RequestAddress
    start: int
    attempt: str
    opened_at: float
    metrics: RoomMetrics
    expected: frozenset[str] = frozenset()
    phase: Phase = Phase.HANDSHAKE
    offered: list[int] = field(default_factory=list)
    """By source rank, positions up to which chunks are ready."""
    closed: list[bool] = field(default_factory=list)
    """By source rank, whether its last chunk is ready."""
    seen: set[tuple[int, int, int, bool]] = field(default_factory=set)
    """Chunks by source rank, start, stop and last."""
    reading: int = 0
    """Reads that have not ended."""
    checks: dict[int, Verification] = field(default_factory=dict)
    """By source rank, comparisons that are not done."""
    released: set[int] = field(default_factory=set)
    aux: Aux = field(default_factory=dict)
    failure: Failure | None = None
    touched: float = 0.0
    """When something has happened last: a chunk, the end of a read, a digest, an ack."""

    def __post_init__(self) -> None:
        self.touched = self.opened_at
        self.offered = [0] * len(self.link.addresses)
        self.closed = [False] * len(self.link.addresses)

    @property
    def working(self) -> bool:
        """Whether this side has something to do for it: a read, or a digest."""
        return self.reading > 0 or any(check.own is None for check in self.checks.values())

    @property
    def waits_for(self) -> str:
        """What must happen next, and on which ranks."""
        link, ranks = self.link, range(len(self.link.addresses))
        if self.phase is Phase.HANDSHAKE:
            silent = link.names(n for n in ranks if link.hellos[n] is None)
            return f"the hello of {silent}" + (f" ({link.lost})" if link.lost else "")
        if self.working:
            return "reads and digests of its own"
        if self.phase is Phase.VERIFYING:
            return f"digests of {link.names(sorted(self.checks))}"
        if self.phase is Phase.RELEASING:
            return f"the ack of {link.names(n for n in ranks if n not in self.released)}"
        open_ranks = [n for n in ranks if not self.closed[n]]
        return f"chunks from position {min(self.offered[n] for n in open_ranks)} on, of " + (
            link.names(open_ranks)
        )

    def facts(self) -> dict[str, Any]:
        """What the log says of it."""
        hellos = self.link.hellos
        return {
            "peer": ", ".join(self.link.addresses),
            "generation": ", ".join(hello.generation if hello else "" for hello in hellos),
            "start": self.start,
            "tokens": self.address.num_tokens,
            "bytes_moved": self.metrics.bytes_moved,
            "seconds": round(self.metrics.total_seconds, 6),
        }

    def missing_aux(self) -> str | None:
        """Why the aux values that came do not do."""
        missing = sorted(self.expected - self.aux.keys())
        sent = ", ".join(sorted(self.aux)) or "none"
        return (
            f"prefill sent no aux value {', '.join(missing)} (it sent: {sent})."
            if missing
            else None
        )

    def read_of(self, source: int, ready: ChunkReady, address: RequestAddress) -> Read | None:
        """What is to be read of a chunk that lies at `address` on its rank."""
        plan, hello = self.link.plan, self.link.hellos[source]
        tokens = range(max(ready.start, self.start), max(ready.stop, self.start))
        # slots and rings come with the last position, also where decode has all the pages
        needed = tokens or (ready.last and self.start == self.address.num_tokens)
        if plan is None or hello is None or source not in plan.contributors() or not needed:
            return None
        about = ready.room, self.attempt, self.link, source, hello, plan, tokens, address
        return Read(*about, self.address, self.metrics)

    def take(self, source: int, ready: ChunkReady) -> RequestAddress | None:
        """Notes a chunk that a rank offers: its block table there, or None for a duplicate. Raises
        ValueError for a chunk that cannot be one.
        """
        chunk = source, ready.start, ready.stop, ready.last
        total = self.address.num_tokens
        if chunk in self.seen:
            return None
        if ready.start != self.offered[source] or ready.stop < ready.start or self.closed[source]:
            raise ValueError(
                f"chunk {ready.start} to {ready.stop} does not follow {self.offered[source]}."
            )
        if ready.stop > total or (ready.last and ready.stop != total):
            raise ValueError(f"prefill computed {ready.stop} tokens, decode made room for {total}.")
        address, aux = ready.address(), unpack_aux(ready.aux)
        plan = self.link.plan
        if plan and (twice := id_clash(plan.sources[source], address, Columns())):
            raise ValueError(twice)
        if aux and not ready.last:
            raise ValueError("aux values travel with the last chunk.")
        known = {name: self.aux[name] for name in aux if name in self.aux}
        clash = [n for n, value in known.items() if pack_aux({n: aux[n]}) != pack_aux({n: value})]
        if clash:
            raise ValueError(f"ranks send different values of aux {', '.join(clash)}.")
        self.seen.add(chunk)
        self.offered[source], self.closed[source] = ready.stop, ready.last
        self.aux.update(aux)
        return address


class DecodeRooms:
    """All rooms that are not forgotten, and the items that they write. A room in which nothing
    happens for longer than `offer_timeout` seconds is stuck.
    """

    def __init__(self, layout: PoolLayout, offer_timeout: float | None) -> None:
        self.by_name: dict[Room, DecodeRoom] = {}
        self.open: set[Room] = set()
        self._written = WrittenItems(layout)
        self._layout, self._columns = layout, Columns()
        self.offer_timeout, self._next_check = offer_timeout, 0.0

    def add(self, name: Room, room: DecodeRoom) -> None:
        """Opens a room. Raises RoomError if its name is taken, if it lacks positions that it does
        not have, if its block table lists an id for two spaces of one block pool, or if another
        room writes some of its items.
        """
        if name in self.by_name:
            raise RoomError(f"room {name!r} exists already. Forget it first.")
        total = room.address.num_tokens
        if not 0 <= room.start <= total:
            raise RoomError(f"room {name!r}: start {room.start} of {total} tokens.")
        if clash := id_clash(self._layout, room.address, self._columns):
            raise RoomError(f"room {name!r}: {clash}")
        self._written.claim(name, room.address, room.start)
        self.by_name[name] = room
        self.open.add(name)

    def known(self, name: Room) -> DecodeRoom:
        """The room of that name; raises UnknownRoom."""
        room = self.by_name.get(name)
        if room is None:
            raise UnknownRoom(
                f"room {name!r} is not known here: it was not asked for, or it was forgotten. "
                "`receive` makes it known."
            )
        return room

    def current(self, name: Room, attempt: str) -> DecodeRoom | None:
        """The open room of that name, if this is its attempt."""
        room = self.by_name.get(name)
        return room if room and name in self.open and room.attempt == attempt else None

    def of_link(self, link: Link) -> list[Room]:
        """Open rooms of a link."""
        return [name for name in self.open if self.by_name[name].link is link]

    def stuck(self, now: float) -> list[tuple[Room, str]]:
        """Open rooms in which nothing has happened for too long and nothing is done here, each with
        the reason. To be called often.
        """
        most = self.offer_timeout
        if most is None or now < self._next_check:
            return []
        self._next_check = now + most / CHECKS_PER_TIMEOUT
        rooms = ((name, self.by_name[name]) for name in self.open)
        late = [each for each in rooms if now - each[1].touched > most and not each[1].working]
        why = f"nothing has happened for {most:g} s: it waits for"
        return [(name, f"{why} {room.waits_for}.") for name, room in late]

    def end(self, name: Room) -> None:
        """A room has ended; its items are free unless a read may still write them."""
        self.open.discard(name)
        if not self.by_name[name].reading:
            self._written.release(name)

    def read_ended(self, read: Read, now: float) -> DecodeRoom | None:
        """None of a read's bytes can land any more; returns its room if that is open."""
        room = self.known(read.room)
        room.reading -= 1
        room.touched = now
        if read.room not in self.open and not room.reading:
            self._written.release(read.room)
        return self.current(read.room, read.attempt)

    def forget(self, name: Room) -> None:
        """Drops an ended room; raises RoomError if it has not ended."""
        room = self.known(name)
        if name in self.open or room.reading:
            raise RoomError(f"room {name!r} has not ended. Abort it, and wait for its reads.")
        del self.by_name[name]

    def leases(self) -> Leases:
        """Items of open rooms, and of ended ones to which a read may still write."""
        ended = self.by_name.keys() - self.open
        return Leases(
            count_items(self.by_name[name].address for name in self.open),
            count_items(self.by_name[name].address for name in ended if self.reading(name)),
        )

    def reading(self, name: Room) -> bool:
        """Whether a read may still write to a room's pages."""
        return self.known(name).reading > 0
