"""What decode knows of a prefill, and a chunk that it is to read from one of its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field

from msgspec import Struct

from disagg.digest.arrived import ArrivedDigests
from disagg.plan import IncompatibleLayouts, TransferPlan
from disagg.plan.bind import CopyBatch, Count
from disagg.protocol.messages import DropRoom, Hello, Room
from disagg.protocol.peers.liveness import Latest
from disagg.protocol.rooms.offered import LayerRange, LayersByOwner
from disagg.protocol.versions import PROTOCOL
from kvpool.layout import PoolLayout, RequestAddress

LINK_STATES = "connecting", "open", "lost", "refused"
MAX_UNTOLD = 10_000
"""Rooms that failed while a rank was lost; it is told when it is back. The latest are kept."""


@dataclass(eq=False, slots=True, kw_only=True)
class PrefillRank:
    """Rank `source` of a link; the transport knows it by `number`, among all that were dialled."""

    link: Link
    source: int
    number: int = -1
    hello: Hello | None = None
    """Without the layout's bytes once it was read."""
    layout: PoolLayout | None = None
    pinged: float = 0.0
    pause: float = 0.0
    """Seconds before it is dialled again if it refuses this decode for now."""
    protocol: int = PROTOCOL
    """What this decode's hello speaks: the highest, until the rank has refused that."""
    redial: float | None = None
    """When that will be; it is not connected until then."""
    untold: Latest[Room, DropRoom] = field(default_factory=lambda: Latest(MAX_UNTOLD))
    """What it is to be told of rooms that failed while it was lost."""

    @property
    def address(self) -> str:
        return self.link.addresses[self.source]

    def __str__(self) -> str:
        return f"rank {self.source} of prefill ({self.address})"


@dataclass(eq=False, slots=True)
class Link:
    """All ranks of one prefill, by endpoint address. `plan` is there once all have answered. `lost`
    says why a rank is not there (any more); it is dialled until it answers. `refusal` is final.
    """

    addresses: tuple[str, ...]
    _: KW_ONLY
    ranks: list[PrefillRank] = field(init=False)
    plan: TransferPlan | None = None
    plan_seconds: float = 0.0
    asks: Mapping[int, int] = field(default_factory=dict)
    """Ranks that are asked for each room, each with how many decode ranks ask it; with `plan`."""
    unconnected: set[int] = field(default_factory=set)
    """Ranks to which the engine has still to be connected."""
    layers: dict[int, LayersByOwner] = field(default_factory=dict)
    """By rank that is asked, the layers of each owner, as far as decode knows; with `plan`."""
    lost: str | None = None
    refusal: str | None = None
    error: IncompatibleLayouts | None = None

    def __post_init__(self) -> None:
        self.ranks = [PrefillRank(link=self, source=n) for n in range(len(self.addresses))]

    @property
    def hellos(self) -> list[Hello | None]:
        """What each rank has said of itself, None of one that has not answered."""
        return [rank.hello for rank in self.ranks]

    @property
    def settled(self) -> bool:
        """Whether the handshake has ended, either way."""
        return self.refusal is not None or (self.plan is not None and not self.unconnected)

    @property
    def state(self) -> str:
        """One of LINK_STATES: a lost link is dialled again, a refused one never."""
        if self.refusal is not None:
            return "refused"
        if self.lost is not None:
            return "lost"
        return "open" if self.settled else "connecting"

    def names(self, sources: Iterable[int]) -> str:
        """Several ranks, as sentences name them."""
        return ", ".join(str(self.ranks[source]) for source in sources)


class Read(Struct, frozen=True, eq=False, kw_only=True):
    """A chunk to be read from a rank of prefill: positions `tokens`, of `layers` or of all. The
    request lies at `source_address` there and at `dest_address` here; `count` says whether the
    latter knows how many tokens it has. `hello` is that rank's, `plan` what was planned with it,
    `ready` when the chunk was, by the endpoint's clock.
    """

    room: Room
    attempt: str
    rank: PrefillRank
    hello: Hello
    plan: TransferPlan
    tokens: range
    layers: LayerRange | None
    source_address: RequestAddress
    dest_address: RequestAddress
    count: Count
    ready: float
    arrived: ArrivedDigests | None = None
    """Takes the digests of what arrives and is not kept."""

    def bound_runs(self) -> CopyBatch:
        """Its runs. Raises as TransferPlan.bind; block tables were checked where they came in."""
        return self.plan.bind(
            self.rank.source,
            self.source_address,
            self.dest_address,
            tokens=self.tokens,
            layers=self.layers.layers if self.layers else None,
            owner=self.layers.owner if self.layers else "",
            count=self.count,
            checked=True,
        )

    def moves(self, owner: str, layer: int) -> bool:
        """Whether it is of that layer."""
        some = self.layers
        return some is None or (some.owner == owner and layer in some.layers)
