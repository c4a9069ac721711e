"""What decode knows of a prefill, of a room that it has asked for, and of a chunk to be read."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.digest.digester import Verification
from disagg.plan import IncompatibleLayouts, TransferPlan
from disagg.protocol.messages import Aux, ChunkReady, Hello, Room, pack_aux, unpack_aux
from disagg.protocol.metrics import RoomMetrics
from disagg.protocol.status import Failure, Phase
from kvpool.layout import RequestAddress


@dataclass(eq=False, slots=True)
class Link:
    """All ranks of one prefill, by endpoint address. `plan` is there once all have answered the
    hello.

    `lost` says that a rank was there and is not any more; hellos are sent until it answers.
    `refusal` is final.
    """

    addresses: tuple[str, ...]
    first: int = -1
    """Number of its rank 0 among all ranks that this decode has ever talked to."""
    hellos: list[Hello | None] = field(default_factory=list)
    pinged: list[float] = field(default_factory=list)
    plan: TransferPlan | None = None
    plan_seconds: float = 0.0
    lost: str | None = None
    refusal: str | None = None
    error: IncompatibleLayouts | None = None

    def __post_init__(self) -> None:
        self.hellos = [None] * len(self.addresses)
        self.pinged = [0.0] * len(self.addresses)

    @property
    def settled(self) -> bool:
        """Whether the handshake has ended, either way."""
        return self.plan is not None or self.refusal is not None

    def name(self, source: int) -> str:
        """A rank, as sentences name it."""
        return f"rank {source} of prefill ({self.addresses[source]})"


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

    def __post_init__(self) -> None:
        self.offered = [0] * len(self.link.addresses)
        self.closed = [False] * len(self.link.addresses)

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
