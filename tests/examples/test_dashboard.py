"""The dashboard asks for series that there are, by labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from disagg.series import SOURCES

FILE = Path(__file__).parents[2] / "examples/grafana.json"
DASHBOARD = json.loads(FILE.read_text())
TARGETS = ("instance", "job")
"""Labels that Prometheus gives each sample."""
PARTS = {
    "counter": {"": ()},
    "gauge": {"": ()},
    "histogram": {"_bucket": ("le",), "_sum": (), "_count": ()},
}
"""What is served of a series under its name: suffixes, and the labels that come with each."""
SERIES = re.compile(r"\b(kvpool_\w+)(?:\{(.*?)\})?")
MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"[^\"]*\"")
GROUPS = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")


def labels_by_name():
    """By name as it is served, the labels of its samples."""
    return {
        series.name + suffix: {source, *series.labels.split(), *more, *TARGETS}
        for source, table in SOURCES.items()
        for series in table
        for suffix, more in PARTS[series.kind].items()
    }


def problems(query, legend=""):
    """What a query asks for that there is not."""
    known, names = labels_by_name(), SERIES.findall(query)
    for name, matchers in names:
        if name not in known:
            yield f"no series {name}"
        elif missing := {*MATCHER.findall(matchers)} - known[name]:
            yield f"{name} has no label {', '.join(sorted(missing))}"
    there = [known[name] for name, _ in names if name in known]
    grouped = {label.strip() for group in GROUPS.findall(query) for label in group.split(",")}
    for label in grouped:
        if not all(label in labels for labels in there):
            yield f"grouped by {label}, which is not there"
    for label in re.findall(r"\{\{(\w+)\}\}", legend):
        if label not in grouped - {"le"}:
            yield f"the legend has {label}, which the query does not group by"


def queries():
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    ]


@pytest.mark.parametrize(("title", "query", "legend"), queries())
def test_a_panel_asks_for_what_there_is(title, query, legend):
    assert SERIES.search(query), title
    assert not [*problems(query, legend)]
    assert query.count("(") == query.count(")") and query.count("{") == query.count("}")


def test_the_variables_ask_for_what_there_is():
    variables = DASHBOARD["templating"]["list"]
    (asked,) = (each["query"]["query"] for each in variables if each["type"] == "query")
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", asked).groups()
    assert label in labels_by_name()[name]
    used = {*re.findall(r"\$(\w+)", json.dumps(DASHBOARD["panels"]))} - {"__rate_interval"}
    assert used <= {each["name"] for each in variables}


def test_panels_do_not_overlap_and_have_numbers_of_their_own():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len({*cells}) == len(cells) and max(x for x, _ in cells) < 24


def unit_of(query):
    """The unit of Grafana's for what a query asks, by Prometheus's rules of naming."""
    if "histogram_quantile" in query:
        return "s"
    if "/" in query:
        return "percentunit"
    nbytes, rate = "_bytes" in query, bool(re.search(r"\brate\(", query))
    if nbytes:
        return "binBps" if rate else "bytes"
    return "ops" if rate else "short"


def test_every_curve_is_drawn_in_its_unit_on_an_axis_with_words():
    for panel in DASHBOARD["panels"]:
        defaults = panel["fieldConfig"]["defaults"]
        axes = {
            None: {"unit": defaults["unit"], "custom.axisLabel": defaults["custom"]["axisLabel"]}
        }
        for override in panel["fieldConfig"]["overrides"]:
            properties = {each["id"]: each["value"] for each in override["properties"]}
            assert properties["custom.axisPlacement"] == "right"
            axes[override["matcher"]["options"]] = properties
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert {*axes} - {None} <= {*legends}, panel["title"]
        for target in panel["targets"]:
            axis = axes.get(target["legendFormat"], axes[None])
            assert axis["unit"] == unit_of(target["expr"]), panel["title"]
            assert axis["custom.axisLabel"]


def test_legends_have_the_last_value_and_the_highest_of_each_curve():
    for panel in DASHBOARD["panels"]:
        legend = panel["options"]["legend"]
        assert (legend["displayMode"], legend["calcs"]) == ("table", ["lastNotNull", "max"])
        assert all(target["legendFormat"] for target in panel["targets"])


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("rate(kvpool_romms_total[1m])", "no series kvpool_romms_total"),
        ("kvpool_phase_seconds", "no series kvpool_phase_seconds"),
        ('kvpool_links{kind="open"}', "kvpool_links has no label kind"),
        ("sum by (space) (kvpool_links)", "grouped by space, which is not there"),
    ],
)
def test_a_query_for_what_there_is_not_is_found(query, problem):
    assert [*problems(query)] == [problem]


def test_every_series_of_endpoints_that_is_an_operators_is_on_the_dashboard():
    asked = " ".join(query for _, query, _ in queries())
    apart = ["up", "chunks", "bound_bytes", "runs", "plans", "plan_seconds"]
    wanted = {series.name for source in ("endpoint", "store") for series in SOURCES[source]}
    left = {name for name in wanted if name not in asked}
    assert {name.removeprefix("kvpool_").removesuffix("_total") for name in left} == {*apart}
