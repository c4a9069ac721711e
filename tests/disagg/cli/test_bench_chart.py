"""The picture of a benchmark: where a ratio is on its axis, and what the legend says."""

from __future__ import annotations

import math

import pytest

from disagg.cli.bench.case import BenchCase
from disagg.cli.bench.measure import Measurement
from disagg.cli.bench.report import BenchReport


def ratios_of(*ratios):
    """A chart of copies with these ratios."""
    rows = [
        Measurement(
            case=BenchCase(group="gather", name=f"case {n}", nbytes=1, open=None),
            seconds=1.0,
            reference_seconds=ratio,
            ratio=ratio,
            beyond=0.0,
            rounds=3,
        )
        for n, ratio in enumerate(ratios)
    ]
    machine = {"device": "cpu", "name": "x"}
    date = "2026-11-23T12:00:00"
    report = BenchReport(machine=machine, versions={}, date=date, quick=False, rows=rows)
    return report.chart()


@pytest.mark.parametrize(
    ("ratios", "low", "high"),
    [
        ((0.5,), 0.001, 1.2),
        ((0.0015, 1.24), 0.001, 1.488),
        ((0.00012,), 0.0001, 1.2),
        ((50,), 0.001, 60),
        ((0.0,), 0.001, 1.2),
    ],
)
def test_the_axis_is_logarithmic_from_a_thousandth_and_shows_every_ratio(ratios, low, high):
    (panel,) = ratios_of(*ratios).panels
    axis = panel.axis
    assert (axis.low, axis.high, axis.bound) == (pytest.approx(low), pytest.approx(high), 1.0)
    wide = math.log(high / low)
    for ratio, row in zip(ratios, panel.rows[1:]):
        (dot,) = (mark for mark in row.marks if mark.kind == "dot")
        assert axis.at(dot.end) == pytest.approx(2 + 84 * math.log(max(ratio, low) / low) / wide)
        assert all(mark.start == 1.0 for mark in row.marks)


def test_the_legend_names_the_groups_that_ran():
    chart = ratios_of(0.5)
    assert [words for _, _, words in chart.legend][:1] == ["gather"] and len(chart.legend) == 2
    (row,) = (row for row in chart.panels[0].rows if not isinstance(row, str))
    assert {mark.colour for mark in row.marks} == {chart.legend[0][1]}
