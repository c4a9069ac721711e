"""`kvpool bench`: times the operations of pools and transfers on a device and its engines."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from disagg.cli.common import device_to_measure, need_known, origin, progress_bar
from disagg.engines.base import engine_names
from kvpool.cli import check_output

_ENGINES = "Of transfers (default: all), hand-offs (default: local); repeatable."
_Engine = Annotated[list[str] | None, typer.Option(help=_ENGINES, autocompletion=engine_names)]
_Quick = Annotated[
    bool, typer.Option("--quick", help="Small sizes, a few seconds: shows what runs, not how fast.")
]
_AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object; the table on stderr.")
]
_Chart = Annotated[
    Path | None, typer.Option(help="Draw the ratios and their spread to a page (.html).")
]


def bench(
    device: Annotated[str, typer.Option(help="Device: cpu, cuda:0, npu:0, ...")] = "cpu",
    only: Annotated[list[str] | None, typer.Option(help="Group of cases; repeatable.")] = None,
    engine: _Engine = None,
    quick: _Quick = False,
    as_json: _AsJson = False,
    chart: _Chart = None,
) -> None:
    """Time pools and transfers on a device, beside plain copies.

    Stores, loads, moves, gathers, scatters, transfers and hand-offs: each in turn with a plain copy
    of as many bytes, or another reference.

    Each case is checked once before it is timed. Machines are noisy: compare ratios only. Cases
    that cannot run are listed with the reason.

    Groups: store, load, move, gather, scatter, transfer, handoff.

    A hand-off is timed from prefill's offer of the last chunk to Success on decode, in another
    process. Its reference is the bare engine, which reads the same runs; "beyond" is what the
    hand-off takes longer.

    Exit status 1 if a case failed or computed a wrong result, 2 if the device is missing.

    JSON: machine, versions, date (UTC), quick; rows (group, case, engine, bytes of a copy of as
    much traffic, bound, target: the ratio to reach on an H200, seconds, reference_seconds,
    gib_per_second, reference_gib_per_second; ratio of the two and beyond_seconds, their difference,
    round by round; ratio_quartiles; rounds, reason, failed). What did not run has no figures.

    \b
    Example:
      kvpool bench --only transfer --engine local --chart transfer.html
    """
    from rich.console import Console

    from disagg.cli.bench.case import QUICK, Measurement, measured, sizes_for
    from disagg.cli.bench.peer import BenchContext
    from disagg.cli.bench.report import GROUPS, BenchReport, all_cases
    from kvpool.render.chart import SUFFIXES, write_chart

    need_known("--only", only or (), GROUPS)
    need_known("--engine", engine or (), engine_names())
    check_output("--chart", chart, SUFFIXES)
    timed, rows = device_to_measure(device), list[Measurement]()
    sizes, facts = sizes_for(timed, quick), origin(timed)
    cases = [case for case in all_cases(sizes, engine or ()) if case.row.group in (only or GROUPS)]
    bar = progress_bar(Console(stderr=True), len(cases))
    with closing(BenchContext(timed)) as context, bar as tell:
        for case in cases:
            tell(case.row.title, len(rows))
            rows.append(measured(case, context, sizes))
    report = BenchReport(quick=sizes is QUICK, rows=rows, **facts)
    report.print(Console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=1))
    if chart is not None:
        write_chart(report.chart(), chart, report.header())
        typer.echo(f"wrote {chart}", err=True)
    if any(row.failed for row in report.rows):
        raise typer.Exit(1)
