"""Serves the metrics of endpoints to Prometheus; they are read when Prometheus asks.

with export({"prefill": prefill, "decode": decode}, 9400, allocators={"kv": allocator}) as server:
    ...                             # http://127.0.0.1:9400/metrics
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from wsgiref.simple_server import WSGIServer

from disagg.protocol.metrics import Snapshot
from kvpool.extras import needed_by

if TYPE_CHECKING:
    from prometheus_client import Metric

    from kvpool.allocation.allocator import Usage
    from kvpool.allocation.prefix_cache import PrefixStats

log = logging.getLogger("disagg")

Sample = tuple[tuple[str, ...], float]
"""Values of the labels after the first, and a number."""
StateT = TypeVar("StateT")
Family = tuple[str, str, tuple[str, ...], Callable[[StateT], Iterable[Sample]]]
"""Name, meaning, labels after the first, and the samples of a state."""


class Observed(Protocol):
    """An endpoint."""

    def snapshot(self) -> Snapshot:
        """Its metrics now; called from any thread."""


class Allocating(Protocol):
    """An allocator of items."""

    def usage(self) -> Usage:
        """Its numbers now; called from any thread."""


class Server:
    """Serves metrics at `addr`, `port` until it is closed."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread
        self.addr, self.port = str(server.server_address[0]), server.server_port

    def close(self) -> None:
        """Stops serving; does not close the endpoints."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def export(
    endpoints: Mapping[str, Observed],
    port: int = 0,
    addr: str = "127.0.0.1",
    *,
    allocators: Mapping[str, Allocating] | None = None,
) -> Server:
    """Serves the metrics of endpoints, and of `allocators`, labelled by name; `port` 0 is any free
    port.

    The mappings may change later. Raises MissingExtra without the package prometheus-client,
    ValueError if the address cannot be used.
    """
    with needed_by("the exporter"):
        from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(_Collector(endpoints, {} if allocators is None else allocators))
    try:
        server, thread = start_http_server(port, addr, registry)
        return Server(server, thread)
    except (OSError, OverflowError) as error:
        raise ValueError(f"export at {addr}, port {port}: {error}.") from None


class _Collector:
    def __init__(
        self, endpoints: Mapping[str, Observed], allocators: Mapping[str, Allocating]
    ) -> None:
        self._endpoints, self._allocators = endpoints, allocators

    def collect(self) -> Iterator[Metric]:
        """All metric families: of every endpoint that answers, of every allocator, and of its
        prefix cache.
        """
        from prometheus_client.core import GaugeMetricFamily

        up = GaugeMetricFamily("kvpool_up", "Whether the endpoint answers.", labels=["endpoint"])
        snapshots: dict[str, Snapshot] = {}
        for name, endpoint in list(self._endpoints.items()):
            try:
                snapshots[name] = endpoint.snapshot()
            except Exception as error:  # one endpoint must not hide the others
                log.warning("endpoint %r has no metrics: %s", name, error)
            up.add_metric([name], float(name in snapshots))
        usages = {name: source.usage() for name, source in list(self._allocators.items())}
        caches = {name: usage.prefix for name, usage in usages.items() if usage.prefix is not None}
        yield up
        yield from _families("endpoint", snapshots, COUNTERS, GAUGES)
        yield from _families("allocator", usages, (), ALLOCATOR_GAUGES)
        yield from _families("allocator", caches, PREFIX_COUNTERS, PREFIX_GAUGES)


def _families(
    label: str,
    states: Mapping[str, StateT],
    counters: Iterable[Family[StateT]],
    gauges: Iterable[Family[StateT]],
) -> Iterator[Metric]:
    """Families with samples of every state, labelled by its name."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for kind, rows in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
        for metric, meaning, labels, samples in rows:
            family: Any = kind(metric, meaning, labels=[label, *labels])
            for name, state in states.items():
                for values, number in samples(state):
                    family.add_metric([name, *values], number)
            yield family


def _items(numbers: Mapping[str, float]) -> Iterable[Sample]:
    return [((name,), number) for name, number in numbers.items()]


ALLOCATOR_GAUGES: tuple[Family[Usage], ...] = (
    ("kvpool_free_items", "Items that no request holds.", ("ids",), lambda u: _items(u.free)),
    ("kvpool_used_items", "Items that requests hold.", ("ids",), lambda u: _items(u.used)),
    ("kvpool_requests", "Live requests.", (), lambda u: [((), u.requests)]),
)
PREFIX_GAUGES: tuple[Family[PrefixStats], ...] = (
    ("kvpool_kept_items", "Items of prefixes.", ("ids",), lambda s: _items(s.kept)),
)
PREFIX_COUNTERS: tuple[Family[PrefixStats], ...] = (
    (
        "kvpool_prefix_lookups",
        "Requests that began with tokens.",
        ("outcome",),
        lambda s: _items({"hit": s.hits, "miss": s.lookups - s.hits}),
    ),
    (
        "kvpool_prefix_tokens",
        "Tokens with which requests began, and those of them that were there.",
        ("tokens",),
        lambda s: _items({"asked": s.asked_tokens, "found": s.found_tokens}),
    ),
    (
        "kvpool_prefix_items",
        "Items that became a prefix's, and were taken again.",
        ("change",),
        lambda s: _items({"stored": s.stored, "removed": s.removed}),
    ),
)
COUNTERS: tuple[Family[Snapshot], ...] = (
    ("kvpool_rooms", "Rooms that have ended.", ("outcome",), lambda s: _items(s.totals.rooms)),
    (
        "kvpool_failures",
        "Rooms that have failed, by side and kind of failure.",
        ("side", "kind"),
        lambda s: s.totals.failures.items(),
    ),
    ("kvpool_chunks", "Chunks bound, per source rank.", (), lambda s: [((), s.totals.chunks)]),
    ("kvpool_moved_bytes", "Bytes that have arrived.", (), lambda s: [((), s.totals.bytes_moved)]),
    (
        "kvpool_bound_bytes",
        "Bytes bound, by roles that share runs.",
        ("owner", "roles"),
        lambda s: [(roles, runs.nbytes) for roles, runs in s.totals.by_role.items()],
    ),
    (
        "kvpool_runs",
        "Runs bound, by roles that share them.",
        ("owner", "roles"),
        lambda s: [(roles, runs.runs) for roles, runs in s.totals.by_role.items()],
    ),
    (
        "kvpool_phase_seconds",
        "Seconds of rooms that have ended, by phase; total is from read request to end.",
        ("phase",),
        lambda s: _items(s.totals.seconds),
    ),
    ("kvpool_plans", "Plans asked for.", ("cache",), lambda s: _items(s.plans)),
)
GAUGES: tuple[Family[Snapshot], ...] = (
    ("kvpool_open_rooms", "Rooms that have not ended.", (), lambda s: [((), s.open_rooms)]),
    ("kvpool_alive_peers", "Peers that answer.", (), lambda s: [((), s.peers)]),
    ("kvpool_leased_items", "Items of open rooms.", ("space",), lambda s: _items(s.leases.leased)),
    (
        "kvpool_quarantined_items",
        "Items of ended rooms that may still be written.",
        ("space",),
        lambda s: _items(s.leases.quarantined),
    ),
    (
        "kvpool_engine",
        "The engine's own counters, in its units.",
        ("engine", "counter"),
        lambda s: [((s.engine, name), number) for name, number in s.telemetry.items()],
    ),
)
