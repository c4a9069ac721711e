"""`kvpool snapshot` says what a file holds, or why it is none."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from disagg.cli.snapshot import snapshot
from disagg.snapshot import inspect, save
from kvpool import PoolLayout, Shard
from tests import oracle
from tests.outputs import output_of
from tests.pools import hybrid

APP = typer.Typer(rich_markup_mode=None)  # as kvpool.cli
APP.command()(snapshot)


@pytest.fixture
def file(tmp_path):
    pool = hybrid(shard=Shard(1, 2), model="tiny [x]")
    address = oracle.filled(pool, 21)
    save(tmp_path / "a", pool.layout, address, request="chat-7", conventions={"vocab_size": 128})
    return tmp_path / "a"


def run(*arguments):
    done = CliRunner(env={"COLUMNS": "200"}).invoke(APP, [str(a) for a in arguments])
    return done.exit_code, done.output


def test_show_names_request_model_conventions_and_every_region(file):
    code, said = run("show", file)
    assert code == 0
    assert "a: 21 tokens of request 'chat-7' of model 'tiny [x]', " in said
    assert "space kv: pages of 1 entry" in said and "vocab_size: 128" in said
    (k,) = (line for line in said.splitlines() if "target k " in line)
    assert k.split()[:5] == ["target", "k", "3", "bfloat16", "21"]
    assert "head 2-3 of 4 x 16" in said


def test_json_has_what_the_header_says(file, tmp_path):
    done = CliRunner().invoke(APP, ["show", str(file), str(tmp_path / "none"), "--json"])
    told, refused = output_of("snapshot", done.stdout)
    assert [*refused] == ["file", "refused"] and "No such file" in refused["refused"]
    assert [*told] == ["file", "request", "tokens", "data_bytes", "conventions", "layout"]
    assert (told["file"], told["request"], told["tokens"]) == (str(file), "chat-7", 21)
    assert told["conventions"] == {"vocab_size": 128}
    assert PoolLayout.from_json(json.dumps(told["layout"])) == inspect(file).layout
    assert done.exit_code == 1 and "none: No such file" in done.stderr


def test_check_reads_all_data(file, tmp_path):
    assert run("check", file)[0] == 0
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert run("show", file)[0] == 0
    none = tmp_path / "none"
    code, said = run("check", file, none, tmp_path)
    assert code == 1
    assert f"refused: {file}: target layer 3 v: not the bytes that were saved" in said
    assert f"refused: {none}: No such file or directory." in said
    assert f"refused: {tmp_path}: not a regular file." in said
