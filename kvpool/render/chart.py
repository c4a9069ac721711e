"""Rows of marks along an axis, as SVG or HTML: a row's words above its marks, so that narrow
screens show all of it. Places are percentages: a picture is as wide as what it is in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from textwrap import wrap
from typing import Literal
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from kvpool.render.page import FONT, THEME, add, page

COLOURS = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#8c6bb1"),
    *("#499894", "#c79a1e", "#d37295", "#9d7660", "#7a8490"),
)
SUFFIXES = (".html", ".svg")
WIDTH = 900  # pixels of a file, and of a page at most
LINE, ROW, BAR = 18, 34, 10  # pixels
LETTER = 7.0  # pixels of a character
NAME = 42  # characters of a line of a name: beside its figure it fits on a phone
MAX_TICKS = 6  # with words
MAX_STEPS = 5  # of a linear axis
FIRST, SPAN, END = 2.0, 84.0, 98.0  # percent: where an axis begins, its length, figures
STYLE = f"""
svg {{ color: var(--ink); }} svg text {{ font: 12px {FONT}; fill: var(--ink); }}
svg .words {{ stroke: var(--paper); stroke-width: 4; paint-order: stroke; }}
svg .title {{ font-size: 16px; font-weight: 600; }} svg .head {{ font-weight: 600; }}
svg .quiet {{ fill: var(--quiet); }} svg .number {{ font-variant-numeric: tabular-nums; }}
svg .rule {{ stroke: var(--line); }} svg .bound {{ stroke: var(--ink); stroke-width: 1.5; }}
svg .paper {{ fill: var(--paper); }}
"""
PAGE_STYLE = f"""
main {{ max-width: {WIDTH}px; }}
ul.legend {{ display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; padding: 0; }}
ul.legend li {{ display: flex; align-items: center; gap: 6px; }}
"""

Kind = Literal["bar", "thin", "dot", "tick"]


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
    """From `low` to `high`. `ticks` are values and their words; where it is logarithmic, a line in
    ink is at 1.
    """

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value is, in percent of the picture's width."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return FIRST + SPAN * (value - low) / (high - low)


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
    ticks = [
        (10.0**power, "" if power % every else f"{10.0**power:,g}")
        for power in range(first, last + 1)
    ]
    return ChartAxis(low, high, ticks, log=True)


def linear_axis(high: float, words: Callable[[float], str]) -> ChartAxis:
    """An axis from 0 with a few round ticks."""
    high = high or 1.0
    power = 10.0 ** math.floor(math.log10(high / MAX_STEPS))
    step = next(n * power for n in (1, 2, 5, 10) if high / (n * power) <= MAX_STEPS)
    many = math.floor(high / step + 1e-9)
    return ChartAxis(0.0, high, [(n * step, words(n * step)) for n in range(many + 1)])


def write_chart(chart: Chart, path: Path, details: str = "") -> None:
    """Writes an SVG, or an HTML page with `details` below. Raises OSError."""
    page = path.suffix == ".html"
    path.write_text(chart_html(chart, details) if page else chart_svg(chart), encoding="utf-8")


def chart_svg(chart: Chart) -> str:
    """One self-contained SVG."""
    root = Element("svg", xmlns="http://www.w3.org/2000/svg", width=f"{WIDTH}")
    add(root, "title", chart.title)
    add(root, "style", THEME + STYLE)
    add(root, "rect", class_="paper", width="100%", height="100%")
    y = 28.0
    for line in wrap(chart.title, int(WIDTH / 10)):
        add(root, "text", line, x="2%", y=y, class_="title")
        y += 22
    x = 0.02 * WIDTH
    for kind, colour, words in chart.legend:
        width = 30 + LETTER * len(words)
        if x + width > 0.98 * WIDTH:
            x, y = 0.02 * WIDTH, y + LINE
        key = _key(kind, colour)
        key.attrib.update(x=f"{x:g}", y=f"{y - 9:g}")
        root.append(key)
        add(root, "text", words, x=x + 24, y=y)
        x += width + 14
    y += LINE
    for panel in chart.panels:
        add(root, "text", panel.heading, x="2%", y=y + 12, class_="head")
        drawing, height = _drawn(panel)
        drawing.set("y", f"{y + 20:.0f}")
        root.append(drawing)
        y += height + 44
    for note in chart.notes:
        for line in wrap(note, int(0.96 * WIDTH / LETTER)):
            add(root, "text", line, x="2%", y=y, class_="quiet")
            y += LINE
    root.set("height", f"{y + 8:.0f}")
    return ElementTree.tostring(root, encoding="unicode")


def chart_html(chart: Chart, details: str = "") -> str:
    """One self-contained page; `details` is text below."""
    legend = "".join(
        f"<li>{ElementTree.tostring(_key(kind, colour), 'unicode')}{escape(words)}</li>"
        for kind, colour, words in chart.legend
    )
    body = ["<main>", f'<ul class="legend">{legend}</ul>']
    for panel in chart.panels:
        drawing, _ = _drawn(panel)
        drawing.set("role", "img")
        drawing.set("aria-label", panel.heading)
        body += [f"<h2>{escape(panel.heading)}</h2>", ElementTree.tostring(drawing, "unicode")]
    body += [f"<p>{escape(note)}</p>" for note in chart.notes]
    body += [f"<pre>{escape(details)}</pre>"] if details else []
    return page(chart.title, *body, "</main>", style=STYLE + PAGE_STYLE)


def _key(kind: Kind, colour: str) -> Element:
    """A mark of the legend."""
    key = Element("svg", width="18", height=f"{BAR}")
    start, end = (50.0, 50.0) if kind in ("dot", "tick") else (5.0, 95.0)
    _mark(key, Mark(kind, 0, 1, colour), start, end, 0.0)
    return key


def _drawn(panel: Panel) -> tuple[Element, float]:
    """A panel without its heading, and its height in pixels."""
    root, axis, top = Element("svg", width="100%"), panel.axis, float(LINE)
    names = [wrap(row.name, NAME) if isinstance(row, ChartRow) else [row] for row in panel.rows]
    starts = list(accumulate((ROW + LINE * (len(name) - 1) for name in names), initial=top))
    _grid(root, axis, top, starts[-1])
    for y, name, row in zip(starts, names, panel.rows):
        if isinstance(row, ChartRow):
            _row(root, axis, row, name, y)
        else:
            add(root, "text", row, x=f"{FIRST:g}%", y=y + 24, class_="head")
    height = starts[-1] + LINE
    root.set("height", f"{height:.0f}")
    return root, height


def _grid(root: Element, axis: ChartAxis, top: float, bottom: float) -> None:
    """Lines at the ticks and at the bound, and words above and below."""
    lines = [("rule", axis.at(value)) for value, _ in axis.ticks]
    lines += [("bound", axis.at(1.0))] if axis.log else []
    for name, x in lines:
        add(root, "line", class_=name, x1=f"{x:.2f}%", x2=f"{x:.2f}%", y1=top - 4, y2=bottom)
    for value, words in axis.ticks:
        x = axis.at(value)
        anchor = "start" if x < 10 else "middle"
        for y in (top - 6, bottom + 13) if words else ():
            place = {"x": f"{x:.2f}%", "y": y, "text_anchor": anchor}
            add(root, "text", words, class_="quiet number", **place)


def _row(root: Element, axis: ChartAxis, row: ChartRow, name: Sequence[str], y: float) -> None:
    """Draws a row at `y`: the lines of its name, its figure, its marks."""
    y += 14 - LINE
    for line in name:
        y += LINE
        add(root, "text", line, class_="words", x=f"{FIRST:g}%", y=y)
    end = {"x": f"{END:g}%", "y": y, "text_anchor": "end"}
    add(root, "text", row.figure, class_="words number", **end)
    for mark in row.marks:
        _mark(root, mark, axis.at(mark.start), axis.at(mark.end), y + 3)


def _mark(parent: Element, mark: Mark, start: float, end: float, y: float) -> None:
    """Draws a mark from `start` to `end` percent, in a line of BAR pixels at `y`."""
    low, high, middle = min(start, end), max(start, end), y + BAR / 2
    paint = {"fill": mark.colour}
    if mark.kind == "dot":
        drawn = add(parent, "circle", cx=f"{end:.2f}%", cy=middle, r=BAR / 2, **paint)
    elif mark.kind == "tick":
        ends = {"x1": f"{end:.2f}%", "x2": f"{end:.2f}%", "y1": y - 1, "y2": y + BAR + 1}
        drawn = add(parent, "line", stroke=mark.colour, stroke_width=2.5, **ends)
    else:
        height = 2.0 if mark.kind == "thin" else BAR
        place = {"x": f"{low:.2f}%", "y": middle - height / 2, "height": height}
        paint["stroke"] = mark.colour  # a pixel at least
        drawn = add(parent, "rect", width=f"{high - low:.2f}%", **place, **paint)
    if mark.tooltip:
        add(drawn, "title", mark.tooltip)
