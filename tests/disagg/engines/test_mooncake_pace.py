"""How long a thread sleeps before it waits in Mooncake."""

import pytest

from disagg.engines.mooncake.pace import LEAST_SECONDS, SLEPT, Pace

MIB = 1 << 20


def test_nothing_is_slept_before_a_read_of_that_size_is_known():
    pace = Pace()
    pace.took(1024, 1, 0.01)
    assert pace.sleep_seconds(128 * MIB, 512) == 0.0
    assert pace.sleep_seconds(128 * MIB, 1) == 0.0


def test_a_part_of_the_shortest_time_is_slept():
    pace = Pace()
    for seconds in (0.1, 0.05, 0.2):
        pace.took(100 * MIB, 600, seconds)
    assert pace.sleep_seconds(100 * MIB, 600) == pytest.approx(SLEPT * 0.05)
    assert pace.sleep_seconds(120 * MIB, 1000) == pytest.approx(SLEPT * 0.06)


def test_a_read_that_was_slow_by_chance_is_soon_forgotten():
    """What is slept is part of the next time, so that it falls from read to read."""
    pace, true = Pace(), 0.01
    pace.took(MIB, 4, 1.0)
    for _ in range(30):
        pace.took(MIB, 4, max(true, pace.sleep_seconds(MIB, 4)))
    assert pace.sleep_seconds(MIB, 4) <= SLEPT * true * 1.001


def test_short_reads_are_not_slept_through():
    pace = Pace()
    pace.took(4096, 1, LEAST_SECONDS)
    assert pace.sleep_seconds(4096, 1) == 0.0
