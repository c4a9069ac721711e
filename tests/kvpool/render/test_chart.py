"""Charts: where values are, and what a file holds."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, strategies as st

from kvpool.render.chart import (
    Chart,
    ChartRow,
    Mark,
    Panel,
    chart_html,
    chart_svg,
    linear_axis,
    log_axis,
)

SVG = "{http://www.w3.org/2000/svg}"


def one(*marks, axis=None, name="a row", figure="7"):
    """A chart of one row."""
    panel = Panel("heading", axis or linear_axis(100.0, str), [ChartRow(name, figure, marks)])
    return Chart("title", [("bar", "#123456", "a bar")], [panel])


def places(chart, tag):
    """Attributes of the drawn elements that have a colour of ours."""
    root = ElementTree.fromstring(chart_svg(chart))
    (panel,) = (svg for svg in root.findall(f"{SVG}svg") if svg.get("width") == "100%")
    return [each.attrib for each in panel.iter(f"{SVG}{tag}") if "class" not in each.attrib]


def test_a_bar_reaches_from_its_start_to_its_end_where_a_dot_and_a_tick_are():
    (bar,) = places(one(Mark("bar", 25.0, 75.0, "#abc")), "rect")
    assert (bar["x"], bar["width"], bar["fill"]) == ("23.00%", "42.00%", "#abc")
    (dot,) = places(one(Mark("dot", 0.0, 50.0, "#abc")), "circle")
    (tick,) = places(one(Mark("tick", 0.0, 100.0, "#abc")), "line")
    assert (dot["cx"], tick["x1"], tick["x2"]) == ("44.00%", "86.00%", "86.00%")


def test_what_lies_outside_an_axis_is_at_its_end():
    axis = log_axis(0.001, 1.0)
    assert [axis.at(value) for value in (1e-9, 0.001, 1.0, 50.0)] == [2.0, 2.0, 86.0, 86.0]


@given(st.integers(-9, 0), st.integers(0, 9))
def test_a_logarithmic_axis_names_few_powers_of_ten_and_always_one(first, last):
    axis = log_axis(10.0**first, 2 * 10.0**last)
    assert [value for value, _ in axis.ticks] == [10.0**n for n in range(first, last + 1)]
    named = [words for _, words in axis.ticks if words]
    assert "1" in named and len(named) <= 6
    gaps = [axis.at(b[0]) - axis.at(a[0]) for a, b in zip(axis.ticks, axis.ticks[1:])]
    assert gaps == pytest.approx(gaps[:1] * len(gaps))


@given(st.floats(1e-7, 1e6))
def test_a_linear_axis_has_few_round_ticks_from_0_on(high):
    ticks = [value for value, _ in linear_axis(high, str).ticks]
    assert ticks[0] == 0.0 and 2 <= len(ticks) <= 6 and ticks[-1] <= high * (1 + 1e-6)
    assert f"{ticks[1]:e}"[0] in "125" and ticks[1] > high - ticks[-1] - 1e-6 * high


def test_names_cannot_break_out_of_a_chart():
    wrong = "</script></svg><b>&"
    chart = one(Mark("bar", 0, 1, "#abc", wrong), name=wrong, figure=wrong)
    chart = Chart(wrong, [("dot", "#abc", wrong)], chart.panels, [wrong])
    assert wrong in "".join(ElementTree.fromstring(chart_svg(chart)).itertext())
    text = chart_html(chart, wrong)
    assert wrong not in text and text.count("</svg>") == 2


def test_charts_need_nothing_from_elsewhere():
    for text in (chart_svg(one()), chart_html(one())):
        assert not re.findall(r"href|src|@import|fetch|http(?!://www.w3.org/2000/svg)", text)
