"""Ratios: each round runs the reference, then our code, in one process. Without
`--benchmark-enable` each case runs once, with minimal sizes.
"""

from __future__ import annotations

import time
from statistics import median

import pytest
from rich.console import Console

from disagg.cli.bench.machine import machine, packages
from disagg.cli.bench.measure import Measurement
from disagg.cli.bench.report import BenchReport
from disagg.cli.common import utc_now
from kvpool.device import get_device
from tests.bench.host import host_cases

PAIRS: list[tuple[str, float, float, float]] = []
ROWS: list[Measurement] = []


@pytest.fixture
def timed(pytestconfig) -> bool:
    """Whether sizes are those to time."""
    return pytestconfig.getoption("benchmark_enable")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = [*host_cases(not metafunc.config.getoption("benchmark_enable"))]
        metafunc.parametrize("case", cases, ids=[case.title for case in cases])


@pytest.fixture
def paired(benchmark, request):
    """`paired(ours, reference)` times both in turn, and records the ratio of medians."""

    def run(ours, reference, rounds=20):
        taken = []

        def before():
            began = time.perf_counter()
            reference()
            taken.append(time.perf_counter() - began)

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
    if ROWS:
        facts = machine(get_device("cpu"))
        report = BenchReport(
            machine=facts, versions=packages(), date=utc_now(), quick=False, rows=ROWS
        )
        console = Console(width=100)
        with console.capture() as text:
            report.print(console)
        terminalreporter.section("host work, beside its references")
        terminalreporter.write_line(text.get())
