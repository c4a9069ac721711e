"""What an operator is told of rooms."""

from __future__ import annotations

from disagg.connectors import stats
from disagg.protocol.metrics import PHASES, RoomMetrics
from disagg.protocol.status import Failure

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
