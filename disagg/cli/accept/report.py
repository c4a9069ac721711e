"""The report: its JSON form, which docs/accept.md describes, and its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from kvpool.render.page import Cell, asset, page, printable, table, text

FORMAT = "kvpool-accept-2"

State = Literal["passed", "failed", "not here"]
STATES: tuple[State, State, State] = ("passed", "failed", "not here")
PASSED, FAILED, NOT_HERE = STATES


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was tried, how it ended, and its time. `figures` of a timed benchmark are its row of
    `kvpool bench --json`, and `target`, the ratio to reach or None.
    """

    name: str
    state: State
    sentence: str
    seconds: float = 0.0
    figures: Mapping[str, Any] | None = None


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
        return next((state for state in (FAILED, PASSED) if self.count(state)), NOT_HERE)

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
        body = [f"<p>{text(f'kvpool {version}, {source}, {self.date}')}</p>"]
        failed = [
            [(f"{section.name}: {row.name}", "failed"), (row.sentence, "sentence")]
            for section in self.sections
            for row in section.failed
        ]
        if failed:
            body += ["<h2>What failed</h2>", table(failed, "rows")]
        titles = [("", ""), *((words, "number quiet") for words in (*STATES, "seconds"))]
        counts = [
            [
                (section.name, ""),
                *((f"{section.count(state):,}", "number") for state in STATES),
                (f"{section.seconds:,.1f}", "number"),
            ]
            for section in self.sections
        ]
        body += ["<h2>Sections</h2>", table([titles, *counts], "counts")]
        for section in self.sections:
            body += [f"<h2>{text(f'{section.name}: {section.title}')}</h2>"]
            body += [table(map(_cells, section.rows), "rows")]
        for title, facts in (("The machine", self.machine), ("Packages", self.versions)):
            lines = (((name, ""), (value, "sentence")) for name, value in facts.items())
            body += [f"<h2>{title}</h2>", table(lines)]
        style = (
            f"{asset('table.css')}h1 {{ color: var(--{'passed' if self.passed else 'found'}); }}\n"
        )
        return page(printable(f"kvpool accept: {self.verdict}"), *body, style=style)


def _cells(row: Row) -> list[Cell]:
    state = f"state {row.state.replace(' ', '-')}"
    seconds = f"{row.seconds:.2f} s" if row.seconds else ""
    cells = (row.name, ""), (row.state, state), (row.sentence, "sentence"), (seconds, "number")
    return [*cells]
