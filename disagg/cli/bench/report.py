"""The report of a run, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from disagg.cli.bench.machine import one_line
from disagg.cli.bench.measure import Measurement
from kvpool.render.text import human

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Measurements, and where and when (UTC) they were taken. `quick` sizes fit into caches."""

    machine: Mapping[str, str]
    versions: Mapping[str, str]
    date: str
    quick: bool
    rows: Sequence[Measurement]

    @property
    def title(self) -> str:
        """The device and the day."""
        small = ", quick: sizes too small for rates" if self.quick else ""
        return f"{self.machine['device']}: {self.machine['name']}, {self.date[:10]}{small}"

    def header(self) -> str:
        """Machine, versions and date as lines of text."""
        return f"{one_line(self.machine)}\n{one_line(self.versions)}\n{self.date}"

    def as_dict(self) -> dict[str, Any]:
        """The JSON object; the command's help explains its keys."""
        return {
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "date": self.date,
            "quick": self.quick,
            "rows": [as_dict(row) for row in self.rows],
        }

    def table(self) -> Table:
        """One row per case that ran."""
        from kvpool.render.table import FittedTable

        table = FittedTable(title=self.title)
        table.add_column("", no_wrap=True)
        table.add_column("case")
        for name in ("bytes", "time", "GiB/s", "bound", "ratio", "beyond"):
            table.add_column(name, justify="right", no_wrap=True)
        group = ""
        for row in self.rows:
            if row.seconds is None or row.reference_seconds is None:
                continue
            if group and row.case.group != group:
                table.add_section()
            first = "" if row.case.group == group else row.case.group
            group = row.case.group
            moved = human(row.case.nbytes) if row.case.nbytes else "-"
            bound = row.reference_rate if row.moves else None
            rates = (
                number_of(row.rate),
                number_of(bound) if bound else time_of(row.reference_seconds),
            )
            cells = moved, time_of(row.seconds), *rates, number_of(row.ratio)
            beyond = time_of(row.beyond) if row.beyond and row.beyond > 0 else "-"
            table.add_row(first, row.case.name, *cells, beyond)
        table.caption = (
            "medians of rounds; bound: a plain copy of as many bytes, or the reference's time; "
            "ratio: the bound's time over ours, round by round; beyond: our time less the bound's, "
            "where that is more"
        )
        return table

    def print(self, console: Console) -> None:
        """Prints header, table and what was left out."""
        from rich.text import Text

        console.print(Text(self.header()), soft_wrap=True)
        console.print(self.table(), crop=False)
        for line in self.left_out():
            console.print(Text(line), soft_wrap=True)

    def left_out(self) -> list[str]:
        """Why cases did not run, one sentence per reason."""
        alike: dict[tuple[str, str | None, str], list[Measurement]] = {}
        for row in self.rows:
            if row.reason is not None:
                key = row.case.group, row.case.engine, row.reason
                alike.setdefault(key, []).append(row)
        return [
            f"{'failed' if rows[0].failed else 'not run'}: {_named(group, rows)}: {reason}"
            for (group, _, reason), rows in alike.items()
        ]


def _named(group: str, rows: Sequence[Measurement]) -> str:
    if len(rows) == 1:
        return f"{group} {rows[0].case.name}"
    return f"{group} {rows[0].case.name} and {len(rows) - 1} more"


def as_dict(row: Measurement) -> dict[str, Any]:
    """A row of the JSON object."""
    return {
        "group": row.case.group,
        "case": row.case.name,
        "engine": row.case.engine,
        "bytes": row.case.nbytes,
        "bound": row.case.bound,
        "seconds": row.seconds,
        "reference_seconds": row.reference_seconds,
        "gib_per_second": row.rate,
        "reference_gib_per_second": row.reference_rate,
        "ratio": row.ratio,
        "beyond_seconds": row.beyond,
        "rounds": row.rounds,
        "reason": row.reason,
        "failed": row.failed,
    }


def sentence_of(row: Measurement) -> str:
    """What a measurement has found."""
    ratio = row.ratio or 0.0
    rate = f", {row.rate:.2f} GiB/s" if row.rate else ""
    bound = "a plain copy" if row.moves else row.case.bound
    times = f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"
    return f"{time_of(row.seconds or 0.0)}{rate}, {times} times as fast as {bound}"


def time_of(seconds: float) -> str:
    """In milliseconds or microseconds."""
    return f"{1e3 * seconds:,.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:,.1f} µs"


def number_of(value: float | None) -> str:
    """With two digits or more."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
