"""What an operator is told of rooms, links and stores: numbers of ranks, as their engine's
Prometheus client has them. The oracle is the exporter, which reads the same states.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from types import SimpleNamespace
from urllib.request import urlopen

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from disagg.connectors.rank import stats
from disagg.connectors.rank.instruments import Instruments, prometheus_classes
from disagg.connectors.rank.publisher import Publisher
from disagg.connectors.rank.stats import Stats, summary, total
from disagg.exporter import export
from disagg.protocol.metrics import RoleMetrics, RoomMetrics, Snapshot, Totals
from disagg.protocol.peers.liveness import Leases
from disagg.protocol.status import Failure
from disagg.series import SOURCES
from disagg.store.stats import Outcomes
from tests.processes import until

LEASE = Failure("prefill", "its lease ended", "lease")
ROOM = RoomMetrics(
    chunks=2,
    bytes_moved=3_000_000,
    wire_seconds=0.5,
    total_seconds=0.75,
    by_role={("target", "k, v"): RoleMetrics(4, 3_000_000)},
)


class Side:
    """An endpoint of which rooms end when they are told to."""

    def __init__(self, **numbers):
        self.totals, self.numbers = Totals(), numbers

    def snapshot(self):
        leases = Leases({"kv": 3}, {})
        first = {"open_rooms": 1, "peers": 2, "leases": leases, "engine": "nixl", "telemetry": {}}
        return Snapshot(totals=self.totals.copy(), **first | self.numbers)

    def end(self, rank, metrics, failure=None):
        self.totals.count_ended(metrics, failure)
        rank.received(metrics, failure)


@dataclass
class Client:
    """A Prometheus client of an engine, with a registry of its own."""

    def __post_init__(self):
        self.registry = CollectorRegistry()
        self.instruments = Instruments(
            ["model_name"],
            {name: self._into(kind) for name, kind in prometheus_classes().items()},
            mode="livesum",
        )

    def _into(self, kind):
        return lambda **fields: kind(**fields, registry=self.registry)

    def observe(self, numbers):
        self.instruments.observe(json.loads(json.dumps(numbers)), ["llama"])

    def samples(self):
        """By name and labels without the engine's, without the times at which series began."""
        return {
            (sample.name, *sorted(sample.labels.items() - {("model_name", "llama")})): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        }


def exported(server):
    """What the exporter serves, without what it alone has."""
    with urlopen(f"http://{server.addr}:{server.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name != "kvpool_up"
    }


def test_an_engines_client_has_what_the_exporter_has():
    prefill, decode, client = Side(losses=2), Side(links={"open": 1, "lost": 0}), Client()
    rank = Stats()
    rank.watch_endpoint("prefill", prefill.snapshot)
    rank.watch_endpoint("decode", decode.snapshot)
    both = {"prefill": prefill, "decode": decode}
    changed = {"links": {"open": 0, "lost": 1}, "refusals": {("decode", "full"): 1}}
    with export(both) as server:
        for change in (
            lambda: None,
            lambda: decode.end(rank, ROOM),
            lambda: decode.end(rank, replace(ROOM, bytes_moved=7), LEASE),
            lambda: decode.numbers.update(changed),
            lambda: prefill.totals.failures.update([("prefill", "lease")]),
        ):
            change()
            rank.changed()
            client.observe(rank.take())
            assert client.samples() == exported(server)


def test_a_gauge_that_is_not_there_any_more_is_0():
    side, client, rank = Side(), Client(), Stats()
    rank.watch_endpoint("prefill", side.snapshot)
    client.observe(rank.take())
    key = "kvpool_leased_items", ("endpoint", "prefill"), ("space", "kv")
    assert client.samples()[key] == 3
    side.numbers["leases"] = Leases()
    rank.changed()
    client.observe(rank.take())
    assert client.samples()[key] == 0


def test_counters_and_gauges_of_ranks_add_up_also_where_they_are_told_apart():
    client, sides = Client(), [Side(open_rooms=1), Side(open_rooms=5)]
    ranks = [Stats(number) for number in range(2)]
    for rank, side in zip(ranks, sides):
        rank.watch_endpoint("decode", side.snapshot)
        side.end(rank, ROOM)
    client.observe(total(*(rank.take() for rank in ranks)))
    open_rooms = "kvpool_open_rooms", ("endpoint", "decode")
    moved = "kvpool_moved_bytes_total", ("endpoint", "decode")
    count = "kvpool_phase_seconds_count", ("endpoint", "decode"), ("phase", "wire")
    samples = client.samples()
    assert (samples[open_rooms], samples[moved], samples[count]) == (6, 6_000_000, 2)
    sides[1].numbers["open_rooms"] = 2
    ranks[1].changed()
    client.observe(ranks[1].take())
    assert client.samples()[open_rooms] == 3


def test_sources_are_asked_once_a_second_and_when_a_room_ends():
    now = [10.0]
    side, rank = Side(), Stats(clock=lambda: now[0])
    rank.watch_endpoint("decode", side.snapshot)
    assert rank.take()
    side.numbers["open_rooms"] = 4
    assert rank.take() is None
    now[0] += stats.SECONDS
    assert rank.take()["kvpool_open_rooms\tdecode"] == {"0": 4}
    now[0] += stats.SECONDS
    assert rank.take() is None
    side.end(rank, ROOM)
    assert rank.take()["kvpool_rooms_total\tdecode\tsuccess"] == 1


def test_an_endpoint_that_is_made_again_counts_on():
    client, rank = Client(), Stats()
    for _ in range(2):
        side = Side()
        rank.watch_endpoint("decode", side.snapshot)
        side.end(rank, ROOM)
        client.observe(rank.take())
    key = "kvpool_rooms_total", ("endpoint", "decode"), ("outcome", "success")
    assert client.samples()[key] == 2


def test_a_line_of_the_log_has_what_was_counted_and_means_of_times():
    side, rank = Side(refusals={("decode", "engine"): 1}), Stats()
    rank.watch_endpoint("decode", side.snapshot)
    side.end(rank, ROOM)
    first = rank.take()
    side.end(rank, replace(ROOM, wire_seconds=1.5))
    side.end(rank, RoomMetrics(), LEASE)
    assert summary(total(first, rank.take())) == {
        "decode rooms success": 2,
        "decode MB": 6.0,
        "decode mean wire (ms)": 1000.0,
        "decode mean total (ms)": 750.0,
        "decode rooms failed": 1,
        "decode failures prefill/lease": 1,
        "decode refusals decode/engine": 1,
    }
    assert summary(rank.take() or {}) == {}


def test_what_a_store_counts_is_told_once_by_outcome():
    store, client, rank = Outcomes(), Client(), Stats()
    rank.watch_store(lambda: store.stats(0))
    stores = {"kv": SimpleNamespace(stats=lambda: store.stats(0))}
    with export({}, stores=stores) as server:
        for counts in ([("hit", 512), ("written", 3_000_000)], [("hit", 256), ("late", 256)]):
            for outcome, size in counts:
                store.count(outcome, size)
            rank.changed()
            client.observe(rank.take())
            assert client.samples() == exported(server)
    rank.changed()
    assert rank.take() is None
    store.count("miss", 7)
    rank.changed()
    assert summary(rank.take()) == {"kv store miss": 1, "kv tokens miss": 7}


def test_a_name_of_an_earlier_engine_of_the_process_is_free_again():
    for _ in range(2):
        Instruments(["model_name"], prometheus_classes(), mode="livesum")


def test_a_publisher_tells_also_while_no_room_ends():
    side, client, rank = Side(), Client(), Stats()
    rank.watch_endpoint("prefill", side.snapshot)
    publisher = Publisher(rank, client.instruments, ["llama"], logging.getLogger(__name__))
    lost, opened = (
        (name, ("endpoint", "prefill")) for name in ("kvpool_lost_peers_total", "kvpool_open_rooms")
    )
    try:
        side.numbers["losses"] = 3
        until(lambda: client.samples().get(lost) == 3)
        assert client.samples()[opened] == 1
        side.numbers["losses"] = 4
    finally:
        publisher.close()
    assert client.samples()[lost] == 4
    assert client.samples()[opened] == 0  # there is no endpoint any more


def test_what_a_publisher_cannot_ask_ends_the_numbers_and_says_so(caplog):
    def broken():
        raise RuntimeError("the endpoint was closed.")

    rank = Stats()
    rank.watch_endpoint("prefill", broken)
    publisher = Publisher(rank, None, [], logging.getLogger(__name__))
    publisher.close()
    assert "kvpool's metrics have ended" in caplog.text


def test_every_series_has_its_own_name_and_its_kind_in_it():
    names = [series.name for table in SOURCES.values() for series in table]
    assert len(names) == len({*names})
    kinds = {series.name: series.kind for table in SOURCES.values() for series in table}
    assert {name for name, kind in kinds.items() if kind == "histogram"} == {"kvpool_phase_seconds"}
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items())
