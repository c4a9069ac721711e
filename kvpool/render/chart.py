"""Rows of marks along an axis, as an HTML page. Places are percentages of the axis: style sheets
position the marks, and the browser wraps the words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvpool.render.page import asset, page, text

COLOURS = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#8c6bb1"),
    *("#499894", "#c79a1e", "#d37295", "#9d7660", "#7a8490"),
)
SUFFIXES = (".html",)
MAX_TICKS = 6  # with words
MAX_STEPS = 5  # of a linear axis
GAP = 3.0  # percent of an axis for what it leaves out
APART = 18.0  # percent of an axis between words at its ticks
STRIPES = "repeating-linear-gradient(135deg, var(--stripe) 0 1px, transparent 1px 5px)"
"""Paint of what an axis leaves out."""

Kind = Literal["bar", "thin", "dot", "tick", "whisker"]


@dataclass(frozen=True, slots=True)
class Mark:
    """From `start` to `end`, in the axis's unit; a dot and a tick are at `end`."""

    kind: Kind
    start: float
    end: float
    colour: str
    tooltip: str = ""


@dataclass(frozen=True, slots=True)
class ChartRow:
    """What it is, its figure, and its marks."""

    name: str
    figure: str
    marks: Sequence[Mark]


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """`ticks` are values and their words; a logarithmic axis has a line in ink at 1. A linear one
    may leave out `gaps`, each from a value to another, in order: where nothing is drawn.
    """

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False
    gaps: Sequence[tuple[float, float]] = ()

    def at(self, value: float) -> float:
        """Where a value is, in percent of the axis."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        left_out = sum(stop - start for start, stop in self.gaps)
        # the part of each gap that lies before the value
        parts = [min(max(value - start, 0.0), stop - start) for start, stop in self.gaps]
        widths = (GAP * part / (stop - start) for part, (start, stop) in zip(parts, self.gaps))
        shown = (value - low - sum(parts)) / (high - low - left_out)
        return (100 - GAP * len(parts)) * shown + sum(widths)


@dataclass(frozen=True, slots=True)
class Panel:
    """Rows, and headings between them."""

    heading: str
    axis: ChartAxis
    rows: Sequence[ChartRow | str]


@dataclass(frozen=True, slots=True)
class Chart:
    """Panels, a legend of marks and their words, and sentences below them."""

    title: str
    legend: Sequence[tuple[Kind, str, str]]
    """Kind, colour, words."""
    panels: Sequence[Panel]
    notes: Sequence[str] = ()


def log_axis(low: float, high: float) -> ChartAxis:
    """An axis with a tick at each power of ten from `low` to `high`, some without words."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = math.ceil((last - first + 1) / MAX_TICKS)
    ticks = [(10.0**n, "" if n % every else f"{10.0**n:,g}") for n in range(first, last + 1)]
    return ChartAxis(low, high, ticks, log=True)


def linear_axis(
    high: float, words: Callable[[float], str], gaps: Sequence[tuple[float, float]] = ()
) -> ChartAxis:
    """An axis from 0 with a few round ticks, and one behind each gap."""
    high = high or 1.0
    shown = high - sum(stop - start for start, stop in gaps)
    power = 10.0 ** math.floor(math.log10(shown / MAX_STEPS))
    step = next(n * power for n in (1, 2, 5, 10) if shown / (n * power) <= MAX_STEPS)
    starts, stops = [0.0, *(stop for _, stop in gaps)], [*(start for start, _ in gaps), high]
    values = [
        n * step
        for start, stop in zip(starts, stops)
        for n in range(math.ceil(start / step - 1e-9), math.floor(stop / step + 1e-9) + 1)
    ]
    axis, named = ChartAxis(0.0, high, [], gaps=gaps), list[float]()
    # ends of gaps first: round values have words where these leave room
    for value in [*starts[1:], *values]:
        if all(abs(axis.at(value) - axis.at(other)) >= APART for other in named):
            named.append(value)
    ticks = sorted({*starts[1:], *values})
    return replace(axis, ticks=[(x, words(x) if x in named else "") for x in ticks])


def write_chart(chart: Chart, path: Path, details: str = "") -> None:
    """Writes the page of a chart, with `details` below. Raises OSError, and ValueError for another
    kind of file.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: a chart is a page; the name must end in .html.")
    path.write_text(chart_html(chart, details), encoding="utf-8")


def chart_html(chart: Chart, details: str = "") -> str:
    """One self-contained page; `details` is text below."""
    middle = {"dot": 50.0, "tick": 50.0}
    keys = "".join(
        f'<li><span class="key">{_mark(Mark(kind, 0, 1, colour), 0, middle.get(kind, 100))}</span>'
        f"{text(words)}</li>"
        for kind, colour, words in chart.legend
    )
    body = [f'<ul class="legend">{keys}</ul>']
    for panel in chart.panels:
        body += [f"<h2>{text(panel.heading)}</h2>", _plot(panel)]
    body += [f"<p>{text(note)}</p>" for note in chart.notes]
    body += [f"<pre>{text(details)}</pre>"] if details else []
    return page(chart.title, *body, style=asset("chart.css"))


def _plot(panel: Panel) -> str:
    """A panel below its heading: rules, words at the ticks above and below, and rows."""
    axis = panel.axis
    rules = [("rule", axis.at(value)) for value, _ in axis.ticks]
    rules += [("rule bound", axis.at(1.0))] if axis.log else []
    lines = [f'<i class="{kind}" style="left:{left:.2f}%"></i>' for kind, left in rules]
    lines += [
        f'<i class="gap" style="left:{axis.at(start):.2f}%;width:{GAP:.2f}%;background:{STRIPES}">'
        "</i>"
        for start, _ in axis.gaps
    ]
    words = "".join(
        f'<span style="left:{axis.at(value):.2f}%">{text(words)}</span>'
        for value, words in axis.ticks
        if words
    )
    ticks = f'<div class="ticks">{words}</div>'
    rows = [
        _row(axis, row) if isinstance(row, ChartRow) else f"<h3>{text(row)}</h3>"
        for row in panel.rows
    ]
    return "\n".join(['<div class="plot">', *lines, ticks, *rows, ticks, "</div>"])


def _row(axis: ChartAxis, row: ChartRow) -> str:
    marks = "".join(_mark(mark, axis.at(mark.start), axis.at(mark.end)) for mark in row.marks)
    return (
        f'<div class="row"><span>{text(row.name)}</span>'
        f'<span class="number">{text(row.figure)}</span><div class="marks">{marks}</div></div>'
    )


def _mark(mark: Mark, start: float, end: float) -> str:
    """A mark from `start` to `end` percent."""
    place = f"left:{end:.2f}%"
    if mark.kind in ("bar", "thin", "whisker"):
        place = f"left:{min(start, end):.2f}%;width:{abs(end - start):.2f}%"
    tooltip = f' title="{text(mark.tooltip)}"' if mark.tooltip else ""
    paint = "color" if mark.kind == "whisker" else "background"
    style = f"{place};{paint}:{mark.colour}"
    return f'<i class="mark {mark.kind}" style="{style}"{tooltip}></i>'
