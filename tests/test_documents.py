"""Documents: their code runs, their links, anchors and extras are there, and what `make docs` would
refuse, without its environment: pages, anchors, names of the API.
"""

from __future__ import annotations

import importlib
import re

import pytest

from tests.document_programs import PAGES, READ, ROOT, programs
from tests.lowest import PYPROJECT, tomllib

MOST_WORDS, MOST_IN_README = 45_000, 1_000
"""Of all documents, and of the first one."""
CODE = re.compile(r"^```.*?^```", re.S | re.M)
LINK = re.compile(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)")
PUBLIC = (
    *("kvpool", "kvpool.layout", "kvpool.describe", "kvpool.item", "kvpool.testing", "kvpool_npu"),
    *("disagg", "disagg.plan", "disagg.contract", "disagg.snapshot", "disagg.exporter"),
)


PROGRAMS = [*programs()]


@pytest.mark.parametrize(
    ("name", "number", "code"), PROGRAMS, ids=[f"{name}-{n}" for name, n, _ in PROGRAMS]
)
def test_code_in_documents_runs(name, number, code, capsys):
    exec(compile(code, f"{name} block {number}", "exec"), {"__name__": "document"})
    if name == "README.md" and "decode.wait" in code:
        said = capsys.readouterr().out
        assert "Success {'first_token': 7}" in said
        assert "target k" in said


def test_documents_are_no_longer_than_they_may_be():
    words = {path: len(path.read_text().split()) for path in READ}
    assert words[ROOT / "README.md"] <= MOST_IN_README
    assert sum(words.values()) <= MOST_WORDS


def headings(path):
    return re.findall(r"^(#+) (.+)$", CODE.sub("", path.read_text()), re.M)


def anchors(path):
    titles = [re.sub(r"\]\([^)]*\)|[^\w\s-]", "", title.lower()) for _, title in headings(path)]
    return {re.sub(r"\s", "-", title.strip()) for title in titles}


def test_every_link_between_documents_leads_to_a_file_and_a_heading():
    for path in [*READ, *ROOT.glob("*.md")]:
        for target, anchor in LINK.findall(path.read_text()):
            page = path.parent / target if target else path
            assert page.exists(), f"{path.name}: {target}"
            inside = page.resolve().is_relative_to(ROOT / "docs")
            assert page.is_file() or not inside, f"{path.name}: {target} is a folder"
            assert not anchor or anchor in anchors(page), f"{path.name}: {target}#{anchor}"


def test_every_page_is_in_the_navigation_once_and_has_one_title():
    listed = re.findall(r"^ *- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    there = [str(path.relative_to(ROOT / "docs")) for path in PAGES]
    assert sorted(listed) == sorted([*there, "index.md", "overview.md"])  # made of README.md
    for path in PAGES:
        assert [marks for marks, _ in headings(path)].count("#") == 1, path.name


def test_every_page_is_reached_from_the_readme():
    reached, left = set(), [ROOT / "README.md"]
    while left:
        path = left.pop()
        links = {(path.parent / target).resolve() for target, _ in LINK.findall(path.read_text())}
        pages = {link for link in links if link.suffix == ".md"}
        left += pages - reached
        reached |= pages
    api = {path for path in PAGES if path.parent.name == "api"}  # the navigation's
    assert set(PAGES) - reached - api == set()


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(module):
    shown = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    last = {name.rpartition(".")[2] for name in re.findall(r"^::: ([\w.]+)", shown, re.M)}
    constants = {"__version__", "VERSION", "Key", "POOLS"}
    assert set(importlib.import_module(module).__all__) - last - constants == set()


def test_the_glossary_has_each_term_once():
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    terms = [term for row in rows if row != "term" for term in row.split(", ")]
    assert sorted(terms) == sorted(set(terms))
    assert len(terms) > 60


def test_documents_name_extras_that_are_there():
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    for path in [PYPROJECT, ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for names in re.findall(r"kvpool\[([\w,-]+)\]", path.read_text()):
            assert {*names.split(",")} <= {*extras}, f"{path.name}: {names}"
