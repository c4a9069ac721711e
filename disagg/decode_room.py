"""What decode knows of a prefill, of a request that it wants, and of a chunk to be read."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.plan import IncompatibleLayouts, TransferPlan
from disagg.room import Failure
from disagg.wire import Aux, Hello, Room
from kvpool.layout import RequestAddress


@dataclass(eq=False, slots=True)
class Link:
    """One prefill: all its ranks, from the hello on. `plan` is there once all have answered."""

    addresses: tuple[str, ...]
    first: int
    """Number of its rank 0 among all ranks that this decode talks to."""
    hellos: list[Hello | None]
    plan: TransferPlan | None = None
    refusal: str | None = None
    error: IncompatibleLayouts | None = None

    @property
    def settled(self) -> bool:
        """Whether the hello has ended, either way."""
        return self.plan is not None or self.refusal is not None


@dataclass(eq=False, slots=True)
class Read:
    """A chunk to be read from rank `source` of a link: positions `tokens`, the source's address."""

    room: Room
    link: Link
    source: int
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
    offered: list[int] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)
    reading: int = 0
    asked: bool = False
    announced: bool = False
    released: set[int] = field(default_factory=set)
    aux: Aux = field(default_factory=dict)
    failure: Failure | None = None

    @property
    def complete(self) -> bool:
        """Whether every rank has released its pages."""
        return self.announced and len(self.released) == len(self.offered)
