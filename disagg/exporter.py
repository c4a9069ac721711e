"""Serves metrics of endpoints, allocators and stores to Prometheus, which are read when it asks.

with export({"prefill": prefill, "decode": decode}, 9400, allocators={"kv": allocator}) as server:
    ...                             # http://127.0.0.1:9400/metrics
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from wsgiref.simple_server import WSGIServer

from disagg.log import log
from disagg.protocol.metrics import Snapshot
from kvpool.extras import needed_by

if TYPE_CHECKING:
    from prometheus_client import Metric

    from disagg.store.stats import StoreStats
    from kvpool.allocation.allocator import Usage
    from kvpool.allocation.prefix_cache import PrefixStats

__all__ = ["Observed", "Server", "export"]

StateT = TypeVar("StateT")
Numbers = float | Mapping[Any, float]
"""A number, or numbers by the value of a label, or by the values of several."""
Series = tuple[str, str, Callable[[StateT], Numbers], str]
"""Name (`_total`: of a counter), labels after the first, the numbers of a state, their meaning."""


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
        up = {name: float(name in snapshots) for name in endpoints}
        yield from _families("endpoint", up, UP)
        yield from _families("endpoint", snapshots, ENDPOINT)
        yield from _families("allocator", usages, ALLOCATOR)
        yield from _families("allocator", caches, PREFIX)
        yield from _families("store", outcomes, STORE)


def _families(
    label: str, states: Mapping[str, StateT], table: Iterable[Series[StateT]]
) -> Iterator[Metric]:
    """Families with samples of every state, labelled by its name."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for metric, labels, numbers_of, meaning in table:
        kind = CounterMetricFamily if metric.endswith("_total") else GaugeMetricFamily
        family: Any = kind(metric.removesuffix("_total"), meaning, labels=[label, *labels.split()])
        for name, state in states.items():
            numbers = numbers_of(state)
            parts = numbers.items() if isinstance(numbers, Mapping) else [((), numbers)]
            for values, number in parts:
                values = (values,) if isinstance(values, str) else values
                family.add_metric([name, *values], number)
        yield family


def _by_roles(snapshot: Snapshot, number: str) -> Numbers:
    return {roles: getattr(runs, number) for roles, runs in snapshot.totals.by_role.items()}


UP: tuple[Series[float], ...] = (("kvpool_up", "", float, "Whether the endpoint answers."),)
ALLOCATOR: tuple[Series[Usage], ...] = (
    ("kvpool_free_items", "ids", lambda u: u.free, "Items that no request holds."),
    ("kvpool_used_items", "ids", lambda u: u.used, "Items that requests hold."),
    ("kvpool_requests", "", lambda u: u.requests, "Live requests."),
)
PREFIX: tuple[Series[PrefixStats], ...] = (
    ("kvpool_kept_items", "ids", lambda s: s.kept, "Items of prefixes."),
    ("kvpool_prefix_lookups_total", "outcome",
     lambda s: {"hit": s.hits, "miss": s.lookups - s.hits}, "Requests that began with tokens."),
    ("kvpool_prefix_tokens_total", "tokens",
     lambda s: {"asked": s.asked_tokens, "found": s.found_tokens},
     "Tokens with which requests began, and those of them that were there."),
    ("kvpool_prefix_items_total", "change", lambda s: {"stored": s.stored, "removed": s.removed},
     "Items that became a prefix's, and were taken again."),
)  # fmt: skip
STORE: tuple[Series[StoreStats], ...] = (
    ("kvpool_store_outcomes_total", "outcome", lambda s: s.counts,
     "Lookups, reads and objects to write, by what has become of them."),
    ("kvpool_store_tokens_total", "outcome", lambda s: s.tokens, "Their tokens."),
    ("kvpool_store_bytes_total", "outcome", lambda s: s.nbytes, "Their bytes."),
    ("kvpool_store_queued_bytes", "", lambda s: s.queued_bytes,
     "Bytes that are copied and not written yet."),
)  # fmt: skip
ENDPOINT: tuple[Series[Snapshot], ...] = (
    ("kvpool_rooms_total", "outcome", lambda s: s.totals.rooms, "Rooms that have ended."),
    ("kvpool_failures_total", "side kind", lambda s: s.totals.failures, "Rooms that failed."),
    ("kvpool_chunks_total", "", lambda s: s.totals.chunks, "Chunks bound, per source rank."),
    ("kvpool_moved_bytes_total", "", lambda s: s.totals.bytes_moved, "Bytes that have arrived."),
    ("kvpool_bound_bytes_total", "owner roles", lambda s: _by_roles(s, "nbytes"), "Bytes bound."),
    ("kvpool_runs_total", "owner roles", lambda s: _by_roles(s, "runs"), "Runs bound."),
    ("kvpool_phase_seconds_total", "phase", lambda s: s.totals.seconds, "Time of ended rooms."),
    ("kvpool_plans_total", "cache", lambda s: s.plans, "Plans asked for."),
    ("kvpool_open_rooms", "", lambda s: s.open_rooms, "Rooms that have not ended."),
    ("kvpool_alive_peers", "", lambda s: s.peers, "Peers that answer."),
    ("kvpool_leased_items", "space", lambda s: s.leases.leased, "Items of open rooms."),
    ("kvpool_quarantined_items", "space", lambda s: s.leases.quarantined,
     "Items of ended rooms that may still be written."),
    ("kvpool_engine", "engine counter",
     lambda s: {(s.engine, name): number for name, number in s.telemetry.items()},
     "The engine's own counters, in its units."),
)  # fmt: skip
