"""The report as one HTML page, which needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from disagg.cli.accept.report import FAILED, NOT_HERE, PASSED, Report, Row, SectionResult
from kvpool.render.page import page

UNPRINTABLE = re.compile(r"[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What a page, or a file in UTF-8, cannot hold."""
CSS = """
:root { --passed: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --passed: #57ab5a; } }
table { border-collapse: collapse; width: 100%; margin: 6px 0; }
tr { border-bottom: 1px solid var(--line); }
td { vertical-align: top; padding: 3px 12px 3px 0; }
.number { text-align: right; padding: 3px 0 3px 12px; font-variant-numeric: tabular-nums; }
.state, .number { white-space: nowrap; }
.counts { width: auto; }
.sentence { width: 60%; overflow-wrap: anywhere; }
.passed { color: var(--passed); } .quiet, .not-here { color: var(--quiet); }
.failed { color: var(--found); font-weight: 600; }
@media (max-width: 700px) {
  .rows tr, .rows td:first-child { display: block; } .rows tr { padding: 5px 0; }
  .rows td { display: inline; padding: 0 8px 0 0; } .rows td:first-child { font-weight: 600; }
}
"""
Cell = tuple[str, str]
"""Words, and the class that they are shown as."""
STATES = PASSED, FAILED, NOT_HERE
TITLES: list[Cell] = [("", ""), *((words, "number quiet") for words in (*STATES, "seconds"))]


def html(report: Report) -> str:
    """The page: verdict, what failed, the sections, and the machine."""
    version, source = report.versions.get("kvpool", ""), report.commit or "an installed package"
    body = [f"<p>{_text(f'kvpool {version}, {source}, {report.date}')}</p>"]
    failed = [
        ((f"{section.name}: {row.name}", "failed"), (row.sentence, "sentence"))
        for section in report.sections
        for row in section.failed
    ]
    if failed:
        body += ["<h2>What failed</h2>", _table(failed, "rows")]
    body += ["<h2>Sections</h2>", _table([TITLES, *map(_line, report.sections)], "counts")]
    for section in report.sections:
        body += [f"<h2>{_text(f'{section.name}: {section.title}')}</h2>"]
        body += [_table(map(_row, section.rows), "rows")]
    for title, facts in (("The machine", report.machine), ("Packages", report.versions)):
        lines = (((name, ""), (value, "sentence")) for name, value in facts.items())
        body += [f"<h2>{title}</h2>", _table(lines)]
    colour = "passed" if report.passed else "found"
    style = f"{CSS}h1 {{ color: var(--{colour}); }}\n"
    return page(_printable(f"kvpool accept: {report.verdict}"), *body, style=style)


def _line(section: SectionResult) -> list[Cell]:
    counts = [f"{section.count(state):,}" for state in STATES]
    numbers = [*counts, f"{section.seconds:,.1f}"]
    return [(section.name, ""), *((number, "number") for number in numbers)]


def _row(row: Row) -> list[Cell]:
    seconds = f"{row.seconds:.2f} s" if row.seconds else ""
    state = f"state {row.state.replace(' ', '-')}"
    return [(row.name, ""), (row.state, state), (row.sentence, "sentence"), (seconds, "number")]


def _table(lines: Iterable[Iterable[Cell]], kind: str = "") -> str:
    rows = (
        "".join(f'<td class="{shown}">{_text(words)}</td>' for words, shown in line)
        for line in lines
    )
    written = "".join(f"<tr>{row}</tr>\n" for row in rows)
    return f'<table class="{kind}">\n{written}</table>'


def _text(words: str) -> str:
    return escape(_printable(words))


def _printable(words: str) -> str:
    return UNPRINTABLE.sub("\ufffd", words)
