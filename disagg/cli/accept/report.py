"""The report: its JSON form, which docs/accept.md describes, and its page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Literal

import msgspec

from kvpool.render.page import page

FORMAT = "kvpool-accept-2"

State = Literal["passed", "failed", "not here"]
PASSED: State = "passed"
FAILED: State = "failed"
NOT_HERE: State = "not here"
STATES = PASSED, FAILED, NOT_HERE
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


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was tried, how it ended, and its time. `figures` of a timed benchmark are its row of
    `kvpool bench --json`, and `target`, the ratio to reach or None.
    """

    name: str
    state: State
    sentence: str
    seconds: float = 0.0
    figures: Mapping[str, Any] | None = None

    @property
    def cells(self) -> list[Cell]:
        """A line of the page."""
        seconds = f"{self.seconds:.2f} s" if self.seconds else ""
        state = f"state {self.state.replace(' ', '-')}"
        return [
            (self.name, ""),
            (self.state, state),
            (self.sentence, "sentence"),
            (seconds, "number"),
        ]


class SectionResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows of a section, and its time."""

    name: str
    title: str
    seconds: float
    rows: Sequence[Row]

    def count(self, state: State) -> int:
        """How many rows ended so."""
        return sum(row.state == state for row in self.rows)

    @property
    def failed(self) -> list[Row]:
        """The rows that failed."""
        return [row for row in self.rows if row.state == FAILED]

    @property
    def state(self) -> State:
        """Failed if a row has failed; not here if nothing ran."""
        if self.failed:
            return FAILED
        return PASSED if self.count(PASSED) else NOT_HERE

    @property
    def counts(self) -> list[Cell]:
        """A line of the page."""
        numbers = [*(f"{self.count(state):,}" for state in STATES), f"{self.seconds:,.1f}"]
        return [(self.name, ""), *((number, "number") for number in numbers)]

    def lines(self) -> list[str]:
        """One line of text, and one for each row that failed."""
        counts = [f"{self.count(s):,} {s}" for s in STATES if self.count(s)]
        head = f"{self.name:<12} {', '.join(counts)}, {self.seconds:.1f} s"
        return [head, *(f"  FAIL {row.name}: {row.sentence}" for row in self.failed)]


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run of `kvpool accept` found, and the machine that it ran on. `interrupted` is the
    section that was running when this was written, None once the run has ended.
    """

    format: str
    device: str
    passed: bool
    interrupted: str | None
    quick: bool
    complete: bool
    date: str
    seconds: float
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    commit: str | None
    sections: Sequence[SectionResult]

    @property
    def verdict(self) -> str:
        """One line: the device, and how many rows ended how."""
        counts = [
            f"{sum(section.count(state) for section in self.sections):,} {state}"
            for state in STATES
        ]
        extent = "" if self.complete else ", some sections"
        size = ", quick" if self.quick else ""
        word = "passed" if self.passed else "failed"
        if self.interrupted is not None:
            word = f"interrupted in {self.interrupted}"
        return f"{self.device} {word}: {', '.join(counts)}{extent}{size}, {self.seconds:.0f} s"

    def as_json(self) -> bytes:
        """One JSON object."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def as_html(self) -> str:
        """One page: verdict, what failed, the sections, and the machine."""
        version, source = self.versions.get("kvpool", ""), self.commit or "an installed package"
        body = [f"<p>{_text(f'kvpool {version}, {source}, {self.date}')}</p>"]
        failed = [
            ((f"{section.name}: {row.name}", "failed"), (row.sentence, "sentence"))
            for section in self.sections
            for row in section.failed
        ]
        if failed:
            body += ["<h2>What failed</h2>", _table(failed, "rows")]
        titles: list[Cell] = [
            ("", ""),
            *((words, "number quiet") for words in (*STATES, "seconds")),
        ]
        counts = [titles, *(section.counts for section in self.sections)]
        body += ["<h2>Sections</h2>", _table(counts, "counts")]
        for section in self.sections:
            body += [f"<h2>{_text(f'{section.name}: {section.title}')}</h2>"]
            body += [_table((row.cells for row in section.rows), "rows")]
        for title, facts in (("The machine", self.machine), ("Packages", self.versions)):
            lines = (((name, ""), (value, "sentence")) for name, value in facts.items())
            body += [f"<h2>{title}</h2>", _table(lines)]
        style = f"{CSS}h1 {{ color: var(--{'passed' if self.passed else 'found'}); }}\n"
        return page(_printable(f"kvpool accept: {self.verdict}"), *body, style=style)


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
