"""Every figure is a ratio: each round runs the reference first, then ours, in one process."""

from __future__ import annotations

import time
from statistics import median

import pytest

ROWS: list[tuple[str, float, float]] = []


@pytest.fixture
def paired(benchmark, request):
    """Call `paired(ours, reference)`: times both in turn, and keeps the ratio of medians.

    The reference leaves the caches full of its own. With `calls`, a round times so many calls of
    ours, as in sustained use, and counts one.
    """

    def run(ours, reference, rounds=20, calls=1):
        taken = []

        def before():
            began = time.perf_counter()
            reference()
            taken.append(time.perf_counter() - began)

        def many():
            for _ in range(calls):
                ours()

        benchmark.pedantic(many, setup=before, rounds=rounds, warmup_rounds=2)
        if benchmark.stats is not None:
            mine, theirs = benchmark.stats.stats.median / calls, median(taken[2:])
            benchmark.extra_info.update(reference_seconds=theirs, ratio=theirs / mine)
            ROWS.append((request.node.name, mine, theirs))

    return run


def pytest_terminal_summary(terminalreporter):
    if ROWS:
        terminalreporter.section("medians, and the reference's in the same rounds")
        for name, mine, theirs in ROWS:
            times = f"{1e3 * mine:>9.3f} ms {1e3 * theirs:>9.3f} ms {theirs / mine:>8.2f} x"
            terminalreporter.write_line(f"{name:<58} {times}")
