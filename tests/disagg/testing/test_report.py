"""Reports have every row, escape what engines say, and can be read back."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from disagg.testing.conform import try_pairs
from disagg.testing.judge import Observation
from disagg.testing.report import COLUMNS, MOST, ConformReport, read_report, shortened
from disagg.testing.suite import load
from tests.disagg.testing.suites import BAD, FIRST, GOOD, LAST, REFUSED, TEXT, Servers

DOCS = Path(__file__).parents[3] / "docs"
EVIL = '</td><script> "|`*<b>&'


def report_of(tmp_path, shown, text=TEXT):
    path = tmp_path / "suite.toml"
    path.write_text(text)
    suite, servers = load(path), Servers(shown)
    rows = try_pairs(
        suite, suite.pairs, observe=servers.observe, kept={}, progress=lambda line: None
    )
    return ConformReport(
        suite="suite.toml", date="2026-11-28T10:00:00+00:00", complete=True, rows=[*rows]
    )


@pytest.fixture
def report(tmp_path):
    return report_of(tmp_path, {FIRST: BAD, LAST: REFUSED})


class Cells(HTMLParser):
    """The words of each cell of a page's table."""

    def __init__(self):
        super().__init__()
        self.rows, self.tags = [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def test_json_has_settings_verdict_versions_and_date_of_each_row(report, tmp_path):
    told = json.loads(report.as_json())
    assert told["format"] == "kvpool-conform-1"
    row = told["rows"][0]
    assert row["pair"]["prefill"]["tp"] == 2 and row["pair"]["decode"]["block_size"] == 128
    assert row["verdict"] == {"result": "WRONG", "reason": BAD.differences, "runs": 3}
    assert told["rows"][1]["versions"]["vllm"] == "0.32.0" and "kvpool" in row["versions"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", row["date"])
    (tmp_path / "conform.json").write_bytes(report.as_json())
    assert read_report(tmp_path / "conform.json") == report


@pytest.mark.parametrize("width", [80, 160])
def test_a_table_fits_the_terminal_and_breaks_no_word(report, width):
    console = Console(file=StringIO(), width=width)
    console.print(report.table(), crop=False)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    words = {"WRONG", "sglang-nixl", "max_model_len=512", "<32>", "float32"}
    assert words <= {*text.split()}
    assert "3 rows: 1 WRONG, 1 serves, 1 refuses" in text and "vllm 0.32.0" in text


def test_a_page_has_the_rows_and_needs_nothing_from_elsewhere(report):
    html = report.html()
    cells = Cells()
    cells.feed(html)
    head, first, draft, last = cells.rows
    assert [*map(str.strip, head)] == [*COLUMNS, "result", "why"]
    assert first[:5] == ["kvpool over local", "llama", "vllm 32 tp2", "vllm 128", "WRONG"]
    assert first[5].startswith(BAD.differences) and '"block_size": 128' in first[5]
    assert draft[2:5] == ["vllm 32 eagle", "vllm 32 eagle max_model_len=512", "serves"]
    assert last[0] == "sglang-nixl" and last[5].startswith(REFUSED.refused)
    assert "3 rows: 1 WRONG, 1 serves, 1 refuses." in html
    assert not re.search(r"(?:src|href|url)\s*[=(]", html)


def test_versions_are_those_of_each_engine_and_all_that_it_had(tmp_path):
    old, new = (
        Observation(differences="", versions={"vllm: nixl": n, "sglang: torch": "2.13"})
        for n in ("1.5.1", "1.6.0")
    )
    text = report_of(tmp_path, {FIRST: old, LAST: new}).versions()
    ours, *engines = text.split("; ")
    assert ours.startswith("kvpool ") and ours.endswith(", vllm 0.32.0")
    assert engines == ["sglang: torch 2.13", "vllm: nixl 1.5.1 and 1.6.0"]


def test_what_an_engine_says_cannot_break_out_of_a_page_or_a_document(tmp_path):
    report = report_of(tmp_path, {FIRST: Observation(refused=EVIL)})
    cells = Cells()
    cells.feed(report.html())
    assert cells.rows[1][5].startswith(EVIL) and "script" not in cells.tags
    assert r"1. \</td\>\<script\>" in report.markdown()
    rows = [line for line in report.markdown().splitlines() if line.startswith("|")]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [5] * 5


def test_settings_cannot_break_out_of_a_documents_table(tmp_path):
    text = TEXT.replace("max_model_len = 512", 'kv = "|<b>"')
    document = report_of(tmp_path, {}, text).markdown()
    assert r"vllm 32 eagle kv=\|\<b\> | kvpool: serves (bytes) |" in document


def test_a_document_has_each_reason_once(tmp_path):
    report = report_of(tmp_path, dict.fromkeys((FIRST, LAST), REFUSED))
    text = report.markdown()
    assert text.startswith("# What serves with what\n")
    assert "| llama | vllm 32 tp2 | vllm 128 | kvpool: refuses (1) |" in text
    assert "| sglang 32 float32 | sglang 32 float32 | sglang-nixl: refuses (1) |" in text
    assert "| kvpool: serves (bytes) |" in text
    assert text.count("block sizes") == 1 and text.endswith("differ\n")
    assert "on 2026-11-28" in text and "vllm 0.32.0" in text


def test_a_document_has_connectors_with_the_same_settings_in_one_line(tmp_path):
    text = """
[engines.vllm]
python = "python"
[models]
llama = "folder"
[[pair]]
connector = ["kvpool", "nixl", "lmcache"]
model = "llama"
side = {engine = "vllm", block_size = 32}
transport = "mooncake"
"""
    lmcache = "lmcache: llama, vllm 32 to vllm 32"
    document = report_of(tmp_path, {lmcache: REFUSED}, text).markdown()
    result = "kvpool over mooncake, nixl: serves (bytes); lmcache: refuses (1)"
    assert f"\n| llama | vllm 32 | vllm 32 | {result} |\n" in document


def test_a_long_reason_is_one_line_in_tables_and_whole_in_json(tmp_path):
    log = "prefill: exit 1\n" + "frame\n" * 100
    report = report_of(tmp_path, {FIRST: Observation(lost=log)})
    assert json.loads(report.as_json())["rows"][0]["verdict"]["reason"] == log
    short = shortened(log)
    assert len(short) <= MOST and short.startswith("prefill: exit 1 frame ")
    assert short in report.markdown() and log not in report.markdown()


def test_the_documents_have_the_rows_of_their_suite_and_none_of_ours_is_wrong():
    lines = (DOCS / "compatibility.md").read_text().replace("\\", "").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| (?!model)", line)]
    results = {
        (name.split()[0], *settings): result
        for *settings, cell in rows
        for names, result in (part.split(": ") for part in cell.split("; "))
        for name in names.split(", ")
    }
    pairs = load(DOCS / "compatibility.toml").pairs
    expected = {(p.connector, p.model, p.prefill.words(), p.decode.words()) for p in pairs}
    assert {*results} == expected and len(expected) == len(pairs)
    ours = {words.split(" (")[0] for (name, *_), words in results.items() if name == "kvpool"}
    assert ours <= {"serves", "refuses"}


def test_rows_of_ours_that_are_wrong_fail_and_those_of_others_do_not(tmp_path):
    failed = report_of(tmp_path, {FIRST: BAD}).failed()
    assert [row.pair.name for row in failed] == [FIRST]
    (once,) = report_of(tmp_path, {FIRST: [BAD, GOOD, GOOD]}).failed()
    assert once.verdict.words() == f"unsteady (WRONG in 1 of 3 runs: {BAD.differences})"
    assert report_of(tmp_path, {LAST: BAD}).failed() == []
    assert report_of(tmp_path, {FIRST: REFUSED}).failed() == []
