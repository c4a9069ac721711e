"""A bar chart of ratios; the bound is at 1."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from disagg.cli.bench.cases import GROUPS
from disagg.cli.bench.measure import Measurement
from disagg.cli.bench.report import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".html", ".png")
COLOURS = (
    *("#1f78b4", "#33a02c", "#d95f02", "#6a3d9a", "#c51b8a"),
    *("#00796b", "#8c6d1f", "#7f4f24", "#a50f15", "#525252"),
)
BAR_INCHES, HEAD_INCHES, LINE_INCHES = 0.24, 1.0, 0.17
WIDTH_INCHES = 10.0
LETTERS = 140  # of a line
HTML = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 14px system-ui, sans-serif; margin: 24px auto; max-width: 1100px; }}
svg {{ max-width: 100%; height: auto; }} pre {{ white-space: pre-wrap; }}</style></head>
<body>{svg}<pre>{header}</pre></body></html>
"""


def chart_problem(path: Path) -> str | None:
    """Why no chart can be written to `path`, or None."""
    if path.suffix not in SUFFIXES:
        return f"{path}: the name must end in {', '.join(SUFFIXES)}."
    if find_spec("matplotlib") is None:
        return "matplotlib is not installed. pip install 'kvpool[viz]'."
    return None


def write_chart(report: Report, path: Path) -> None:
    """Writes an image, or an HTML page with one. Raises OSError."""
    figure = drawn(report)
    if path.suffix == ".png":
        figure.savefig(path, dpi=150)
        return
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    if path.suffix == ".html":
        svg = svg[svg.index("<svg") :]
        svg = HTML.format(title=escape(report.title), svg=svg, header=escape(report.header()))
    path.write_text(svg, encoding="utf-8")


def drawn(report: Report) -> Figure:
    """Two panels: cases bounded by a plain copy, and host work on a logarithmic scale."""
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.ratio is not None]
    panels = [[row for row in rows if row.moves is moves] for moves in (True, False)]
    panels = [panel for panel in panels if panel]
    notes = [line for sentence in report.left_out() for line in wrap(sentence, LETTERS)]
    body = sum(HEAD_INCHES + BAR_INCHES * len(panel) for panel in panels)
    figure = Figure(
        figsize=(WIDTH_INCHES, HEAD_INCHES + body + LINE_INCHES * len(notes)), layout="constrained"
    )
    figure.suptitle(report.title, fontsize=11)
    if panels:
        sizes = [HEAD_INCHES + BAR_INCHES * len(panel) for panel in panels]
        axes = figure.subplots(len(panels), squeeze=False, height_ratios=sizes)[:, 0]
        for axis, panel in zip(axes, panels):
            _bars(axis, panel)
    if notes:
        figure.supxlabel("\n".join(notes), fontsize=7, x=0.01, ha="left")
    return figure


def _bars(axis: Any, rows: Sequence[Measurement]) -> None:
    names = [f"{row.case.group}: {row.case.name}" for row in rows]
    colours = [COLOURS[GROUPS.index(row.case.group)] for row in rows]
    ratios = [row.ratio or 0.0 for row in rows]
    places = range(len(rows))
    start = 0.0 if rows[0].moves else 1.0  # a logarithmic axis has no zero
    axis.barh(places, [r - start for r in ratios], left=start, color=colours, height=0.7)
    axis.axvline(1.0, color="#222", linewidth=1)
    axis.set_yticks(places, names, fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    if rows[0].moves:
        axis.set_xlim(0, 1.1 * max(1.1, *ratios))
        axis.set_xlabel("rate relative to a plain copy of as many bytes", fontsize=8)
    else:
        axis.set_xscale("log")
        axis.set_xlim(0.7 * min(0.7, *ratios), 1.5 * max(2.0, *ratios))
        axis.xaxis.set_major_formatter("{x:g}")
        known = "plain Python, a new plan, or the bare engine"
        axis.set_xlabel(f"times as fast as the reference: {known}", fontsize=8)
    for context, ratio in zip(places, ratios):
        axis.text(max(ratio, start), context, f" {ratio:.2g}", va="center", fontsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
