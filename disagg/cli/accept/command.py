"""`kvpool accept`: tries everything on a device of this machine, and writes a report."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.accept.report import FAILED, FORMAT, HEADINGS, Report, SectionResult
from disagg.cli.common import commit, device_to_measure, need_known, origin, progress_bar
from kvpool.cli import check_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from disagg.cli.accept.sections import AcceptSection
    from kvpool.device import Device

JSON_NAME = "accept.json"


def accept(
    device: Annotated[str, typer.Option(help="Device: cpu, cuda:0, npu:0, ...")] = "cpu",
    only: Annotated[list[str] | None, typer.Option(help="Section; repeatable.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Little of everything, in seconds: shows what runs.")
    ] = False,
    out: Annotated[Path, typer.Option(help=f"Folder for {JSON_NAME}; made if missing.")] = Path(
        "accept"
    ),
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

    from disagg.cli.accept.sections import SECTIONS

    need_known("--only", only or (), [section.name for section in SECTIONS])
    tried, path = device_to_measure(device), out / JSON_NAME
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"--out {out}: {error.strerror}.") from None
    check_output("--out", path)
    chosen = [section for section in SECTIONS if not only or section.name in only]
    report = _run(tried, chosen, quick, path, Console(stderr=as_json))
    typer.echo(f"{report.verdict}: {path}", err=as_json)
    if as_json:
        typer.echo(report.as_json(), nl=False)
    if not report.passed:
        raise typer.Exit(130 if report.interrupted else 1)


def _run(
    device: Device, chosen: Sequence[AcceptSection], quick: bool, path: Path, console: Console
) -> Report:
    """Runs sections, and writes the report: before each too, to name one that ends the process."""
    from rich.text import Text

    from disagg.cli.accept.sections import SECTIONS, Scope

    began, results, running = time.monotonic(), list[SectionResult](), None
    facts, source = origin(device), commit()

    def written() -> Report:
        report = Report(
            format=FORMAT,
            device=device.name,
            passed=not running and all(result.state != FAILED for result in results),
            interrupted=running,
            quick=quick,
            complete=[result.name for result in results] == [s.name for s in SECTIONS],
            seconds=time.monotonic() - began,
            commit=source,
            sections=results,
            **facts,
        )
        path.write_bytes(report.as_json())
        return report

    with suppress(KeyboardInterrupt), progress_bar(console, len(chosen)) as tell:
        console.print(HEADINGS, soft_wrap=True)
        scope = Scope(device, quick, lambda what: tell(f"{running}: {what}", len(results)))
        for section in chosen:
            running = section.name
            written()
            results.append(section.result(scope))
            for line in results[-1].lines():
                console.print(Text(line), soft_wrap=True)
        running = None
    return written()
