"""`kvpool accept`: three devices pass, what is wrong fails with a line that names it, and the
report has the form that docs/accept.md describes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import typer
from typer.testing import CliRunner

from disagg.cli.accept import sections
from disagg.cli.accept.command import accept
from disagg.cli.accept.report import FORMAT, HEADINGS, STATES, Report, Row, SectionResult
from disagg.cli.accept.sections import Scope, bench_rows, case_row, conformance_rows
from disagg.cli.bench.case import HOST_SIZES, QUICK
from disagg.cli.bench.report import GROUPS, all_cases
from disagg.cli.demo.models import MODELS
from kvpool.device import get_device
from tests.disagg.cli.accepting import accepted, install
from tests.disagg.engines.peers import ENGINES
from tests.outputs import output_of
from tests.processes import started

DOCS = Path(__file__).parents[3] / "docs"
app = typer.Typer()
app.command()(accept)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("accept")
    install(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(made))
        yield made


def rows_of(report, section):
    return {row.name: row for each in report.sections if each.name == section for row in each.rows}


def test_a_device_of_this_machine_passes(folder):
    """Others are tried by `make accept` in .ci/run."""
    status, said, report = accepted(folder, "cpu", "--quick")
    assert status == 0 and report.passed and "FAIL" not in said, said
    assert report.quick and report.complete
    names = [section.name for section in sections.SECTIONS]
    assert [each.name for each in report.sections] == names
    assert [line.split()[0] for line in said.splitlines()] == ["section", *names, "cpu"]
    for name in ("conformance", "engines", "models", "bench"):
        assert any(row.state == "passed" for row in rows_of(report, name).values()), name
    for name in ("streams", "graphs", "ipc"):
        (row,) = rows_of(report, name).values()
        assert row.state == "not here" and row.sentence.startswith("not for this device: ")
    assert report.machine["device"] == "cpu"
    # the package's version names the build or not, as its wheel does
    assert torch.__version__.startswith(report.versions["torch"])
    moved = rows_of(report, "engines")
    for engine in ENGINES:
        for runs in ("large runs", "small runs"):
            row = moved[f"handoff: {engine}, {runs}"]
            assert row.state == "passed" and row.sentence.endswith("every byte is right")
        staged = moved[f"handoff: {engine}, small runs, staged"]
        assert staged.state == ("not here" if engine == "local" else "passed"), staged


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("device", ["cpu", "interpret", "npu-reference"])
def test_a_device_of_this_machine_passes_at_full_length(folder, device):
    status, said, report = accepted(folder, device, timeout=900)
    assert status == 0 and report.passed, said
    assert len(rows_of(report, "models")) == 2 * len(MODELS)


def test_a_wrong_byte_in_a_store_fails_with_a_line_that_names_it(folder, tmp_path):
    options = "--device", "wrongbyte", "--quick", "--only", "conformance", "--out", str(tmp_path)
    done = CliRunner().invoke(app, options)
    report = msgspec.json.decode((tmp_path / "accept.json").read_bytes(), type=Report)
    assert done.exit_code == 1 and not report.passed and not report.complete
    lines = [line for line in done.output.splitlines() if line.startswith("  FAIL ")]
    assert len(lines) == report.sections[0].count("failed")
    named = "  FAIL pool mla fp8, write_packs_as_the_formats_say: "
    (line,) = (line for line in lines if line.startswith(named))
    assert re.search(r"target layer 0 latent: item \d+, entry \d.*: 0x\w\w found, 0x\w\w exp", line)


def test_json_is_the_report_and_all_else_is_on_standard_error(folder, tmp_path):
    options = "--device", "cpu", "--quick", "--only", "streams", "--out", str(tmp_path), "--json"
    done = CliRunner().invoke(app, options)
    assert done.stdout_bytes == (tmp_path / "accept.json").read_bytes()
    output_of("accept", done.stdout)
    assert done.stderr.startswith("section") and str(tmp_path) in done.stderr


# benchmarks

CASES = {case.row.title: case.row for case in all_cases(HOST_SIZES, ["local"])}


@pytest.mark.parametrize(
    ("case", "ratio", "gpu", "state", "words"),
    [
        ("store: MLA bf16, 1152 B", 0.86, "H200", "passed", "target 0.85: met"),
        ("store: MLA bf16, 1152 B", 0.84, "H200", "failed", "target 0.85: not met"),
        ("store: DSv4 fp8, 584 B", 0.69, "H200", "failed", "target 0.70: not met"),
        ("store: MLA bf16, 1152 B", 0.1, "H100", "passed", "0.10 times as fast as a plain copy"),
        ("load: MLA bf16, 1152 B", 0.1, "H200", "passed", "0.10 times as fast as a plain copy"),
    ],
)
def test_only_the_gpu_of_a_target_can_miss_it(case, ratio, gpu, state, words):
    measurement = CASES[case].timed([(1e-3, ratio * 1e-3)])
    row = case_row(measurement, f"NVIDIA {gpu}", 0.2)
    assert row.state == state and row.sentence.endswith(words)
    assert row.figures["ratio"] == pytest.approx(ratio)
    assert row.figures["target"] == CASES[case].target


def test_a_case_with_a_wrong_result_fails_and_one_that_cannot_run_is_not_here():
    untimed = CASES["gather: 4 KiB"]
    for failed, state in ((True, "failed"), (False, "not here")):
        row = case_row(replace(untimed, reason="wrong: run 3", failed=failed), "H200", 0.2)
        assert (row.state, row.sentence) == (state, "wrong: run 3")


def test_an_emulated_device_runs_every_case_once_and_none_is_timed():
    scope = Scope(get_device("npu-reference"), False)
    rows = bench_rows(scope)
    groups = {row.name.partition(":")[0] for row in rows if row.state == "passed"}
    assert groups == {*GROUPS} and len(rows) == len(all_cases(QUICK))
    assert all(row.figures is None and row.state != "failed" for row in rows)


def test_the_targets_are_those_that_the_document_lists():
    table = (DOCS / "performance.md").read_text().partition("|target|")[2]
    listed = dict(re.findall(r"^\|(.+?)\|[^|]+\|(0\.\d\d)\|$", table, re.M))
    targets = {
        title: float(listed[what])
        for what, pattern in (
            ("store of K and V, NHD and HND; MLA bf16", r"store: (K and V|MLA bf16)"),
            ("store of fp8 rows: MLA 656, index keys 132, DSv4 584", r"store: .* fp8"),
            ("move of pages by layer and by page; ids on the host", r"move: "),
            ("gather of 512 bytes, 4, 36 KiB; scatter", r"gather: |scatter: "),
        )
        for title in CASES
        if re.match(pattern, title)
    }
    assert targets == {title: row.target for title, row in CASES.items() if row.target}


# the report


@pytest.fixture(scope="module")
def report():
    rows = Row("<b>&\x00", "failed", "0x01 found", 1.5), Row("other", "not here", "no")
    section = SectionResult("engines", "moves", 2.0, rows)
    return Report(
        format=FORMAT,
        device="cpu",
        passed=False,
        interrupted=None,
        quick=True,
        complete=False,
        date="2026-11-23T00:00:00+00:00",
        seconds=2.0,
        machine={"device": "cpu"},
        versions={"torch": "2"},
        commit=None,
        sections=[section],
    )


@pytest.mark.parametrize("kind", [Report, SectionResult, Row])
def test_every_field_is_documented(kind):
    text = (DOCS / "accept.md").read_text().partition("## The report")[2]
    fields = re.search(rf"^- `{kind.__name__}`: (.+)$", text, re.M)[1]
    assert [*kind.__struct_fields__] == re.findall(r"`(\w+)`", fields)


def test_json_is_read_back_and_another_form_is_refused(report):
    assert msgspec.json.decode(report.as_json(), type=Report) == msgspec.convert(
        msgspec.to_builtins(report), Report
    )
    other = {**json.loads(report.as_json()), "more": 1}
    with pytest.raises(msgspec.ValidationError, match="more"):
        msgspec.json.decode(json.dumps(other), type=Report)


def test_a_section_with_a_failure_has_failed_and_one_without_rows_that_ran_is_not_here(report):
    (section,) = report.sections
    assert section.state == "failed" and section.lines() == [
        "engines            0       1         1       2.0",
        "  FAIL <b>&\x00: 0x01 found",
    ]
    rows = section.rows[1:]
    assert msgspec.structs.replace(section, rows=rows).state == "not here"


def test_figures_of_sections_end_where_their_headings_do():
    rows = [Row("r", state, "") for state in STATES for _ in range(1200)]
    long = SectionResult("conformance", "", 3600.04, rows).lines()[0]
    short = SectionResult("ipc", "", 0.0, []).lines()[0]
    ends = [match.end() for match in re.finditer(r"not here|\S+", HEADINGS)]
    for line in (long, short):
        assert [match.end() for match in re.finditer(r"\S+", line)][1:] == ends[1:]
    assert long.split() == ["conformance", "1,200", "1,200", "1,200", "3,600.0"]


@pytest.fixture
def in_place(monkeypatch):
    """Puts other functions in the place of the sections."""

    def put(**runs):
        made = [sections.AcceptSection(name, "", run) for name, run in runs.items()]
        monkeypatch.setattr(sections, "SECTIONS", tuple(made))

    return put


def test_an_error_of_a_section_is_a_row_and_the_others_run(in_place, tmp_path):
    def broken(scope):
        raise RuntimeError("no\nbus")

    in_place(ipc=broken, graphs=lambda scope: [Row("graphs", "not here", "none")])
    done = CliRunner().invoke(app, ["--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "  FAIL section ipc: RuntimeError: no bus\n" in done.output
    assert [line.split() for line in done.output.splitlines() if line.startswith("graphs")] == [
        ["graphs", "0", "0", "1", "0.0"]
    ]


def test_an_interrupted_run_has_not_passed_and_keeps_the_sections_that_have_ended(tmp_path):
    command = [sys.executable, "-m", "kvpool", "accept", "--only=streams", "--only=engines"]
    command += ["--out", str(tmp_path)]
    with started(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("section")
        assert process.stdout.readline().startswith("streams")
        while b'"interrupted": "engines"' not in (tmp_path / "accept.json").read_bytes():
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C of a terminal does
        text = process.stdout.read()
    report = msgspec.json.decode((tmp_path / "accept.json").read_bytes(), type=Report)
    # Python ends by the signal where it once left exec() of a text (a shell shows 130 for either)
    assert process.returncode in (130, -2) and not report.passed, text
    assert [section.name for section in report.sections] == ["streams"]
    assert report.interrupted == "engines" and "interrupted in engines" in report.verdict
    assert text.startswith(report.verdict)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "speed"], "--only speed: one of conformance, streams, graphs, ipc, engines"),
        (["--only", "graph"], "bench. Did you mean 'graphs'?"),
        (["--device", "tpu"], "no installed package offers 'tpu'"),
        (["--device", "meta"], "has no memory to measure"),
        (["--out", "/proc/none"], "/proc/none"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", "").split())


def test_a_kit_that_ends_early_fails_with_what_has_passed_before(folder):
    rows = conformance_rows(Scope(get_device("crashing"), True))
    assert [row.state for row in rows] == ["passed", "failed"] and rows[0].name == "device crashing"
    assert rows[1].sentence == "the kit ended with status 7."
