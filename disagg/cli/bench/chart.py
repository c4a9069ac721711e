"""The ratios of a report as a picture: on a logarithmic axis, so that the worst can be seen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from disagg.cli.bench.cases import GROUPS
from disagg.cli.bench.measure import Measurement
from disagg.cli.bench.report import BenchReport, number_of, time_of
from kvpool.render.chart import COLOURS, Chart, ChartAxis, ChartRow, Kind, Mark, Panel, log_axis

WORST = 0.001
"""Where the axis begins; of worse ratios at their power of ten."""
COPIES = "Rate relative to a plain copy of as many bytes"
HOST_WORK = "Speed relative to another implementation"


def chart_of(report: BenchReport) -> Chart:
    """Two panels: cases bounded by a plain copy, and those with another reference."""
    rows = [row for row in report.rows if row.ratio is not None]
    panels = [
        Panel(heading, _axis(of_kind), list(_rows(of_kind)), "right is better")
        for heading, moves in ((COPIES, True), (HOST_WORK, False))
        if (of_kind := [row for row in rows if row.moves is moves])
    ]
    groups = [group for group in GROUPS if any(row.case.group == group for row in rows)]
    legend: list[tuple[Kind, str, str]] = [("dot", _colour(group), group) for group in groups]
    legend += [("tick", "currentColor", "1: as fast as the copy, or the other implementation")]
    return Chart(report.title, legend, panels, report.left_out())


def _axis(rows: Sequence[Measurement]) -> ChartAxis:
    """From WORST to 1, or as far as there are ratios."""
    ratios = [row.ratio for row in rows if row.ratio]
    lowest = math.floor(math.log10(min([WORST, *ratios])))
    return log_axis(10.0**lowest, 1.2 * max([1.0, *ratios]))


def _rows(rows: Sequence[Measurement]) -> Iterator[ChartRow | str]:
    for group, measurements in groupby(rows, lambda row: row.case.group):
        yield group
        for row in measurements:
            yield _row(row)


def _row(row: Measurement) -> ChartRow:
    """Its line begins at 1, so that what is far from its bound is long."""
    ratio, colour = row.ratio or 0.0, _colour(row.case.group)
    taken, bound = time_of(row.seconds or 0.0), time_of(row.reference_seconds or 0.0)
    words = f"{row.case.name}: {taken}, {row.case.bound} {bound}"
    name = row.case.name if row.moves else f"{row.case.name} ({row.case.bound})"
    marks = [Mark(kind, 1.0, ratio, colour, words) for kind in ("thin", "dot")]
    return ChartRow(name, number_of(ratio), marks)


def _colour(group: str) -> str:
    return COLOURS[GROUPS.index(group)]
