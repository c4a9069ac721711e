"""A chunk that decode is to read from one rank."""

from __future__ import annotations

from msgspec import Struct

from disagg.plan import TransferPlan
from disagg.plan.bind import CopyBatch, Count
from disagg.protocol.messages import Hello, Room
from disagg.protocol.peers.link import Link
from disagg.protocol.rooms.offered import LayerRange
from kvpool.layout import RequestAddress


class Read(Struct, frozen=True, eq=False, kw_only=True):
    """A chunk to be read from rank `source` of a link: positions `tokens`, of `layers` or of all.
    The request lies at `source_address` there and at `dest_address` here; `count` says whether
    the latter knows how many tokens it has.

    `hello` is that rank's, `plan` what was planned with it. `ready` is when the chunk was ready, by
    the endpoint's clock.
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
    count: Count
    ready: float

    def bind(self) -> CopyBatch:
        """Its runs. Raises as TransferPlan.bind; block tables were checked where they came in."""
        return self.plan.bind(
            self.source,
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
