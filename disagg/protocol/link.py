"""What decode knows of a prefill."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from disagg.plan import IncompatibleLayouts, TransferPlan
from disagg.protocol.messages import DropRoom, Hello, Room
from kvpool.layout import PoolLayout
from kvpool.layout.grid import Ints


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
    """By rank; without the layout's bytes once it was read."""
    layouts: list[PoolLayout | None] = field(default_factory=list)
    pinged: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    """Seconds before each rank is dialled again that refuses this decode for now."""
    redials: list[float | None] = field(default_factory=list)
    """When that will be; the rank is not connected until then."""
    untold: list[OrderedDict[Room, DropRoom]] = field(default_factory=list)
    """By rank, what it is to be told of rooms that failed while it was lost."""
    plan: TransferPlan | None = None
    plan_seconds: float = 0.0
    asks: Mapping[int, int] = field(default_factory=dict)
    """Ranks that are asked for each room, each with how many decode ranks ask it; with `plan`."""
    unconnected: set[int] = field(default_factory=set)
    """Ranks to which the engine has still to be connected."""
    held: dict[int, dict[str, Ints]] = field(default_factory=dict)
    """By rank that is asked, the layers of each owner, as far as decode knows; with `plan`."""
    lost: str | None = None
    refusal: str | None = None
    error: IncompatibleLayouts | None = None

    def __post_init__(self) -> None:
        self.hellos = [None] * len(self.addresses)
        self.layouts = [None] * len(self.addresses)
        self.pinged = [0.0] * len(self.addresses)
        self.pauses = [0.0] * len(self.addresses)
        self.redials = [None] * len(self.addresses)
        self.untold = [OrderedDict() for _ in self.addresses]

    @property
    def settled(self) -> bool:
        """Whether the handshake has ended, either way."""
        ready = self.plan is not None and not self.unconnected
        return ready or self.refusal is not None

    def name(self, source: int) -> str:
        """A rank, as sentences name it."""
        return f"rank {source} of prefill ({self.addresses[source]})"

    def names(self, sources: Iterable[int]) -> str:
        """Several ranks."""
        return ", ".join(self.name(source) for source in sources)
