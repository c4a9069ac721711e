"""What Prometheus is told of rooms."""

from __future__ import annotations

from collections import Counter

from disagg.connectors import stats
from disagg.protocol.metrics import PHASES, RoomMetrics
from disagg.protocol.status import Failure


def test_observations_are_the_rooms_bytes_seconds_and_failures():
    counted = stats.Stats()
    counted.received(RoomMetrics(bytes_moved=300, wire_seconds=0.5), None)
    counted.received(RoomMetrics(bytes_moved=20, wire_seconds=0.25), None)
    counted.received(RoomMetrics(), Failure("prefill", "it is gone", "lost"))
    counted.sent(None)
    counted.sent(Failure("decode", "it never asked", "lease"))
    numbers = counted.take()
    assert numbers is not None

    sums, seen = Counter(), Counter()
    for series, label, value in stats.observations(numbers):
        assert (len(label) == 1) == (series.label is not None)
        key = (series.name, *label)
        sums[key] += value
        seen[key] += 1
    assert sums["bytes",] == 320
    assert {label: sums["rooms", label] for label in stats.ROOMS} == {
        "read": 2,
        "failed": 1,
        "served": 1,
        "unserved": 1,
    }
    assert sums["failures", "prefill/lost"] == sums["failures", "decode/lease"] == 1
    assert sums["seconds", "wire"] == 0.75
    assert {phase: seen["seconds", phase] for phase in PHASES} == dict.fromkeys(PHASES, 2)


def test_numbers_of_ranks_add_up():
    counted = stats.Stats()
    counted.received(RoomMetrics(bytes_moved=3_000_000, wire_seconds=0.5), None)
    read = counted.take()
    counted.sent(Failure("decode", "it never asked", "lease"))
    both = stats.total(stats.total(stats.empty(), read), counted.take())
    assert counted.take() is None
    line = stats.summary(both)
    assert (line["Rooms read"], line["Rooms unserved"], line["Rooms failed"]) == (1, 1, 0)
    assert (line["MB read"], line["Mean wire (ms)"], line["Failures decode/lease"]) == (3, 500, 1)
