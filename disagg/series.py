"""Every series that kvpool gives to Prometheus, from one table: the exporter serves them, and the
connectors give those of endpoints and stores to their engine's own /metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from disagg.protocol.metrics import BOUNDS, Histogram, Snapshot

if TYPE_CHECKING:
    from disagg.store.stats import StoreStats
    from kvpool.allocation.prefix_cache import PrefixStats
    from kvpool.allocation.usage import Usage

StateT = TypeVar("StateT")
Number = float | Histogram
Numbers = Number | Mapping[Any, Number]
"""A number, or numbers by the value of a label, or by the values of several."""


@dataclass(frozen=True, slots=True)
class Series(Generic[StateT]):
    """`labels`, separated by spaces, come after the one that names the source (`SOURCES`); the
    name says the kind. `numbers` of a state.
    """

    name: str
    labels: str
    numbers: Callable[[StateT], Numbers]
    help: str

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        if self.name.endswith("_seconds"):
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def buckets(self) -> tuple[float, ...]:
        """Upper bounds of a histogram's."""
        return BOUNDS

    def samples(self, state: StateT) -> dict[tuple[str, ...], Number]:
        """Its numbers by the values of its labels."""
        numbers = self.numbers(state)
        if not isinstance(numbers, Mapping):
            return {(): numbers}
        return {
            (values,) if isinstance(values, str) else values: number
            for values, number in numbers.items()
        }


def _by_roles(snapshot: Snapshot, number: str) -> Numbers:
    return {roles: getattr(runs, number) for roles, runs in snapshot.totals.by_role.items()}


UP: Series[bool] = Series("kvpool_up", "", float, "Whether the endpoint answers.")
ENDPOINT: tuple[Series[Snapshot], ...] = (
    Series("kvpool_rooms_total", "outcome", lambda s: s.totals.rooms, "Rooms that have ended."),
    Series("kvpool_failures_total", "side kind", lambda s: s.totals.failures,
           "Rooms that failed, by the side that ended them and why."),
    Series("kvpool_phase_seconds", "phase", lambda s: s.totals.phases,
           "Time of rooms that succeeded, by phase."),
    Series("kvpool_chunks_total", "", lambda s: s.totals.chunks, "Chunks bound, per source rank."),
    Series("kvpool_moved_bytes_total", "", lambda s: s.totals.bytes_moved,
           "Bytes that have arrived, of ended rooms."),
    Series("kvpool_bound_bytes_total", "owner roles", lambda s: _by_roles(s, "nbytes"),
           "Bytes bound."),
    Series("kvpool_runs_total", "owner roles", lambda s: _by_roles(s, "runs"), "Runs bound."),
    Series("kvpool_plans_total", "cache", lambda s: s.plans, "Plans asked for."),
    Series("kvpool_plan_seconds_total", "", lambda s: s.plan_seconds, "Time that plans took."),
    Series("kvpool_refusals_total", "side kind", lambda s: s.refusals,
           "Peers refused, by the side that refused and why."),
    Series("kvpool_lost_peers_total", "", lambda s: s.losses,
           "Peers that were there and were silent, or gone."),
    Series("kvpool_open_rooms", "", lambda s: s.open_rooms, "Rooms that have not ended."),
    Series("kvpool_draining", "", lambda s: s.draining, "Endpoints that take no new rooms."),
    Series("kvpool_alive_peers", "", lambda s: s.peers, "Peers that answer."),
    Series("kvpool_links", "state", lambda s: s.links, "Decode's links to prefills."),
    Series("kvpool_leased_items", "space", lambda s: s.leases.leased, "Items of open rooms."),
    Series("kvpool_quarantined_items", "space", lambda s: s.leases.quarantined,
           "Items of ended rooms that may still be written."),
    Series("kvpool_quarantined_rooms", "", lambda s: s.quarantined_rooms, "Those rooms."),
    Series("kvpool_engine", "transfer_engine counter",
           lambda s: {(s.engine, name): number for name, number in s.telemetry.items()},
           "The transfer engine's own counters, in its units."),
)  # fmt: skip
ALLOCATOR: tuple[Series[Usage], ...] = (
    Series("kvpool_free_items", "ids", lambda u: u.free, "Items that no request holds."),
    Series("kvpool_used_items", "ids", lambda u: u.used, "Items that requests hold."),
    Series("kvpool_requests", "", lambda u: u.requests, "Live requests."),
)
PREFIX: tuple[Series[PrefixStats], ...] = (
    Series("kvpool_kept_items", "ids", lambda s: s.kept, "Items of prefixes."),
    Series("kvpool_prefix_lookups_total", "outcome",
           lambda s: {"hit": s.hits, "miss": s.lookups - s.hits},
           "Requests that began with tokens."),
    Series("kvpool_prefix_tokens_total", "tokens",
           lambda s: {"asked": s.asked_tokens, "found": s.found_tokens},
           "Tokens with which requests began, and those of them that were there."),
    Series("kvpool_prefix_items_total", "change",
           lambda s: {"stored": s.stored, "removed": s.removed},
           "Items that became a prefix's, and were taken again."),
)  # fmt: skip
STORE: tuple[Series[StoreStats], ...] = (
    Series("kvpool_store_outcomes_total", "outcome", lambda s: s.counts,
           "Lookups, reads and objects to write, by what has become of them."),
    Series("kvpool_store_tokens_total", "outcome", lambda s: s.tokens, "Their tokens."),
    Series("kvpool_store_bytes_total", "outcome", lambda s: s.nbytes, "Their bytes."),
    Series("kvpool_store_queued_bytes", "", lambda s: s.queued_bytes,
           "Bytes that are copied and not written yet."),
)  # fmt: skip

SOURCES: Mapping[str, tuple[Series[Any], ...]] = {
    "endpoint": (UP, *ENDPOINT),
    "allocator": (*ALLOCATOR, *PREFIX),
    "store": STORE,
}
"""All series, by the label that names what they are of."""
