"""All cases, and the report of a run, as JSON, as a table and as a picture of its ratios."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from disagg.cli.bench.case import BenchCase, Measurement, Sizes
from disagg.cli.bench.memory import memory_cases
from disagg.cli.bench.transfers import handoff_cases, transfer_cases
from disagg.engines.base import engine_names
from kvpool.layout.units import human
from kvpool.render.chart import COLOURS, Chart, ChartRow, Kind, Mark, Panel, log_axis

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GROUPS = ("store", "load", "move", "gather", "scatter", "transfer", "handoff")
HANDOFF_ENGINES = ("local",)  # where no engine is named: hand-offs of the others take minutes
CAPTION = (
    "medians of rounds; bound: a plain copy of as many bytes, or the reference's time; ratio: the "
    "bound's time over ours, round by round; beyond: our time less the bound's, where that is more"
)
LEGEND: tuple[tuple[Kind, str, str], ...] = (
    ("dot", COLOURS[0], "median ratio of the rounds"),
    ("whisker", "currentColor", "the middle half of the rounds"),
    ("tick", "currentColor", "1: as fast as a plain copy, or what is in brackets"),
)
WORST = 0.001  # where the chart's axis begins; of worse ratios at their power of ten


def all_cases(sizes: Sizes, engines: Sequence[str] = ()) -> list[BenchCase]:
    """Every case, of `engines` where any is named, whether it can run here or not."""
    cases = [*memory_cases(sizes), *transfer_cases(sizes, engines or engine_names())]
    return [*cases, *handoff_cases(sizes, engines or HANDOFF_ENGINES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Measurements, and where and when (UTC) they were taken: the JSON object, whose keys the
    command's help explains. `quick` sizes fit into caches.
    """

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

    @property
    def ran(self) -> list[Measurement]:
        """The rows that have figures."""
        return [row for row in self.rows if row.ratio is not None]

    def header(self) -> str:
        """Machine, versions and date as lines of text."""
        lines = (
            ", ".join(f"{name} {value}" for name, value in facts.items())
            for facts in (self.machine, self.versions)
        )
        return "\n".join([*lines, self.date])

    def table(self) -> Table:
        """One row per case that ran."""
        from kvpool.render.table import FittedTable

        table = FittedTable(title=self.title, caption=CAPTION)
        table.add_column("", no_wrap=True)
        table.add_column("case")
        for name in ("bytes", "time", "GiB/s", "bound", "ratio", "beyond"):
            table.add_column(name, justify="right", no_wrap=True)
        for group, rows in groupby(self.ran, lambda row: row.group):
            table.add_section()
            for number, row in enumerate(rows):
                table.add_row("" if number else group, row.case, *figures(row))
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
                alike.setdefault((row.group, row.engine, row.reason), []).append(row)
        lines = []
        for (group, _, reason), rows in alike.items():
            word = "failed" if rows[0].failed else "not run"
            more = f" and {len(rows) - 1} more" if rows[1:] else ""
            lines.append(f"{word}: {group} {rows[0].case}{more}: {reason}")
        return lines

    def chart(self) -> Chart:
        """The ratios on a logarithmic axis from WORST, or from the worst ratio."""
        ratios = [ratio for row in self.ran for ratio in row.ratio_quartiles or () if ratio]
        lowest = math.floor(math.log10(min([WORST, *ratios])))
        axis = log_axis(10.0**lowest, 1.2 * max([1.0, *ratios]))
        rows = list[ChartRow | str]()
        for group, of_group in groupby(self.ran, lambda row: row.group):
            rows += [group, *map(chart_row, of_group)]
        panel = Panel("Speed relative to the bound, right is better", axis, rows)
        return Chart(self.title, LEGEND, [panel], self.left_out())


def chart_row(row: Measurement) -> ChartRow:
    """A row's line begins at 1, so that what is far from its bound is long. A dot may hide its
    whisker: the figures have the spread too.
    """
    times = time_of(row.seconds), time_of(row.reference_seconds)
    words = f"{row.case}: {times[0]}, {row.bound} {times[1]}"
    ratio, (low, high) = row.ratio or 0.0, row.ratio_quartiles or (0.0, 0.0)
    spread = f"{number_of(low)} to {number_of(high)}"
    words += f"; half of {row.rounds} rounds: {spread}"
    marks = [
        Mark(kind="thin", start=1.0, end=ratio, colour=COLOURS[0], tooltip=words),
        Mark(kind="whisker", start=low, end=high, colour="currentColor", tooltip=words),
        Mark(kind="dot", start=ratio, end=ratio, colour=COLOURS[0], tooltip=words),
    ]
    name = row.case if row.moves else f"{row.case} ({row.bound})"
    return ChartRow(name, f"{number_of(ratio)} ({spread})", marks)


def sentence_of(row: Measurement) -> str:
    """What a measurement has found."""
    rate = f", {row.gib_per_second:.2f} GiB/s" if row.gib_per_second else ""
    bound = "a plain copy" if row.moves else row.bound
    return f"{time_of(row.seconds)}{rate}, {number_of(row.ratio)} times as fast as {bound}"


def time_of(seconds: float | None) -> str:
    """In milliseconds or microseconds."""
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:,.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:,.1f} µs"


def number_of(value: float | None) -> str:
    """With two digits or more."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def figures(row: Measurement) -> tuple[str, ...]:
    """A row of the table."""
    rate, beyond = row.reference_gib_per_second, row.beyond_seconds
    return (
        human(row.bytes) if row.bytes else "-",
        time_of(row.seconds),
        number_of(row.gib_per_second),
        number_of(rate) if rate and row.moves else time_of(row.reference_seconds),
        number_of(row.ratio),
        time_of(beyond) if beyond and beyond > 0 else "-",
    )
