"""`kvpool bench`: times the operations of pools and transfers on a device and its engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.cli.output import check_output

if TYPE_CHECKING:
    from rich.console import Console

    from disagg.cli.bench.case import BenchCase, Sizes
    from disagg.cli.bench.measure import Measurement
    from disagg.cli.bench.report import Report
    from kvpool.device import Device


def _engine_names() -> list[str]:
    from disagg.engines.base import engine_names

    return engine_names()


def bench(
    device: Annotated[str, typer.Option(help="Device: cpu, cuda:0, npu:0, ...")] = "cpu",
    only: Annotated[list[str] | None, typer.Option(help="Group of cases; repeatable.")] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="Of transfers (default: all), hand-offs (default: local); repeatable.",
            autocompletion=_engine_names,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Small sizes, a few seconds: shows what runs, not how fast."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; the table on stderr.")
    ] = False,
    chart: Annotated[
        Path | None, typer.Option(help="Draw the ratios to a .html or .svg file.")
    ] = None,
) -> None:
    """Time pools and transfers on a device, beside plain copies.

    Stores, loads, moves, gathers, scatters, allocation, plans, binding, transfers and hand-offs:
    each in turn with a plain copy of as many bytes, or another reference.

    Each case is checked once before it is timed. Machines are noisy: compare ratios only. Cases
    that cannot run are listed with the reason.

    Groups: store, load, move, gather, scatter, allocator, plan, bind, transfer, handoff.

    A hand-off is timed from prefill's offer of the last chunk to Success on decode, in another
    process. Its reference is the bare engine, which reads the same runs; "beyond" is what the
    hand-off takes longer.

    Exit status 1 if a case failed or computed a wrong result, 2 if the device or engine is missing.

    JSON: machine, versions, date (UTC), quick; rows (group, case, engine, bytes of a copy of as
    much traffic, bound, seconds, reference_seconds, gib_per_second, reference_gib_per_second;
    ratio of the two and beyond_seconds, their difference, round by round; rounds, reason, failed).
    A case that did not run has a reason and no figures; a plan moves no bytes and has no rates.

    \b
    Example:
      kvpool bench --only transfer --engine local --chart transfer.svg
    """
    from rich.console import Console

    from disagg.cli.bench.case import QUICK, sizes_for
    from disagg.cli.bench.cases import GROUPS, HANDOFF_ENGINES, all_cases, measurable
    from disagg.cli.bench.chart import chart_of
    from disagg.cli.bench.machine import machine, now, packages
    from disagg.cli.bench.report import Report
    from disagg.engines.base import engine_names
    from kvpool.device import DeviceUnavailable
    from kvpool.layout.sentences import nearest
    from kvpool.render.chart import SUFFIXES, write_chart

    groups = only or GROUPS
    unknown = [group for group in groups if group not in GROUPS]
    if unknown:
        raise typer.BadParameter(
            f"--only {unknown[0]}: one of {', '.join(GROUPS)}.{nearest(unknown[0], GROUPS)}"
        )
    if engine and not {"transfer", "handoff"} & {*groups}:
        raise typer.BadParameter(
            "--engine selects transfers and hand-offs: add --only transfer or --only handoff, or "
            "omit --engine."
        )
    for name in engine or ():
        _need_engine(name)
    check_output("--chart", chart, SUFFIXES)
    try:
        found = measurable(device)
    except DeviceUnavailable as error:
        raise typer.BadParameter(str(error)) from None
    sizes = sizes_for(found, quick)
    known = all_cases(sizes, engine or engine_names(), engine or HANDOFF_ENGINES)
    cases = [case for case in known if case.group in groups]
    where = machine(found)
    rows = _run(cases, found, sizes, Console(stderr=True))
    report = Report(where, packages(), now(), sizes is QUICK, rows)
    _print(report, Console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=1))
    if chart is not None:
        write_chart(chart_of(report), chart, report.header())
        typer.echo(f"wrote {chart}", err=True)
    if any(row.failed for row in rows):
        raise typer.Exit(1)


def _print(report: Report, console: Console) -> None:
    console.print(report.header(), highlight=False, markup=False, soft_wrap=True)
    console.print(report.table(), crop=False)
    for line in report.left_out():
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _need_engine(name: str) -> None:
    from disagg.engines.base import EngineUnavailable, engine_class

    try:
        reason = engine_class(name).availability()
    except EngineUnavailable as error:
        raise typer.BadParameter(str(error)) from None
    if reason is not None:
        raise typer.BadParameter(f"engine {name!r}: {reason}")


def _run(
    cases: Sequence[BenchCase], device: Device, sizes: Sizes, console: Console
) -> list[Measurement]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from disagg.cli.bench.cases import context_on
    from disagg.cli.bench.measure import measured

    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    hidden = not console.is_terminal
    rows = []
    with (
        context_on(device, sizes) as context,
        Progress(*columns, console=console, transient=True, disable=hidden) as progress,
    ):
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=f"{case.group}: {case.name}")
            rows.append(measured(case, context, sizes))
            progress.advance(task)
    return rows
