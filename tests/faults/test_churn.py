"""Thousands of requests through one pair of processes: nothing grows, no page is lost."""

from __future__ import annotations

import pytest

from tests.disagg.engines.peers import ENGINES
from tests.faults.churn import churn

GROWTH = 2 << 20
"""Bytes by which a process may grow after warm-up: twice what Python's own heap did."""


@pytest.mark.parametrize(
    ("engine", "requests"),
    [
        ("local", 1_500),
        *((engine, 500) for engine in ENGINES[1:]),
        *(pytest.param(engine, 10_000, marks=pytest.mark.long) for engine in ENGINES),
    ],
)
def test_thousands_of_requests_leave_nothing_behind(engine, requests):
    """After each fifth all requests have ended, and both processes take a sample."""
    for side, report in churn(engine, requests, requests // 5).items():
        assert not report.problems, (side, report.problems[:5])
        assert report.ends["Success"] > 0.8 * requests
        assert report.ends["Failed, to be aborted"] > 0.01 * requests
        assert report.waited, "the pool was never full"
        warm, *_, last = report.samples
        assert last.memory - warm.memory < GROWTH, (side, report.samples)
        assert last.files <= warm.files, (side, report.samples)
        assert last.threads <= warm.threads, (side, report.samples)
