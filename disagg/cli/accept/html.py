"""The report as one HTML page, which needs nothing else and is well-formed XML too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

from disagg.cli.accept.report import FAILED, NOT_HERE, PASSED, Report, Row, SectionResult

NUMBER = re.compile(r"[\d,.]+")
UNPRINTABLE = re.compile(r"[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML cannot hold."""
LONG = 50
"""Letters from which a cell's words may be broken."""
NUMBERS = PASSED, FAILED, NOT_HERE, "seconds"
"""Titles above numbers."""
CLASSES: dict[str, str] = {
    PASSED: "state passed",
    FAILED: "state failed",
    NOT_HERE: "state not-here",
}

CSS = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --faint: #666; --line: #ddd;
        --passed: #1a7f37; --failed: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --paper: #161616; --faint: #999; --line: #383838;
          --passed: #57ab5a; --failed: #ff7b72; } }
body { font: 14px system-ui, sans-serif; color: var(--ink); background: var(--paper);
       margin: 24px auto; max-width: 1100px; padding: 0 16px; overflow-wrap: break-word; }
h1 { font-size: 20px; } h2 { font-size: 16px; margin: 28px 0 4px; } p { margin: 4px 0; }
table { border-collapse: collapse; width: 100%; margin: 6px 0; }
th, td { text-align: left; vertical-align: top; padding: 3px 12px 3px 0;
         border-bottom: 1px solid var(--line); }
th { font-weight: normal; color: var(--faint); font-size: 12px; }
.number { text-align: right; white-space: nowrap; width: 1%; padding: 3px 0 3px 12px;
          font-variant-numeric: tabular-nums; }
td.state { white-space: nowrap; width: 1%; }
td.long { width: 65%; overflow-wrap: anywhere; } .not-here { color: var(--faint); }
.passed { color: var(--passed); } .failed { color: var(--failed); font-weight: 600; }
"""


def html(report: Report) -> str:
    """The page: verdict, what failed, the sections, and the machine."""
    page = Element("html", lang="en")
    head = SubElement(page, "head")
    SubElement(head, "meta", charset="utf-8")
    viewport = {"name": "viewport", "content": "width=device-width, initial-scale=1"}
    SubElement(head, "meta", viewport)
    _text(head, "title", f"kvpool accept: {report.verdict}")
    _text(head, "style", CSS)
    body = SubElement(page, "body")
    _text(body, "h1", report.verdict, "passed" if report.passed else "failed")
    _text(body, "p", f"kvpool {report.versions.get('kvpool', '')}, {_place(report)}, {report.date}")
    failed = [(each, row) for each in report.sections for row in each.failed]
    if failed:
        _text(body, "h2", "What failed")
        _table(body, (), ((s.name, r.name, r.sentence) for s, r in failed))
    _text(body, "h2", "Sections")
    _table(body, ("", *NUMBERS), map(_line, report.sections))
    for section in report.sections:
        _section(body, section)
    for title, facts in (("The machine", report.machine), ("Packages", report.versions)):
        _text(body, "h2", title)
        _table(body, (), facts.items())
    return f"<!DOCTYPE html>\n{tostring(page, encoding='unicode')}\n"


def _place(report: Report) -> str:
    return f"commit {report.commit}" if report.commit else "an installed package"


def _line(section: SectionResult) -> list[str]:
    counts = [f"{section.count(state):,}" for state in (PASSED, FAILED, NOT_HERE)]
    return [section.name, *counts, f"{section.seconds:.1f}"]


def _section(body: Element, section: SectionResult) -> None:
    _text(body, "h2", f"{section.name}: {section.title}")
    cells = ([row.name, row.state, row.sentence, _seconds(row)] for row in section.rows)
    _table(body, ("", "", "", "seconds"), cells)


def _seconds(row: Row) -> str:
    return f"{row.seconds:.2f}" if row.seconds else ""


def _table(body: Element, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Cells that hold a state have its colour; numbers stand to the right."""
    table = SubElement(body, "table")
    if titles:
        line = SubElement(SubElement(table, "thead"), "tr")
        for title in titles:
            _text(line, "th", title, "number" if title in NUMBERS else "")
    lines = SubElement(table, "tbody")
    for cells in rows:
        line = SubElement(lines, "tr")
        for cell in cells:
            _text(line, "td", cell, _class(cell))


def _class(cell: str) -> str:
    if NUMBER.fullmatch(cell):
        return "number"
    return CLASSES.get(cell, "long" if len(cell) > LONG else "")


def _text(parent: Element, tag: str, text: str, named: str = "") -> None:
    """An element with text; never an empty one, which HTML would leave open."""
    element = SubElement(parent, tag, {"class": named} if named else {})
    element.text = UNPRINTABLE.sub("\ufffd", text) or "\u00a0"
