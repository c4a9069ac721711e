"""Ratios: each round runs the reference, then our code, in one process. Without
`--benchmark-enable` each case runs once, with minimal sizes. With `--figures` the tables of
docs/performance.md are written again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from kvpool import RequestAddress, Span
from tests.bench.figures import figure, write_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Seconds of a case and of its reference, by round."""

    file: str
    title: str
    ours: Sequence[float]
    reference: Sequence[float]


PAIRS: list[Pair] = []


def pytest_addoption(parser):
    parser.addoption("--figures", action="store_true", help="write the tables of performance.md")


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
            mine, theirs = benchmark.stats.stats.data, taken[2:]
            ratio = median(theirs) / median(mine)
            benchmark.extra_info.update(reference_seconds=median(theirs), ratio=ratio)
            record(request, request.node.name, mine, theirs)

    return run


def record(request, title, ours, reference):
    """Keeps what was timed, for the summary and the figures."""
    pair = Pair(file=request.path.name, title=title, ours=[*ours], reference=[*reference])
    PAIRS.append(pair)


def pytest_terminal_summary(terminalreporter, config):
    if not PAIRS:
        return
    terminalreporter.section("medians, the reference's in the same rounds, and both lowest")
    for pair in PAIRS:
        mine, theirs = median(pair.ours), median(pair.reference)
        times = f"{1e3 * mine:>9.3f} ms {1e3 * theirs:>9.3f} ms {theirs / mine:>8.2f} x"
        lowest = min(pair.reference) / min(pair.ours)
        terminalreporter.write_line(f"{pair.title:<58} {times} {lowest:>6.2f} x")
    if config.getoption("figures"):
        write_all([figure(p.file, p.title, p.ours, p.reference) for p in PAIRS])
