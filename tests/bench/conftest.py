"""Ratios: each round runs the reference, then our code, in one process. Without
`--benchmark-enable` each case runs once, with minimal sizes.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from kvpool import RequestAddress, Span

PAIRS: list[tuple[str, float, float, float]] = []


@pytest.fixture(scope="session")
def timed(pytestconfig) -> bool:
    """Whether sizes are those to time."""
    return pytestconfig.getoption("benchmark_enable")


def shuffled(pages, seed, page, step=1):
    """A request of so many pages of `page` tokens, in any order; `step` 2: no two are adjacent."""
    ids = 1 + step * np.random.default_rng(seed).permutation(pages)
    return RequestAddress(pages * page, {"kv": Span(ids)})


def pytest_collection_modifyitems(config, items):
    """Where nothing is timed, one engine shows that a benchmark runs."""
    if config.getoption("benchmark_enable"):
        return
    first, left_out = {}, []
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        engine = params.get("engine", params.get("other"))
        in_folder = engine and item.path.parent == Path(__file__).parent
        if in_folder and first.setdefault(item.originalname, engine) != engine:
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def paired(benchmark, request):
    """`paired(ours, reference)` times both in turn, and records the ratio of medians; by the clock
    of the test's mark `benchmark(timer=...)`, if it has one.
    """
    marker = request.node.get_closest_marker("benchmark")
    clock = marker.kwargs["timer"] if marker else time.perf_counter

    def run(ours, reference, rounds=20):
        taken = []

        def before():
            began = clock()
            reference()
            taken.append(clock() - began)

        benchmark.pedantic(ours, setup=before, rounds=rounds, warmup_rounds=2)
        if benchmark.stats is not None:
            mine, theirs = benchmark.stats.stats.median, median(taken[2:])
            lowest = min(taken[2:]) / benchmark.stats.stats.min
            benchmark.extra_info.update(reference_seconds=theirs, ratio=theirs / mine)
            PAIRS.append((request.node.name, mine, theirs, lowest))

    return run


def pytest_terminal_summary(terminalreporter):
    if PAIRS:
        terminalreporter.section("medians, the reference's in the same rounds, and both lowest")
        for name, mine, theirs, lowest in PAIRS:
            times = f"{1e3 * mine:>9.3f} ms {1e3 * theirs:>9.3f} ms {theirs / mine:>8.2f} x"
            terminalreporter.write_line(f"{name:<58} {times} {lowest:>6.2f} x")
