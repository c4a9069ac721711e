"""`kvpool bench`: cases are checked, their bytes counted, failures listed, options refused."""

from __future__ import annotations

import ctypes
import math
import random
from datetime import datetime
from functools import partial
from unittest import mock

import pytest
import torch
import typer
from typer.testing import CliRunner

from disagg.cli.bench.case import QUICK, BenchCase, Measurement, Work, measured
from disagg.cli.bench.command import bench
from disagg.cli.bench.report import GROUPS, BenchReport, all_cases
from disagg.engines.base import engine_names
from disagg.engines.local import LocalEngine
from disagg.engines.local.engine import LocalTransfer
from kvpool.device.cpu import CPUDevice
from kvpool.process import OtherProcess
from kvpool.render.chart import chart_html
from kvpool.testing.memory import flat_locations, same_as_pool
from tests import oracle
from tests.disagg.engines.peers import ENGINES
from tests.outputs import output_of
from tests.pools import dsv4, hybrid, mha

KEYS = {"machine": dict, "versions": dict, "date": str, "quick": bool, "rows": list}
ROW_KEYS = {
    *("group", "case", "engine", "bytes", "bound", "target", "seconds", "reference_seconds"),
    *("gib_per_second", "reference_gib_per_second", "ratio", "beyond_seconds"),
    *("ratio_quartiles", "rounds", "reason", "failed"),
}
app = typer.Typer()
app.command()(bench)
RUNS, READ = 1 << 18, 2 << 20  # of the quick sizes
HANDED = {"1 token": (1, 1), "128 tokens": (128, 128), "128 tokens in chunks of 64": (128, 64)}


def state_bytes(tokens, last):
    """Bytes that come with the `last` of a request's tokens, in 8 layers of each family."""
    window = min(tokens, last, 127)
    rows = 448 + 2 * 64 + 7
    entries = {ratio: tokens // ratio - (tokens - last) // ratio for ratio in (4, 128)}
    rings = 3 * (1 * 4 * (512 + 128) * 4 + 1 * 2 * 512 * 4)  # ratio 4; ratio 128, an open window
    if tokens % 128 == 0:
        rings = 3 * 4 * 4 * (512 + 128) * 4
    return {
        "MHA": 8 * last * 2 * 2 * 128 * 2,  # of 8 heads a rank of 4 has 2
        "MLA": 8 * last * 1152,
        "NSA": 8 * last * (656 + 132),
        "SWA": 4 * (last + window) * 2 * 8 * 64 * 2,
        "HybridLinear": 2 * last * 2 * 2 * 256 * 2
        + 6 * (3 * (2 * 16 + 32) * 128 * 2 + 32 * 128 * 128 * 4),
        "DSv4": 8 * window * rows + 3 * (entries[4] * (rows + 132) + entries[128] * rows) + rings,
    }


COUNTED = {
    # a token's values in bf16 and its bytes in the pool, halved: what a copy as heavy moves
    **{
        (group, name): tokens * (given + stored) // 2
        for group in ("store", "load")
        for name, tokens, given, stored in (
            ("K and V 8 x 128, NHD", 128, 2 * 8 * (128 + 128), 2 * 8 * (128 + 128)),
            ("K and V 8 x 128, HND", 128, 2 * 8 * (128 + 128), 2 * 8 * (128 + 128)),
            ("MLA bf16, 1152 B", 128, 2 * (512 + 64), 1152),
            ("MLA fp8, 656 B", 128, 2 * (512 + 64), 512 + 4 * 4 + 2 * 64),
            ("index keys fp8, 132 B", 128, 2 * 128, 128 + 4),
            ("DSv4 fp8, 584 B", 128, 2 * 512, 448 + 2 * 64 + 7),
        )
    },
    **{
        ("move", f"MLA by {placement}, {ids} ids"): 61 * 73_728
        for placement in ("layer", "page")
        for ids in ("device", "host")
    },
    **{
        (group, name): RUNS // width * width
        for group in ("gather", "scatter")
        for name, width in (("512 B", 512), ("4 KiB", 4096), ("36 KiB", 36_864))
    },
    **{
        ("transfer", f"{engine}, {name}"): READ // width * width
        for engine in engine_names()
        for name, width in (
            *(("1 KiB", 1024), ("4 KiB", 4096), ("36 KiB", 36_864), ("1 MiB", 1 << 20)),
            ("one run", READ),
        )
    },
    **{
        ("handoff", f"local, {family}, {name}"): nbytes
        for name, (tokens, last) in HANDED.items()
        for family, nbytes in state_bytes(tokens, last).items()
    },
}


def run(*arguments):
    return CliRunner().invoke(app, ["--quick", *map(str, arguments)])


def told(done):
    """The printed output in one line, without the table's box."""
    return " ".join(done.output.replace("│", "").split())


@pytest.fixture(scope="module")
def everything():
    """One run of all groups, engines and cases: its output and JSON."""
    done = run("--json")
    assert done.exit_code == 0, done.output
    return told(done), output_of("bench", done.stdout)


def test_every_group_has_rows_with_finite_positive_figures(everything):
    _, found = everything
    assert {row["group"] for row in found["rows"]} == set(GROUPS)
    for row in found["rows"]:
        if row["reason"] is None:
            figures = row["seconds"], row["reference_seconds"], row["ratio"]
            assert all(math.isfinite(each) and each > 0 for each in figures), row
            rate = row["bytes"] / row["seconds"] / 2**30
            assert row["gib_per_second"] == (pytest.approx(rate) if row["bytes"] else None)
            assert row["rounds"] >= 3 and not row["failed"]


def test_the_json_is_one_object_of_machine_versions_date_and_rows(everything):
    _, found = everything
    assert {key: type(value) for key, value in found.items()} == KEYS
    assert all(set(row) == ROW_KEYS for row in found["rows"])
    assert found["machine"]["device"] == "cpu" and found["machine"]["threads"] == "1"
    assert torch.__version__.startswith(found["versions"]["torch"]) and found["quick"]
    assert datetime.fromisoformat(found["date"]).utcoffset().total_seconds() == 0


def test_a_hand_off_is_told_beside_its_bytes(everything):
    printed, found = everything
    rows = [row for row in found["rows"] if row["group"] == "handoff"]
    assert len(rows) == 6 * 3 and {row["engine"] for row in rows} == {"local"}
    for row in rows:
        assert row["reason"] is None and row["bound"] == "the bare engine"
        assert math.isfinite(row["beyond_seconds"]), row
    assert "beyond: our time less the bound's" in printed


def test_every_engine_is_listed_with_figures_or_a_reason(everything):
    printed, found = everything
    rows = [row for row in found["rows"] if row["group"] == "transfer"]
    assert {row["engine"] for row in rows} == set(engine_names())
    assert {row["engine"] for row in rows if row["reason"] is None} >= set(ENGINES)
    for row in rows:
        if row["reason"] is not None:
            assert row["ratio"] is row["seconds"] is None and row["bytes"] > 0
            assert " ".join(row["reason"].split()) in printed


def test_bytes_are_those_of_the_formats(everything):
    _, found = everything
    counted = {(row["group"], row["case"]): row["bytes"] for row in found["rows"]}
    assert len(counted) == len(found["rows"])
    for case, nbytes in COUNTED.items():
        # runs of DSv4's rows of 583 bytes cover their spare byte too, and those of three layers the
        # second entry of a last page
        most = nbytes * 584 // 583 + 3 * 584 if "DSv4," in case[1] else nbytes
        assert nbytes <= counted.pop(case) <= most, case
    assert not counted


def test_a_ratio_is_that_of_times_taken_in_the_same_round():
    slow = 10.0  # the machine is slow half of the time
    row = all_cases(QUICK, [])[0].row.timed(
        [(1.0, 0.5), (2.0 * slow, 1.0 * slow), (1.0, 0.5), (1.0 * slow, 0.25)]
    )
    assert (row.ratio, row.rounds) == (0.5, 4)
    assert row.ratio_quartiles == (0.38125, 0.5)  # of 0.025, 0.5, 0.5, 0.5
    assert (row.seconds, row.reference_seconds, row.beyond_seconds) == (5.5, 0.5, 5.125)


def test_work_with_a_clock_of_its_own_is_timed_by_it():
    spent = [0.0]

    def call(seconds):
        spent[0] += seconds

    work = Work(partial(call, 3.0), partial(call, 1.0), nothing, lambda: spent[0])
    untimed = Measurement(group="handoff", case="slow", bytes=0, bound="another")
    case = BenchCase(row=untimed, open=lambda _: work, calls=1)
    row = measured(case, mock.Mock(), QUICK)
    assert (row.seconds, row.reference_seconds, row.beyond_seconds) == (3.0, 1.0, 2.0)


def nothing(*_, **__):
    """Does nothing."""


def zeros(rows, where):
    """Reads other locations."""
    return [torch.zeros(len(where), *row.view.shape[2:], dtype=row.dtype) for row in rows]


def no_read(engine, peer, batch):
    """A read of nothing, which is complete."""
    return LocalTransfer(peer)


@pytest.mark.parametrize(
    ("group", "owner", "name", "instead"),
    [
        ("store", CPUDevice, "store_rows", nothing),
        ("load", CPUDevice, "load_rows", staticmethod(zeros)),
        ("move", CPUDevice, "copy_items", nothing),
        ("gather", CPUDevice, "copy_runs", nothing),
        ("scatter", CPUDevice, "copy_runs", nothing),
        ("transfer", LocalEngine, "read", no_read),
        ("handoff", LocalEngine, "read", no_read),
    ],
)
def test_a_case_with_a_wrong_result_fails(monkeypatch, group, owner, name, instead):
    monkeypatch.setattr(owner, name, instead)
    chosen = ("--engine", "local") if group in ("transfer", "handoff") else ()
    done = run("--only", group, *chosen, "--json")
    assert done.exit_code == 1 and f"failed: {group}" in done.stderr
    for row in output_of("bench", done.stdout)["rows"]:
        assert row["failed"] and row["reason"].startswith("wrong: ") and row["ratio"] is None, row


def test_a_hand_off_that_writes_to_items_of_no_request_fails(monkeypatch):
    register, read, memory = LocalEngine.register, LocalEngine.read, []

    def registering(engine, slabs):
        memory.append(slabs[0].base)
        return register(engine, slabs)

    def straying(engine, peer, batch):
        ctypes.memset(memory[-1], 1, 1)  # of item 0, which no request has
        return read(engine, peer, batch)

    monkeypatch.setattr(LocalEngine, "register", registering)
    monkeypatch.setattr(LocalEngine, "read", straying)
    done = run("--only", "handoff", "--engine", "local", "--json")
    for row in output_of("bench", done.stdout)["rows"]:
        assert row["failed"] and row["reason"].endswith("items of no request were written."), row


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (NotImplementedError("no such kernel."), 0, "not run: gather 512 B and 2 more: no such"),
        (OSError("the card fell out"), 1, "failed: gather 512 B and 2 more: OSError: the card"),
    ],
)
def test_a_case_that_cannot_run_or_raises_is_listed(monkeypatch, error, code, line):
    monkeypatch.setattr(CPUDevice, "copy_runs", mock.Mock(side_effect=error))
    done = run("--only", "gather", "--only", "move")
    assert done.exit_code == code and line in told(done)
    assert "MLA by layer" in done.output


def test_a_process_that_dies_is_a_failure(monkeypatch):
    def call(other, method, *_):
        other.post(method)
        other.process.kill()
        other.answer()

    monkeypatch.setattr(OtherProcess, "call", call)
    done = run("--only", "transfer", "--engine", "local")
    line = "failed: transfer local, 1 KiB and 4 more: ProcessFailed: the other process ended"
    assert done.exit_code == 1 and line in told(done)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "abacus:0"], "no installed package offers 'abacus'"),
        (["--device", "meta"], "device 'meta' has no memory to measure"),
        (["--only", "stores"], "--only stores: one of store, load"),
        (["--engine", "pigeon"], "--engine pigeon: one of ascend, local"),
        (["--chart", "nowhere/x.html"], "nowhere/x.html: there is no such directory"),
        (["--chart", "x.svg"], "x.svg: the name must end in .html."),
    ],
)
def test_invalid_options_are_refused_before_anything_runs(arguments, sentence):
    done = run(*arguments)
    assert done.exit_code == 2
    assert sentence in told(done)


def test_the_chart_has_a_row_for_every_case(tmp_path):
    path = tmp_path / "bench.html"
    groups = "--only", "gather", "--only", "handoff", "--only", "transfer"
    done = run(*groups, "--engine", "local", "--chart", path)
    assert done.exit_code == 0, done.output
    text = path.read_text()
    assert "right is better" in text
    words = ("gather", "36 KiB", "local, MLA, 1 token (the bare engine)", "local, 1 MiB")
    for name in words:
        assert f">{name}</" in text


def ratios_of(*ratios):
    """A chart of copies with these ratios."""
    row = Measurement(group="gather", case="x", bytes=1)
    return report_of(*(row.timed([(1.0, ratio)]) for ratio in ratios)).chart()


def report_of(*rows):
    machine = {"device": "cpu", "name": "x"}
    date = "2026-11-23T12:00:00"
    return BenchReport(machine=machine, versions={}, date=date, quick=False, rows=rows)


@pytest.mark.parametrize(
    ("ratios", "low", "high"),
    [
        ((0.5,), 0.001, 1.2),
        ((0.0015, 1.24), 0.001, 1.488),
        ((0.00012,), 0.0001, 1.2),
        ((50,), 0.001, 60),
    ],
)
def test_the_axis_is_logarithmic_from_a_thousandth_and_shows_every_ratio(ratios, low, high):
    (panel,) = ratios_of(*ratios).panels
    axis = panel.axis
    assert (axis.low, axis.high, axis.log) == (pytest.approx(low), pytest.approx(high), True)
    wide = math.log(high / low)
    for ratio, row in zip(ratios, panel.rows[1:]):
        (dot,) = (mark for mark in row.marks if mark.kind == "dot")
        assert axis.at(dot.end) == pytest.approx(100 * math.log(max(ratio, low) / low) / wide)
        assert [mark.start for mark in row.marks if mark.kind == "thin"] == [1.0]


def test_the_chart_shows_how_far_the_rounds_are_apart():
    source, case = random.Random(5), Measurement(group="gather", case="x", bytes=1)
    ratios = [source.uniform(0.2, 0.6) for _ in range(21)]
    row = case.timed([(1.0, ratio) for ratio in ratios])
    chart = report_of(row).chart()
    low, high = sorted(ratios)[5], sorted(ratios)[15]
    (panel,) = chart.panels
    axis = panel.axis
    text = chart_html(chart)
    left, width = axis.at(low), axis.at(high) - axis.at(low)
    assert f'<i class="mark whisker" style="left:{left:.2f}%;width:{width:.2f}%;' in text
    assert f">{sorted(ratios)[10]:.2f} ({low:.2f} to {high:.2f})<" in text
    assert "the middle half of the rounds</li>" in text


def test_the_axis_reaches_as_far_as_the_rounds_do():
    row = Measurement(group="gather", case="x", bytes=1)
    rounds = [(1.0, ratio) for ratio in (1e-5, 1e-5, 0.5, 7.0, 7.0)]
    (panel,) = report_of(row.timed(rounds)).chart().panels
    assert (panel.axis.low, panel.axis.high) == (pytest.approx(1e-5), pytest.approx(8.4))


def test_a_wrong_byte_of_any_region_is_seen_between_pools_of_other_pages():
    for build, more in ((hybrid, {"page_size": 8}), (dsv4, {}), (mha, {"order": "hnd"})):
        pool, single = build(), build(**more)
        address, other = oracle.place(pool, 21, 1), oracle.place(single, 21, 2)
        oracle.fill(pool, address)
        oracle.fill(single, other)
        right = same_as_pool(pool, address, single, other)
        assert right == (0, pool.layout.live_bytes(21))
        for region in pool.layout.regions:
            space = pool.layout.space_of(region)
            *_, last = flat_locations(space, address, space.alive(21))
            item, entry = divmod(int(last), space.steps)
            view = pool.view(region.role, region.layer)
            cell = view[item, entry] if region.axis("entry") else view[item]
            before = cell.contiguous().clone()
            wrong = before.clone()
            wrong.view(torch.uint8).view(-1)[-1:] ^= 1
            cell.copy_(wrong)
            assert same_as_pool(pool, address, single, other) == (1, right.checked), region
            cell.copy_(before)
