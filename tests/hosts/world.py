"""The processes of `tests.faults` on hosts: the same scheduler, oracle and checks, over links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from disagg.engines.base import create_engine
from kvpool.allocation.allocator import Request
from tests import pools
from tests.faults.child import FaultyChild, main
from tests.faults.orders import Course, Order, Setup, Shape
from tests.faults.stock import MOST_TOKENS, Stock, wrong
from tests.faults.world import Peer, Room, World
from tests.hosts.namespaces import inside
from tests.hosts.network import Host, Network

PORT = 29100
PART_BYTES = 128 << 10
"""Most bytes of one part of a read: a room has some thirty."""
wide = pools.mha.but(packing="f32", head_dim=256, v_head_dim=256, page_size=8, num_pages=100)
WHOLE = Course(tokens=MOST_TOKENS - 1, salt=7)
"""A request of the most bytes: 8 MiB of `wide`, 257 of `large`."""
LAYERS = 129
large = wide.but(layers=range(LAYERS), total_kv_layers=LAYERS, num_pages=40)
"""A pool of 324 MiB."""


class LargeChild(FaultyChild):
    """One whose checks on the endpoint's thread are short, however large a request is."""

    def filled(self, setup: Setup) -> Stock:
        # values of another salt take seconds, and as much memory as a request
        return super().filled(replace(setup, salts=setup.salts[:1]))

    def take(self, order: Order) -> Request | None:
        """Pages for an order, whose values are then known before its bytes are on their way."""
        request = super().take(order)
        if request is not None:
            course = order.course
            wrong(self.stock.pool, request.address(), range(course.tokens), course.salt)
        return request


class HostWorld(World):
    """Two prefills and two decodes, each on a host of its own: p0, p1, d0, d1 on hosts 0 to 3,
    unless `places` says otherwise. Messages have TLS.
    """

    def __init__(
        self,
        network: Network,
        engine: str,
        *,
        places: Mapping[str, int] | None = None,
        pool: Any = wide,
        offer_timeout: float = 300.0,
        **limits: Any,
    ) -> None:
        self.network, self._offer_timeout = network, offer_timeout
        self._places = places or {"p0": 0, "p1": 1, "d0": 2, "d1": 3}
        engines = {}
        if engine == "mooncake":
            names = {name: self.address(name) for name in self._places}
            engines = {n: partial(create_engine, engine, hostname=a) for n, a in names.items()}
        shape = Shape(
            name=f"{engine} on hosts",
            engine=engine,
            prefill=(pool, pool),
            decode=(pool, pool),
            environment={} if network.ipv4 else {"MC_USE_IPV6": "1"},
            keys=True,
        )
        child = LargeChild if pool is large else FaultyChild
        super().__init__(shape, engines=engines, child=child, folder=network.folder, **limits)

    def host(self, name: str) -> Host:
        """Where a process runs."""
        return self.network.hosts[self._places[name]]

    def address(self, name: str) -> str:
        """Its host's IPv4 address, or IPv6 where it has no other."""
        host = self.host(name)
        return host.ipv4 if self.network.ipv4 else f"[{host.ipv6}]"

    def bind(self, name: str) -> str:
        return f"tcp://{self.address(name)}:{PORT + int(name[1])}"

    def setup(self, name: str) -> Setup:
        setup = super().setup(name)
        if setup.bind is None:
            setup.options["offer_timeout"] = self._offer_timeout
        return replace(setup, max_bytes=PART_BYTES)

    def started(self, name: str, *arguments: Any) -> Peer:
        return Peer(inside, self.host(name).namespaces.pid, main, *arguments)

    def midway(self, prefill: str, decode: str, course: Course = WHOLE, parts: int = 8) -> Room:
        """A room whose bytes are on their way: decode has asked for its `parts`-th part."""
        self.tripped = None
        self.tell(decode, "trip_order", "read", parts, "audit")
        room = self.order(prefill, [decode], course)
        assert self.until(lambda: self.tripped is not None, 60), f"no byte moves: {room}"
        assert not room.ended, f"it has ended already: {room}"
        return room
