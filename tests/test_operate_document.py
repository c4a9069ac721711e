"""The operator's page has a cause and a cure of every refusal, log line and series of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

import disagg
import kvpool
from disagg.protocol.peers.counts import RefusalKind
from disagg.protocol.status import FailureKind
from disagg.series import SOURCES
from disagg.store.stats import OUTCOMES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "operate.md").read_text()
PACKAGES = "disagg", "kvpool", "kvpool_cuda", "kvpool_npu"
LOGGED = "warning", "error", "exception", "critical", "log", "warn"
WORDLESS = {
    "disagg/protocol/metrics.py": "room failed",
    "disagg/protocol/peers/decode_peers.py": " is lost: ",
    "disagg/runtime/socket_transport.py": " was closed: ",
}
"""Files that log a text which they make elsewhere, and words of it."""


def section(heading):
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(heading):
    """By each name or line in the first column, the other two columns."""
    cells = re.findall(r"^\|([^|]+)\|([^|]+)\|([^|]+)\|$", section(heading), re.M)
    return {
        name: (cause, cure)
        for first, cause, cure in cells
        for name in re.findall(r"[`\"]([^`\"]+)[`\"]", first)
    }


def words_of(node):
    """What is the same in each text that an expression makes."""
    parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return "...".join(part for part in parts if isinstance(part, str))


def messages():
    """By file and line of each call that logs at WARNING or above, or warns: its words."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            for call in ast.walk(ast.parse(path.read_text())):
                if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                    continue
                owner = ast.unparse(call.func.value).rpartition(".")[2].lstrip("_")
                if owner in ("log", "warnings") and call.func.attr in LOGGED:
                    words = words_of(call.args[1 if call.func.attr == "log" else 0])
                    yield f"{name}:{call.lineno}", WORDLESS[name] if words == "%s" else words


MESSAGES = dict(messages())
LINES = {quoted: max(quoted.split("..."), key=len).strip() for quoted in rows("Log")}
"""By each line of the page, the longest words of it that are the same each time."""


@pytest.mark.parametrize("place", MESSAGES)
def test_every_line_of_the_log_has_a_cause_and_a_cure(place):
    assert any(words in MESSAGES[place] for words in LINES.values()), MESSAGES[place]


def test_every_line_of_the_page_is_one_of_the_code():
    others = {"no connection is accepted"}  # socket_transport.py's second text
    assert all(len(words.split()) > 1 for words in LINES.values())
    for quoted in LINES.keys() - others:
        assert any(LINES[quoted] in message for message in MESSAGES.values()), quoted


@pytest.mark.parametrize("series", [series for table in SOURCES.values() for series in table])
def test_every_series_has_a_meaning_and_what_to_do(series):
    assert series.name in rows("What to watch")
    assert f"`{series.name}`" in (ROOT / "docs" / "metrics.md").read_text()


@pytest.mark.parametrize(
    ("heading", "kinds"), [("Failures", FailureKind), ("Refusals", RefusalKind)]
)
def test_every_kind_of_failure_and_refusal_has_a_cause_and_a_cure(heading, kinds):
    assert {*get_args(kinds)} <= {*rows(heading)}


def test_every_error_that_callers_can_name_has_a_cause_and_a_cure():
    public = {name: getattr(module, name) for module in (disagg, kvpool) for name in module.__all__}
    errors = {
        name
        for name, value in public.items()
        if isinstance(value, type) and issubclass(value, Exception) and not value.__subclasses__()
    }
    assert errors <= {*rows("Refusals")}
    assert len(errors) > 10


def test_every_outcome_of_a_store_is_on_the_page():
    names = {*re.findall(r"`([a-z ]+)`", section("A store"))}
    assert {*OUTCOMES} <= names
