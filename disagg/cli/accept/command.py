"""`kvpool accept`: tries everything on a device of this machine, and writes a report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.cli.output import check_output

if TYPE_CHECKING:
    from rich.console import Console

    from disagg.cli.accept.report import SectionResult
    from disagg.cli.accept.sections import Section
    from kvpool.device import Device

JSON_NAME, HTML_NAME = "accept.json", "accept.html"


def accept(
    device: Annotated[str, typer.Option(help="Device: cpu, cuda:0, npu:0, ...")] = "cpu",
    only: Annotated[list[str] | None, typer.Option(help="Section; repeatable.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Little of everything, in seconds: shows what runs.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help=f"Folder for {JSON_NAME} and {HTML_NAME}; made if missing.")
    ] = Path("accept"),
    as_json: Annotated[
        bool, typer.Option("--json", help=f"Print {JSON_NAME} too; all else on stderr.")
    ] = False,
) -> None:
    """Try a device, its engines and real models, and write a report.

    Sections: conformance, streams, graphs, ipc, engines, models, bench.

    Exit status 1 if anything failed, with one line for each, 2 if the device is missing, 130 after
    Ctrl-C. What a device or machine does not have is "not here" and fails nothing. docs/accept.md
    describes the sections and the JSON.

    \b
    Example:
      kvpool accept --device cuda:0 --out reports/h200
    """
    from rich.console import Console

    from disagg.cli.accept.facts import commit, facts
    from disagg.cli.accept.html import html
    from disagg.cli.accept.report import FAILED, FORMAT, Report
    from disagg.cli.accept.sections import SECTIONS
    from disagg.cli.bench.cases import measurable
    from disagg.cli.bench.machine import now, packages
    from kvpool.device import DeviceUnavailable
    from kvpool.layout.sentences import nearest

    names = [section.name for section in SECTIONS]
    for name in only or ():
        if name not in names:
            raise typer.BadParameter(
                f"--only {name}: one of {', '.join(names)}.{nearest(name, names)}"
            )
    try:
        found = measurable(device)
        out.mkdir(parents=True, exist_ok=True)
    except DeviceUnavailable as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        raise typer.BadParameter(f"--out {out}: {error.strerror}.") from None
    for name in (JSON_NAME, HTML_NAME):
        check_output("--out", out / name)
    date, began, where, source = now(), time.monotonic(), facts(found), commit()

    chosen = [section for section in SECTIONS if section.name in (only or names)]
    results: list[SectionResult] = []

    def write() -> Report:
        interrupted = chosen[len(results)].name if len(results) < len(chosen) else None
        report = Report(
            format=FORMAT,
            device=device,
            passed=not interrupted and all(result.state != FAILED for result in results),
            interrupted=interrupted,
            quick=quick,
            complete=[result.name for result in results] == names,
            date=date,
            seconds=time.monotonic() - began,
            machine=where,
            versions=packages(),
            commit=source,
            sections=results,
        )
        (out / JSON_NAME).write_bytes(report.as_json())
        (out / HTML_NAME).write_text(html(report), encoding="utf-8")
        return report

    try:
        report = write()  # before each section: one that ends the process is named in the file
        for result in _run(chosen, found, quick, Console(stderr=as_json)):
            results.append(result)
            report = write()
    except KeyboardInterrupt:
        report = write()
    typer.echo(f"{report.verdict}: {out / HTML_NAME}, {out / JSON_NAME}", err=as_json)
    if as_json:
        typer.echo(report.as_json(), nl=False)
    if not report.passed:
        raise typer.Exit(130 if report.interrupted else 1)


def _run(
    sections: Sequence[Section], device: Device, quick: bool, console: Console
) -> Iterator[SectionResult]:
    """Runs sections, with a bar on a terminal; prints a line for each, and one for each failure."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    from disagg.cli.accept.scope import Scope

    done = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    now = TextColumn("{task.description}", markup=False)
    hidden = not console.is_terminal
    with Progress(*done, now, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=len(sections))
        for section in sections:

            def tell(what: str, of: str = section.name) -> None:
                progress.update(task, description=f"{of}: {what}")

            tell(section.title)
            result = section.result(Scope(device, quick, tell))
            progress.advance(task)
            for line in result.lines():
                console.print(line, highlight=False, markup=False, soft_wrap=True)
            yield result
