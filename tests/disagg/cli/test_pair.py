"""`kvpool pair`: yes with what travels, or no with every reason, of files and running engines."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from disagg.contract.server import ContractServer
from kvpool.cli import app
from tests.disagg.contract.sides import Split
from tests.outputs import output_of

PREFILL = Split(tp=2, conventions={"model": "a"}, serves=("prefill",))
DECODE = Split(page=8, conventions={"model": "a"}, serves=("decode",))


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["pair", *map(str, arguments)])


def told(*arguments, status=0):
    done = run(*arguments, "--json")
    assert done.exit_code == status, done.output
    return output_of("pair", done.stdout)


@pytest.fixture
def saved(tmp_path):
    def write(name, split):
        (tmp_path / name).write_text(split.contract().to_json())
        return tmp_path / name

    return write


def test_two_saved_contracts_fit_and_what_travels_is_explained(saved, tmp_path):
    files = saved("p", PREFILL), saved("d", DECODE)
    done = run(*files, "--tokens", 64, "--link", "8Gb")
    assert done.exit_code == 0
    assert done.stdout.startswith(
        "yes\nprefill: kvpool 0.1.0, engine local\ndecode: kvpool 0.1.0, engine local\nplan for 64"
    )
    assert "resharded: head: 2 of 4 on the source, 4 on the destination" in done.stdout
    assert "on the wire: " in done.stdout
    # the same as of the layouts alone
    for name, split in (("0", PREFILL), ("1", PREFILL), ("2", DECODE)):
        rank = min(int(name), 1) if split is PREFILL else 0
        (tmp_path / name).write_text(split.contract().ranks[rank].layout.to_json())
    words = ["explain", *(str(tmp_path / name) for name in "012"), "--tokens", "64", "--json"]
    explained = json.loads(CliRunner().invoke(app, words).stdout)
    found = told(*files, "--tokens", 64)
    assert found["pair"] is True and found["refused"] == []
    for name in ("plans", "sent", "tokens", "refused"):
        assert found["explained"][name] == explained[name]
    assert found["prefill"]["labels"]["contract"] == found["decode"]["labels"]["contract"]
    assert found["prefill"]["serves"] == ["prefill"] and found["prefill"]["size"] == 2


def test_running_engines_are_asked(saved):
    with (
        ContractServer("127.0.0.1:*", PREFILL.contract()) as prefill,
        ContractServer("127.0.0.1:*", DECODE.contract()) as decode,
    ):
        addresses = f"http://{prefill.address}", f"http://{decode.address}"
        assert run(*addresses).exit_code == 0
        assert run(saved("p", PREFILL), addresses[1]).exit_code == 0
        done = run(*reversed(addresses))
    assert done.exit_code == 1
    assert "prefill serves decode only. Start it for prefill." in done.stdout


def test_every_reason_is_printed_with_its_ranks(saved):
    other = Split(engine="nixl", dtype="f16", conventions={"model": "b"}, serves=("decode",))
    files = saved("p", PREFILL), saved("d", other)
    lines = run(*files).stdout.splitlines()
    assert lines[0] == "no, for 4 reasons"
    assert lines[2] == "decode: kvpool 0.1.0, engine nixl"
    prefix = f"refused: prefill {files[0]} ranks 0-1 -> decode {files[1]}: "
    assert lines[3] == (
        f"{prefix}engine 'local' on prefill, 'nixl' on decode. Use the same on both sides."
    )
    assert lines[4].startswith(f"{prefix}model: 'a' on prefill, 'b' on decode.")
    assert lines[5].startswith(f"{prefix}target layers 0-2 k: bfloat16 on prefill, float16")
    found = told(*files, status=1)
    assert found["pair"] is False
    assert [each["about"] for each in found["refused"]] == [
        *("engine", "conventions", "layout", "layout")
    ]


def test_what_cannot_be_read_is_a_no_with_its_reason(saved, tmp_path):
    (tmp_path / "new").write_text('{"version": 2}')
    found = told(tmp_path / "new", "http://127.0.0.1:1", status=1)
    assert [each["about"] for each in found["refused"]] == ["contract"] * 2
    assert f"{tmp_path}/new: contract version 2" in found["refused"][0]["reason"]
    assert "Connection refused" in found["refused"][1]["reason"]
    assert found["explained"] is None
    assert "no, for 1 reason\n" in run(saved("p", PREFILL), tmp_path / "none").stdout


def test_a_link_that_is_none_is_a_usage_error(saved):
    done = run(saved("p", PREFILL), saved("d", DECODE), "--link", "fast")
    assert done.exit_code == 2 and "--link 'fast'" in done.output
