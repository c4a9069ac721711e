"""Tables of all commands at two widths: no line too long, no name broken, no figure cut."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from disagg.cli.bench.case import QUICK
from disagg.cli.bench.report import BenchReport, all_cases
from kvpool.cli import app
from kvpool.render.table import FittedTable

SAVED = Path(__file__).parents[1] / "snapshot" / "version1.safetensors"
V4 = {
    *("swa.latent", "swa.rope", "c4.latent", "c4.rope", "c4.state", "c4.index_key"),
    *("c4.index_state", "c128.latent", "c128.rope", "c128.state"),
}
SCALES = {"swa.latent.scale", "c4.latent.scale", "c4.index_key.scale", "c128.latent.scale"}
FLOATS = {"float8_e4m3fn", "float8_e8m0fnu", "bfloat16", "float32"}
LINEAR = {"conv.q", "conv.k", "conv.v", "temporal"}
every_width = pytest.mark.parametrize("width", [80, 160])


def reads_well(text, width, names):
    """No line is longer, nothing is cut, and every name is there as one word."""
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = {word.rstrip(",;.:") for word in text.split()}
    assert {name for name in names if name not in words} == set()


def rendered(table, width):
    console = Console(file=StringIO(), width=width)
    console.print(table, crop=False)
    return console.file.getvalue()


@every_width
@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("describe deepseek_v4 --packing fp8", V4 | SCALES | FLOATS | {"524,288", "73,728"}),
        ("describe qwen3_next_80b", LINEAR | {"k", "v", "2,097,152", "65,536"}),
        ("describe deepseek_v32 --packing fp8 --draft", {"target", "draft", "index_key.scale"}),
        ("budget deepseek_v4 --dtype fp8 --tp 2 --pp 4", V4 | SCALES | {"10,485,760"}),
        ("budget kimi_linear_48b --pp 3 --memory 4TiB", LINEAR | {"requests"}),
        ("budget qwen3_next_80b --memory 8TiB --pp 3", LINEAR | {"requests"}),
        ("explain deepseek_v4 --packing fp8 --tp 2:1", V4 | SCALES | {"bytes/run"}),
        (
            "explain qwen3_next_80b --tp 4:8 --pp 2:3 --link 400Gb",
            LINEAR | {"resharded", "destination", "unsent"},
        ),
        (f"snapshot show {SAVED}", {"bfloat16", "temporal", "latent"}),
        ("doctor", {"npu-reference", "mooncake", "not", "works", "libascendcl.so"}),
    ],
)
def test_a_table_fits_and_breaks_no_name(width, command, names):
    done = CliRunner(env={"COLUMNS": str(width)}).invoke(app, command.split())
    assert done.exit_code == 0, done.output
    _, _, table = done.stdout.rpartition("tensors, as they lie in the file")  # of a snapshot
    reads_well(table, width, names)


@every_width
def test_the_bench_table_fits_with_every_case(width):
    cases = all_cases(QUICK, ["local", "mooncake", "nixl", "ascend"])
    figures = {"seconds": 0.0123456, "reference_seconds": 0.9876543}
    figures |= {"ratio": 1234.5, "beyond_seconds": 0.0345678, "rounds": 5}
    rows = [replace(case.row, **figures) for case in cases]
    machine = {"device": "cpu", "name": "x"}
    report = BenchReport(machine=machine, versions={}, date="2026-11-23", quick=False, rows=rows)
    words = {word.rstrip(",;.:") for row in rows for word in row.case.split()}
    reads_well(rendered(report.table(), width), width, words | {"handoff", "12.35", "1,234"})


def test_words_that_do_not_fit_make_a_table_wide_and_are_not_cut():
    table = FittedTable("first", "second")
    table.add_row("a" * 30, "b" * 30)
    assert f"{'a' * 30} {'b' * 30}" in rendered(table, 40)


def test_what_is_over_goes_to_the_columns_that_need_it():
    table = FittedTable("one", "two")
    table.add_row("a", "some words of a sentence")
    lines = rendered(table, 30).splitlines()
    assert lines[2].startswith("a    some words of a sentence")
    narrow = rendered(table, 14).splitlines()
    assert [line.strip() for line in narrow[2:]] == ["a    some", "words of", "a", "sentence"]


@pytest.mark.parametrize("command", ["budget deepseek_v3 --tp 8", "describe deepseek_v3"])
def test_json_is_one_value_on_standard_output_and_nothing_else(command):
    done = CliRunner().invoke(app, [*command.split(), "--json"])
    assert done.exit_code == 0 and isinstance(json.loads(done.stdout), dict), done.output
