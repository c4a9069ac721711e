"""The report of a run, as JSON, as a table and as a picture of its ratios."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import TYPE_CHECKING, Any

from disagg.cli.bench.case import BenchCase
from disagg.cli.bench.measure import GROUPS, Measurement
from kvpool.render.chart import COLOURS, Chart, ChartAxis, ChartRow, Kind, Mark, Panel, log_axis
from kvpool.render.text import human

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

CAPTION = (
    "medians of rounds; bound: a plain copy of as many bytes, or the reference's time; ratio: the "
    "bound's time over ours, round by round; beyond: our time less the bound's, where that is more"
)
WORST = 0.001
"""Where the chart's axis begins; of worse ratios at their power of ten."""
HEADINGS = {
    True: "Rate relative to a plain copy of as many bytes",
    False: "Speed relative to another implementation",
}
"""Of the chart's panels, by whether a plain copy bounds the cases."""

TARGET_GPU = "H200"
"""What the name of the GPU contains that the targets are for."""
TARGETS = {
    # what docs/performance.md calls it: the least ratio to a device copy, patterns of `group: case`
    "store of K and V, store of MLA rows in bf16": (0.85, ["store: K and V *", "store: MLA bf16*"]),
    "store of fp8 rows: MLA 656, index keys 132, DSv4 584": (0.70, ["store: *fp8, *"]),
    "move of pages in all layers": (0.85, ["move: *"]),
    "gather and scatter, runs of 512 bytes and up": (0.80, ["gather: *", "scatter: *"]),
}


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
        lines = (
            ", ".join(f"{name} {value}" for name, value in facts.items())
            for facts in (self.machine, self.versions)
        )
        return "\n".join([*lines, self.date])

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

        table = FittedTable(title=self.title, caption=CAPTION)
        table.add_column("", no_wrap=True)
        table.add_column("case")
        for name in ("bytes", "time", "GiB/s", "bound", "ratio", "beyond"):
            table.add_column(name, justify="right", no_wrap=True)
        ran = [row for row in self.rows if row.ratio is not None]
        for group, rows in groupby(ran, lambda row: row.case.group):
            table.add_section()
            for number, row in enumerate(rows):
                table.add_row("" if number else group, row.case.name, *_figures(row))
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
        lines = []
        for (group, _, reason), rows in alike.items():
            word = "failed" if rows[0].failed else "not run"
            more = f" and {len(rows) - 1} more" if rows[1:] else ""
            lines.append(f"{word}: {group} {rows[0].case.name}{more}: {reason}")
        return lines

    def chart(self) -> Chart:
        """Two panels, of cases bounded by a plain copy and of those with another reference, on a
        logarithmic axis, so that the worst can be seen.
        """
        rows = [row for row in self.rows if row.ratio is not None]
        panels = [
            Panel(f"{heading}, right is better", _axis(of_kind), list(_chart_rows(of_kind)))
            for moves, heading in HEADINGS.items()
            if (of_kind := [row for row in rows if row.moves is moves])
        ]
        groups = [group for group in GROUPS if any(row.case.group == group for row in rows)]
        legend: list[tuple[Kind, str, str]] = [("dot", _colour(group), group) for group in groups]
        legend += [("tick", "currentColor", "1: as fast as the copy, or the other implementation")]
        return Chart(self.title, legend, panels, self.left_out())


def target_of(case: BenchCase) -> float | None:
    """The least ratio of a case on the GPU that targets are for, or None."""
    for ratio, patterns in TARGETS.values():
        if any(fnmatchcase(case.title, pattern) for pattern in patterns):
            return ratio
    return None


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
    return f"{time_of(row.seconds)}{rate}, {times} times as fast as {bound}"


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


def _figures(row: Measurement) -> Iterator[str]:
    """Cells of the table."""
    yield human(row.case.nbytes) if row.case.nbytes else "-"
    yield time_of(row.seconds)
    yield number_of(row.rate)
    bound = row.reference_rate if row.moves else None
    yield number_of(bound) if bound else time_of(row.reference_seconds)
    yield number_of(row.ratio)
    yield time_of(row.beyond) if row.beyond and row.beyond > 0 else "-"


def _axis(rows: Sequence[Measurement]) -> ChartAxis:
    """From WORST to 1, or as far as there are ratios."""
    ratios = [row.ratio for row in rows if row.ratio]
    lowest = math.floor(math.log10(min([WORST, *ratios])))
    return log_axis(10.0**lowest, 1.2 * max([1.0, *ratios]))


def _chart_rows(rows: Sequence[Measurement]) -> Iterator[ChartRow | str]:
    """A row's line begins at 1, so that what is far from its bound is long."""
    for group, measurements in groupby(rows, lambda row: row.case.group):
        yield group
        for row in measurements:
            case, ratio = row.case, row.ratio or 0.0
            times = time_of(row.seconds), time_of(row.reference_seconds)
            words = f"{case.name}: {times[0]}, {case.bound} {times[1]}"
            kinds: tuple[Kind, Kind] = ("thin", "dot")
            marks = [Mark(kind, 1.0, ratio, _colour(group), words) for kind in kinds]
            name = case.name if row.moves else f"{case.name} ({case.bound})"
            yield ChartRow(name, number_of(ratio), marks)


def _colour(group: str) -> str:
    return COLOURS[GROUPS.index(group)]
