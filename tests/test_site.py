"""What `make docs` would refuse, without its environment: pages, anchors, names of the API."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
CODE = re.compile(r"^```.*?^```", re.S | re.M)
PUBLIC = (
    *("kvpool", "kvpool.layout", "kvpool.describe", "kvpool.item", "kvpool.testing", "kvpool_npu"),
    *("disagg", "disagg.plan", "disagg.snapshot", "disagg.exporter"),
)


def headings(path):
    return re.findall(r"^(#+) (.+)$", CODE.sub("", path.read_text()), re.M)


def anchors(path):
    titles = [re.sub(r"\]\([^)]*\)|[^\w\s-]", "", title.lower()) for _, title in headings(path)]
    return {re.sub(r"\s", "-", title.strip()) for title in titles}


def test_every_page_is_in_the_navigation_once_and_has_one_title():
    listed = re.findall(r"^ *- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    there = [str(path.relative_to(ROOT / "docs")) for path in PAGES]
    assert sorted(listed) == sorted([*there, "index.md"])  # which is README.md
    for path in PAGES:
        assert [marks for marks, _ in headings(path)].count("#") == 1, path.name


def test_every_anchor_is_a_heading():
    for path in [ROOT / "README.md", *PAGES]:
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", path.read_text()):
            found = anchors(path.parent / target if target else path)
            assert anchor in found, f"{path.name}: {target}#{anchor}"


def test_every_page_is_reached_from_the_readme():
    links = re.compile(r"\]\((?!http)([^)#]+\.md)")
    reached, left = set(), [ROOT / "README.md"]
    while left:
        path = left.pop()
        found = {(path.parent / target).resolve() for target in links.findall(path.read_text())}
        left += found - reached
        reached |= found
    api = {path for path in PAGES if path.parent.name == "api"}  # the navigation's
    assert {path.name for path in set(PAGES) - reached - api} == set()


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(module):
    shown = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    names = set(re.findall(r"^::: ([\w.]+)", shown, re.M))
    last = {name.rpartition(".")[2] for name in names}
    constants = {"__version__", "VERSION", "Key", "POOLS"}
    assert set(importlib.import_module(module).__all__) - last - constants == set()


def test_the_glossary_has_each_term_once():
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    terms = [term for row in rows if row != "term" for term in row.split(", ")]
    assert sorted(terms) == sorted(set(terms))
    assert len(terms) > 60
