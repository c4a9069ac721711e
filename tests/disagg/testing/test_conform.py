"""Rows are run until they can be judged, and kept where their settings are the same."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from disagg.cli.conform import conform
from disagg.testing.conform import REPORTS
from disagg.testing.report import read_report
from tests.disagg.testing.suites import AWAY, BAD, FIRST, LAST, NAMES, REFUSED, TEXT, Servers
from tests.outputs import output_of

APP = typer.Typer(rich_markup_mode=None)  # as kvpool.cli
APP.command()(conform)


@pytest.fixture
def kvpool(tmp_path, monkeypatch):
    """Runs the command over servers that show what is given; returns what ran too."""
    (tmp_path / "suite.toml").write_text(TEXT)

    def run(*options, shown=None, out="reports"):
        servers = Servers(shown or {})

        class Arena:
            def __init__(self, suite, folder, progress):
                assert folder == tmp_path / out

            def __enter__(self):
                return servers

            def __exit__(self, *error):
                pass

        monkeypatch.setattr("disagg.testing.arena.Arena", Arena)
        given = [str(tmp_path / "suite.toml"), "--out", str(tmp_path / out), *options]
        done = CliRunner(env={"COLUMNS": "160"}).invoke(APP, given)
        return done, servers.ran

    return run


def results(tmp_path):
    rows = read_report(tmp_path / "reports" / REPORTS[0]).rows
    return {row.pair.name: row.verdict.result for row in rows}


def test_every_row_is_run_and_reported_in_each_form(kvpool, tmp_path):
    done, ran = kvpool()
    assert (done.exit_code, ran) == (0, NAMES)
    assert "vllm 32 tp2" in done.stdout and "3 rows: 3 serves" in done.stdout
    for name in REPORTS:
        assert "sglang-nixl" in (tmp_path / "reports" / name).read_text()
        assert f"{tmp_path / 'reports' / name}" in done.stderr
    assert {path.name for path in (tmp_path / "reports").iterdir()} == {*REPORTS}


def test_progress_names_each_row_each_further_run_and_each_result(kvpool):
    done, ran = kvpool(shown={FIRST: BAD, LAST: REFUSED})
    assert ran == [FIRST] * 3 + ["draft"] + [LAST] * 2
    lines = done.stderr.splitlines()
    assert lines[0] == f"[1/3] {FIRST}"
    assert f"[1/3] {FIRST}: WRONG ({BAD.differences})" in lines
    assert f"run 3 of {FIRST}, to reproduce what run 1 showed" in lines
    assert "[2/3] draft: serves (bytes)" in lines
    assert f"[3/3] {LAST}: refuses ({REFUSED.refused})" in lines


@pytest.mark.parametrize(
    ("shown", "code"),
    [({FIRST: BAD}, 1), ({LAST: BAD}, 0), ({FIRST: REFUSED, LAST: AWAY}, 0)],
)
def test_the_exit_status_is_1_for_a_wrong_row_of_ours_only(kvpool, shown, code):
    assert kvpool(shown=shown)[0].exit_code == code


def test_json_is_all_that_is_on_standard_output(kvpool, tmp_path):
    done, _ = kvpool("--json", shown={LAST: REFUSED})
    assert done.stdout.encode() == (tmp_path / "reports" / REPORTS[0]).read_bytes()
    assert [row["verdict"]["result"] for row in output_of("conform", done.stdout)["rows"]] == [
        *("serves", "serves", "refuses")
    ]


def test_an_interrupted_run_goes_on_where_it_was(kvpool, tmp_path):
    done, ran = kvpool(shown={LAST: KeyboardInterrupt()})
    assert (done.exit_code, ran) == (130, NAMES)
    assert [*results(tmp_path)] == NAMES[:2]
    assert not read_report(tmp_path / "reports" / REPORTS[0]).complete
    done, ran = kvpool("--resume", shown={LAST: REFUSED})
    assert (done.exit_code, ran) == (0, [LAST, LAST])
    assert f"[1/3] {FIRST}: kept: serves (bytes)" in done.stderr.splitlines()
    assert results(tmp_path) == {FIRST: "serves", "draft": "serves", LAST: "refuses"}
    assert kvpool(shown={})[1] == NAMES  # nothing is kept unless it is asked for


def test_rows_of_other_settings_and_rows_that_were_not_here_run_again(kvpool, tmp_path):
    kvpool(shown={LAST: AWAY})
    (tmp_path / "suite.toml").write_text(TEXT.replace("max_model_len = 512", "max_model_len = 99"))
    assert kvpool("--resume")[1] == ["draft", LAST]


def test_a_second_interruption_loses_no_row_that_was_kept(kvpool, tmp_path):
    kvpool()
    text = TEXT.replace("block_size = 128", "block_size = 64")
    (tmp_path / "suite.toml").write_text(text)
    first = FIRST.replace("128", "64")
    done, _ = kvpool("--resume", shown={first: KeyboardInterrupt()})
    assert done.exit_code == 130
    assert [*results(tmp_path)] == NAMES[1:]


def test_rows_are_added_to_a_report_one_at_a_time(kvpool, tmp_path):
    for name, exit_code in ((LAST, 0), (FIRST, 1)):
        done, ran = kvpool("--resume", "--only", name, shown={FIRST: BAD})
        assert (done.exit_code, {*ran}) == (exit_code, {name})
    assert [*results(tmp_path)] == [FIRST, LAST]
    assert kvpool("--only", LAST)[1] == [LAST] and [*results(tmp_path)] == [LAST]


def test_only_takes_rows_by_their_names(kvpool):
    assert kvpool("--only", "draft", "--only", "nixl")[1] == ["draft", LAST]
    done, ran = kvpool("--only", "tp3")
    assert (done.exit_code, ran) == (2, []) and "tp3: in no row's name" in done.output


def test_list_prints_names_and_runs_none(kvpool, tmp_path):
    done, ran = kvpool("--list")
    assert (done.stdout.splitlines(), ran) == (NAMES, [])
    assert not (tmp_path / "reports").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [("[[pair]", "not TOML"), (TEXT.replace("tp = 2", "tp = 0"), "prefill.tp: 0 is not")],
)
def test_a_suite_that_cannot_be_run_is_refused_before_anything_is(kvpool, tmp_path, text, words):
    (tmp_path / "suite.toml").write_text(text)
    done, ran = kvpool()
    assert (done.exit_code, ran) == (2, []) and words in " ".join(done.output.split())


def test_a_file_that_is_no_report_is_not_resumed(kvpool, tmp_path):
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / REPORTS[0]).write_text("{}")
    done, ran = kvpool("--resume")
    assert (done.exit_code, ran) == (2, []) and "no report of this version" in done.output
    (tmp_path / "file").write_text("")
    done, ran = kvpool(out="file")
    assert (done.exit_code, ran) == (2, []) and "file: File exists" in done.output
    assert CliRunner().invoke(APP, [str(tmp_path / "none.toml")]).exit_code == 2
