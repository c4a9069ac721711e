"""Serves metrics of endpoints, allocators and stores to Prometheus, which are read when it asks.

with export({"prefill": prefill, "decode": decode}, 9400, allocators={"kv": allocator}) as server:
    ...                             # http://127.0.0.1:9400/metrics
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol
from wsgiref.simple_server import WSGIServer

from disagg.log import log
from disagg.protocol.metrics import Histogram, Snapshot
from disagg.series import ALLOCATOR, ENDPOINT, PREFIX, STORE, UP, Series, StateT
from kvpool.extras import needed_by

if TYPE_CHECKING:
    from prometheus_client import Metric

    from disagg.store.stats import StoreStats
    from kvpool.allocation.usage import Usage

__all__ = ["Observed", "Server", "export"]


class Observed(Protocol):
    """An endpoint."""

    def snapshot(self) -> Snapshot:
        """Its metrics now; called from any thread."""


class Allocating(Protocol):
    """An allocator of items."""

    def usage(self) -> Usage:
        """Its numbers now; called from any thread."""


class Storing(Protocol):
    """A store."""

    def stats(self) -> StoreStats:
        """Its counts now; called from any thread."""


class Server(AbstractContextManager["Server"]):
    """Serves metrics at `addr`, `port` until it is closed."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread
        self.addr, self.port = str(server.server_address[0]), server.server_port

    def close(self) -> None:
        """Stops serving; does not close the endpoints."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.close()


def export(
    endpoints: Mapping[str, Observed],
    port: int = 0,
    addr: str = "127.0.0.1",
    *,
    allocators: Mapping[str, Allocating] | None = None,
    stores: Mapping[str, Storing] | None = None,
) -> Server:
    """Serves the metrics of endpoints, of `allocators` and of `stores`, labelled by name; `port` 0
    is any free port.

    The mappings may change later. Raises MissingExtra without the package prometheus-client,
    ValueError if the address cannot be used.
    """
    with needed_by("the exporter"):
        from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    collector = _Collector(
        endpoints=endpoints,
        allocators={} if allocators is None else allocators,
        stores={} if stores is None else stores,
    )
    registry.register(collector)
    try:
        server, thread = start_http_server(port, addr, registry)
        return Server(server, thread)
    except (OSError, OverflowError) as error:
        raise ValueError(f"export at {addr}, port {port}: {error}.") from None


@dataclass(eq=False)
class _Collector:
    endpoints: Mapping[str, Observed]
    allocators: Mapping[str, Allocating]
    stores: Mapping[str, Storing]

    def collect(self) -> Iterator[Metric]:
        """All families: of each endpoint that answers, of each allocator and its prefix cache, of
        each store.
        """
        endpoints, snapshots = dict(self.endpoints), dict[str, Snapshot]()
        for name, endpoint in endpoints.items():
            try:
                snapshots[name] = endpoint.snapshot()
            except Exception as error:  # one endpoint must not hide the others
                log.warning("endpoint %r has no metrics: %s", name, error)
        usages = {name: source.usage() for name, source in list(self.allocators.items())}
        caches = {name: usage.prefix for name, usage in usages.items() if usage.prefix is not None}
        outcomes = {name: store.stats() for name, store in list(self.stores.items())}
        up = {name: name in snapshots for name in endpoints}
        yield from _families("endpoint", up, [UP])
        yield from _families("endpoint", snapshots, ENDPOINT)
        yield from _families("allocator", usages, ALLOCATOR)
        yield from _families("allocator", caches, PREFIX)
        yield from _families("store", outcomes, STORE)


def _families(
    label: str, states: Mapping[str, StateT], table: Iterable[Series[StateT]]
) -> Iterator[Metric]:
    """Families with samples of every state, labelled by its name."""
    from prometheus_client import core

    kinds: dict[str, Any] = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    for series in table:
        labels = [label, *series.labels.split()]
        family = kinds[series.kind](series.name.removesuffix("_total"), series.help, labels=labels)
        for name, state in states.items():
            for values, number in series.samples(state).items():
                if isinstance(number, Histogram):
                    buckets = zip([*map(str, series.buckets), "+Inf"], accumulate(number.counts))
                    family.add_metric([name, *values], [*buckets], number.total)
                else:
                    family.add_metric([name, *values], number)
        yield family
