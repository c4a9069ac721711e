"""A chunk that decode is to read from one rank."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.plan import TransferPlan
from disagg.plan.bind import CopyBatch, Count
from disagg.plan.columns import Columns
from disagg.protocol.link import Link
from disagg.protocol.messages import Hello, Room
from disagg.protocol.metrics import RoomMetrics
from disagg.protocol.rooms.offered import LayerRange
from kvpool.layout import RequestAddress


@dataclass(eq=False, slots=True, kw_only=True)
class Read:
    """A chunk to be read from rank `source` of a link: positions `tokens`, of `layers` or of all.
    The request lies at `source_address` there and at `dest_address` here; `count` says whether
    the latter knows how many tokens it has.

    `hello` is that rank's, `plan` what was planned with it. `metrics` are the room's. `ready` and
    `begun` are by the endpoint's clock, in seconds: when the chunk was ready, and when the read had
    its turn.
    """

    room: Room
    attempt: str
    link: Link
    source: int
    hello: Hello
    plan: TransferPlan
    tokens: range
    layers: LayerRange | None
    source_address: RequestAddress
    dest_address: RequestAddress
    metrics: RoomMetrics
    count: Count
    ready: float
    begun: float | None = None
    cancelled: bool = False

    def bind(self, columns: Columns) -> CopyBatch:
        """Its runs, in `columns`. Raises as TransferPlan.bind."""
        some, tables = self.layers, (self.source_address, self.dest_address)
        layers, owner = (some.layers, some.owner) if some else (None, "")
        return self.plan.bind(
            self.source,
            *tables,
            tokens=self.tokens,
            layers=layers,
            owner=owner,
            count=self.count,
            columns=columns,
        )

    def moves(self, owner: str, layer: int) -> bool:
        """Whether it is of that layer."""
        some = self.layers
        return some is None or (some.owner == owner and layer in some.layers)
