"""What an operator is told of rooms."""

from __future__ import annotations

from disagg.connectors.rank import stats
from disagg.protocol.metrics import PHASES, RoomMetrics
from disagg.protocol.status import Failure
from disagg.store.stats import OUTCOMES, Outcomes

LEASE = Failure("decode", "it never asked", "lease")


def test_observations_are_the_rooms_bytes_seconds_and_failures():
    counted = stats.Stats()
    counted.received(RoomMetrics(bytes_moved=300, wire_seconds=0.5), None)
    counted.received(RoomMetrics(bytes_moved=20, wire_seconds=0.25), None)
    counted.received(RoomMetrics(), Failure("prefill", "it is gone", "lost"))
    counted.sent(None)
    counted.sent(LEASE)
    observations = list(stats.observations(counted.take()))
    assert [each for each in observations if each[0] != "seconds"] == [
        ("rooms", ("read",), 2),
        ("bytes", (), 320),
        ("rooms", ("failed",), 1),
        ("failures", ("prefill/lost",), 1),
        ("rooms", ("served",), 1),
        ("rooms", ("unserved",), 1),
        ("failures", ("decode/lease",), 1),
    ]
    seconds = [(*label, value) for name, label, value in observations if name == "seconds"]
    assert [phase for phase, _ in seconds] == [phase for phase in PHASES for _ in range(2)]
    assert [value for phase, value in seconds if phase == "wire"] == [0.5, 0.25]


def test_numbers_of_ranks_add_up():
    counted = stats.Stats()
    counted.received(RoomMetrics(bytes_moved=3_000_000, wire_seconds=0.5), None)
    read = counted.take()
    counted.sent(LEASE)
    line = stats.summary(stats.total(stats.total({}, read), counted.take()))
    assert counted.take() is None
    assert line == {
        "Rooms read": 1,
        "MB read": 3.0,
        "Mean wire (ms)": 500.0,
        "Rooms unserved": 1,
        "Failures decode/lease": 1,
    }


def test_what_a_store_counts_is_told_once_by_outcome():
    store, counted = Outcomes(), stats.Stats()
    store.count("hit", 512)
    store.count("written", 3_000_000)
    counted.stored(store.stats(0))
    store.count("hit", 256)
    store.count("late", 256)
    counted.stored(store.stats(0))
    observations = [*stats.observations(counted.take())]
    assert observations == [
        ("store", ("hit",), 2),
        ("store_tokens", ("hit",), 768),
        ("store", ("written",), 1),
        ("store_bytes", ("written",), 3_000_000),
        ("store", ("late",), 1),
        ("store_tokens", ("late",), 256),
    ]
    counted.stored(store.stats(0))
    assert counted.take() is None
    store.count("miss", 7)
    counted.stored(store.stats(0))
    assert stats.summary(counted.take()) == {"Store miss": 1, "Store tokens miss": 7}


def test_every_outcome_of_a_store_has_its_unit():
    in_bytes = {name for name, said in OUTCOMES.items() if "bytes" in said}
    assert in_bytes == set(stats.IN_BYTES)
