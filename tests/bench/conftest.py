"""Ratios: each round runs the reference, then our code, in one process.

Options, if this folder is named on the command line: `--device NAME`, `--json FILE`. Without
`--benchmark-enable` each case runs once, with minimal sizes.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median

import pytest
import typer
from rich.console import Console

from disagg.cli.bench.case import QUICK, sizes_for
from disagg.cli.bench.cases import all_cases, context_on
from disagg.cli.bench.machine import machine, now, packages
from disagg.cli.bench.measure import Measurement
from disagg.cli.bench.report import BenchReport
from disagg.cli.bench.transfers import transfer_cases
from disagg.cli.common import device_to_measure
from disagg.engines.base import engine_class, engine_names
from tests.bench.host import host_cases

PAIRS: list[tuple[str, float, float, float]] = []
ROWS: list[Measurement] = []
WHERE: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bench", "benchmarks of a device")
    group.addoption("--device", default="cpu", help="device to time (default: cpu)")
    group.addoption("--json", type=Path, help="write what `kvpool bench --json` would")


def device_of(config: pytest.Config):
    """The device of the option; `cpu` if the option is not defined."""
    try:
        return device_to_measure(config.getoption("--device", "cpu") or "cpu")
    except typer.BadParameter as error:
        raise pytest.UsageError(str(error)) from None


def sizes_of(config: pytest.Config):
    """Minimal sizes if nothing is timed."""
    return sizes_for(device_of(config), quick=not config.getoption("benchmark_enable"))


def engines() -> dict[str, str | None]:
    """Every known engine, and the reason if it does not work here."""
    return {name: engine_class(name).availability() for name in engine_names()}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        working = [name for name, reason in engines().items() if reason is None]
        sizes = sizes_of(metafunc.config)
        cases = [*all_cases(sizes, working), *host_cases(sizes is QUICK)]
        metafunc.parametrize("case", cases, ids=[f"{case.group}: {case.name}" for case in cases])


@pytest.fixture(scope="session")
def context(pytestconfig):
    """Where cases run."""
    device = device_of(pytestconfig)
    WHERE.update(machine(device))
    with context_on(device, sizes_of(pytestconfig)) as made:
        yield made


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


def pytest_terminal_summary(terminalreporter, config):
    if PAIRS:
        terminalreporter.section("medians, the reference's in the same rounds, and both lowest")
        for name, mine, theirs, lowest in PAIRS:
            times = f"{1e3 * mine:>9.3f} ms {1e3 * theirs:>9.3f} ms {theirs / mine:>8.2f} x"
            times += f" {lowest:>6.2f} x"
            terminalreporter.write_line(f"{name:<58} {times}")
    if not ROWS:
        return
    sizes = sizes_of(config)
    for name, reason in engines().items():
        if reason is not None:
            ROWS.extend(
                Measurement(case=case, reason=reason) for case in transfer_cases(sizes, [name])
            )
    report = BenchReport(
        machine=WHERE, versions=packages(), date=now(), quick=sizes is QUICK, rows=ROWS
    )
    terminalreporter.section("rates, and those of the copies that bound them")
    console = Console(width=100)
    with console.capture() as text:
        console.print(report.table())
    for line in (report.header(), text.get(), *report.left_out()):
        terminalreporter.write_line(line)
    path = config.getoption("--json", None)
    if path:
        path.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
