"""What decode knows of a prefill, of a request that it wants, and of a chunk to be read."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.digest.digester import Verification
from disagg.plan import IncompatibleLayouts, TransferPlan
from disagg.protocol.messages import Aux, ChunkReady, Hello, Room, pack_aux, unpack_aux
from disagg.protocol.metrics import RoomMetrics
from disagg.protocol.status import Failure
from kvpool.layout import RequestAddress


@dataclass(eq=False, slots=True)
class Link:
    """One prefill: all its ranks. `plan` is there once all have answered the hello.

    `lost` says that a rank was there and is not any more; it is greeted again until it answers.
    `refusal` is final.
    """

    addresses: tuple[str, ...]
    first: int
    """Number of its rank 0 among all ranks that this decode has ever talked to."""
    hellos: list[Hello | None]
    pinged: list[float]
    plan: TransferPlan | None = None
    plan_seconds: float = 0.0
    lost: str | None = None
    refusal: str | None = None
    error: IncompatibleLayouts | None = None

    @property
    def settled(self) -> bool:
        """Whether the hello has ended, either way."""
        return self.plan is not None or self.refusal is not None

    def name(self, source: int) -> str:
        """A rank, as sentences name it."""
        return f"rank {source} of prefill ({self.addresses[source]})"


@dataclass(eq=False, slots=True)
class Read:
    """A chunk to be read from rank `source` of a link: positions `tokens`, the source's address.

    `hello` is the life of that rank, `plan` what was planned with it.
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


@dataclass(eq=False, slots=True)
class DecodeRoom:
    """One request that is wanted."""

    link: Link
    address: RequestAddress
    start: int
    attempt: str
    wanted_at: float
    metrics: RoomMetrics
    expected: frozenset[str] = frozenset()
    offered: list[int] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)
    seen: set[tuple[int, int, int, bool]] = field(default_factory=set)
    """Chunks by source rank, start, stop and last."""
    reading: int = 0
    asked: bool = False
    checks: dict[int, Verification] | None = None
    """By source rank, those that are not done; None before the last read has ended."""
    announced: bool = False
    released: set[int] = field(default_factory=set)
    aux: Aux = field(default_factory=dict)
    failure: Failure | None = None

    @property
    def complete(self) -> bool:
        """Whether every rank has released its pages."""
        return self.announced and len(self.released) == len(self.offered)

    def take(self, source: int, ready: ChunkReady) -> RequestAddress | None:
        """Notes a chunk that a rank offers: where it is, or None for a duplicate. Raises ValueError
        where it cannot be one.
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
