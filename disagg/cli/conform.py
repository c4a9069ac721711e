"""`kvpool conform`: which pairs of serving engines give right answers, with which connectors."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.cli import check_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from disagg.testing.report import ConformReport, TriedPair
    from disagg.testing.suite import Pair, Suite


_File = Annotated[Path, typer.Argument(help="The suite: engines, models and pairs, in TOML.")]
_Only = Annotated[list[str] | None, typer.Option(help="Rows whose name has this text; repeatable.")]
_List = Annotated[bool, typer.Option("--list", help="Print the names of rows, and run none.")]
_Out = Annotated[Path, typer.Option(help="Folder of reports, logs and models; made if missing.")]
_Resume = Annotated[
    bool, typer.Option("--resume", help="Keep the rows in --out whose settings are the same.")
]
_AsJson = Annotated[
    bool, typer.Option("--json", help="Print conform.json too; all else on stderr.")
]


def conform(
    file: _File,
    only: _Only = None,
    list_rows: _List = False,
    out: _Out = Path("conform"),
    resume: _Resume = False,
    as_json: _AsJson = False,
) -> None:
    """Run pairs of serving engines, and say which give right answers.

    Each row of the suite is a prefill server, a decode server and a connector. They are started,
    asked, and compared: by bytes where both sides can be read, by tokens with two single engines
    otherwise. A row "serves", "refuses", is "WRONG", "unsteady" (runs differ), "lost" (an engine
    ended), "fails", "cannot be judged" or is "not here". Refusals are tried twice, wrong answers
    reproduced twice.

    Writes conform.json, conform.html and conform.md after each row. docs/conform.md describes the
    suite and the results.

    Exit status 1 if a row of connector kvpool is WRONG or unsteady, 2 if the suite cannot be run,
    130 after Ctrl-C.

    \b
    Examples:
      kvpool conform docs/compatibility.toml --list
      kvpool conform docs/compatibility.toml --only gemma3 --out reports --resume
    """
    from rich.console import Console

    from disagg.testing.conform import REPORTS, kept_trials

    suite = _loaded(file)
    pairs = _chosen(suite, only or [])
    if list_rows:
        typer.echo("\n".join(pair.name for pair in pairs))
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        kept = kept_trials(out) if resume else {}
    except OSError as error:
        raise typer.BadParameter(f"--out {out}: {error.strerror}.") from None
    except ValueError as error:
        raise typer.BadParameter(f"--resume: {error}") from None
    check_output("--out", out / REPORTS[0])
    report = _run(file, suite, pairs, kept=kept, out=out)
    Console(stderr=as_json).print(report.table(), crop=False)
    typer.echo(f"wrote {', '.join(str(out / name) for name in REPORTS)}", err=True)
    if as_json:
        typer.echo(report.as_json(), nl=False)
    if not report.complete or report.failed():
        raise typer.Exit(1 if report.complete else 130)


def _loaded(file: Path) -> Suite:
    from disagg.testing.suite import SuiteError, load

    try:
        return load(file)
    except SuiteError as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}.") from None


def _chosen(suite: Suite, only: Sequence[str]) -> list[Pair]:
    for words in only:
        if not any(words in pair.name for pair in suite.pairs):
            raise typer.BadParameter(f"--only {words}: in no row's name. --list prints them.")
    return [p for p in suite.pairs if not only or any(words in p.name for words in only)]


def _run(
    file: Path, suite: Suite, pairs: Sequence[Pair], *, kept: dict[str, TriedPair], out: Path
) -> ConformReport:
    """Tries pairs, and writes the reports after each, with all rows of the suite that were kept;
    until Ctrl-C.
    """
    from disagg.testing.arena import Arena
    from disagg.testing.conform import now, try_pairs, write_reports
    from disagg.testing.report import ConformReport

    asked = {suite.digest(pair) for pair in pairs}
    digests = [suite.digest(pair) for pair in suite.pairs]
    rows = {digest: kept[digest] for digest in digests if digest in kept}

    def written() -> ConformReport:
        trials = [rows[digest] for digest in digests if digest in rows]
        report = ConformReport(
            suite=file.name, date=now(), complete=asked <= rows.keys(), rows=trials
        )
        write_reports(out, report)
        return report

    def progress(line: str) -> None:
        typer.echo(line, err=True)

    with suppress(KeyboardInterrupt), Arena(suite, out.absolute(), progress) as arena:
        trials = try_pairs(suite, pairs, observe=arena.observe, kept=rows, progress=progress)
        for row in trials:
            rows[row.digest] = row
            written()
    return written()
