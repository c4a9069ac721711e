"""The report in its JSON form, which docs/accept.md describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

FORMAT = "kvpool-accept-2"

State = Literal["passed", "failed", "not here"]
STATES: tuple[State, State, State] = ("passed", "failed", "not here")
PASSED, FAILED, NOT_HERE = STATES
COLUMNS = (12, 8, 8, 10, 10)
"""Letters of a section's name, counts and seconds."""
HEADINGS = "section".ljust(COLUMNS[0]) + "".join(
    word.rjust(width) for word, width in zip((*STATES, "seconds"), COLUMNS[1:])
)


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was tried, and how it ended; `figures` if timed: its row of `kvpool bench --json`."""

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
    def state(self) -> State:
        """Failed if a row has failed; not here if nothing ran."""
        return next((state for state in (FAILED, PASSED) if self.count(state)), NOT_HERE)

    def lines(self) -> list[str]:
        """One line of text below HEADINGS, and one for each row that failed."""
        figures = *(f"{self.count(state):,}" for state in STATES), f"{self.seconds:,.1f}"
        cells = (cell.rjust(width) for cell, width in zip(figures, COLUMNS[1:]))
        head = self.name.ljust(COLUMNS[0]) + "".join(cells)
        failed = (row for row in self.rows if row.state == FAILED)
        return [head, *(f"  FAIL {row.name}: {row.sentence}" for row in failed)]


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
        counts = [f"{sum(s.count(state) for s in self.sections):,} {state}" for state in STATES]
        extent = "" if self.complete else ", some sections"
        size = ", quick" if self.quick else ""
        word = "passed" if self.passed else "failed"
        if self.interrupted is not None:
            word = f"interrupted in {self.interrupted}"
        return f"{self.device} {word}: {', '.join(counts)}{extent}{size}, {self.seconds:.0f} s"

    def as_json(self) -> bytes:
        """One JSON object."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"
