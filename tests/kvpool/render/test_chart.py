"""Charts: where values are, and what a page holds."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, strategies as st

from kvpool.render.chart import (
    Chart,
    ChartRow,
    Mark,
    Panel,
    chart_html,
    linear_axis,
    log_axis,
    write_chart,
)


def chart_of(*marks, name="a row", figure="7"):
    """A chart of one row."""
    panel = Panel("heading", linear_axis(100.0, str), [ChartRow(name, figure, marks)])
    return Chart("title", [("bar", "#123456", "a bar")], [panel])


def test_a_bar_reaches_from_its_start_to_its_end_where_a_dot_and_a_tick_are():
    marks = Mark("bar", 75.0, 25.0, "#abc"), Mark("dot", 0.0, 50.0, "#abc")
    text = chart_html(chart_of(*marks, Mark("tick", 0.0, 100.0, "#abc", "ends <here>")))
    style = '<i class="mark {}" style="left:{}%;{}background:#abc"'
    assert style.format("bar", "25.00", "width:50.00%;") in text
    assert style.format("dot", "50.00", "") in text
    whisker = chart_html(chart_of(Mark("whisker", 25.0, 75.0, "#abc")))
    assert '<i class="mark whisker" style="left:25.00%;width:50.00%;color:#abc"' in whisker
    assert style.format("tick", "100.00", "") + ' title="ends &lt;here&gt;"' in text


def test_what_lies_outside_an_axis_is_at_its_end():
    axis = log_axis(0.001, 1.0)
    assert [axis.at(value) for value in (1e-9, 0.001, 1.0, 50.0)] == [0.0, 0.0, 100.0, 100.0]


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


def test_names_cannot_break_out_of_a_chart_that_needs_nothing_from_elsewhere():
    wrong = "</div><script>\"'<b>&"
    chart = chart_of(Mark("bar", 0, 1, "#abc", wrong), name=wrong, figure=wrong)
    text = chart_html(Chart(wrong, [("dot", "#abc", wrong)], chart.panels, [wrong]), wrong)
    assert "<script" not in text and "<b>" not in text
    assert text.count("<div") == text.count("</div")
    assert not re.findall(r"href|src|@import|fetch|http|url", text)


def test_a_chart_is_a_page_and_another_kind_of_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"x\.svg: a chart is a page; the name must end in \.html"):
        write_chart(chart_of(), tmp_path / "x.svg")
    write_chart(chart_of(), tmp_path / "x.html", "a machine")
    assert "<pre>a machine</pre>" in (tmp_path / "x.html").read_text()
