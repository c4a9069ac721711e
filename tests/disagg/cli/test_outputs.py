"""What commands print with --json is of the types whose schemas `kvpool schema` prints, and they
print JSON where they fail too.
"""

from __future__ import annotations

import json

import msgspec
import pytest
from typer.testing import CliRunner

from disagg.snapshot import save
from kvpool.cli import app, commands
from kvpool.cli.output import FailureJSON
from kvpool.cli.schema import json_commands, output_type
from tests import oracle
from tests.disagg.cli.test_store import BIG, FIRST, LLAMA, write
from tests.disagg.contract.sides import Split
from tests.pools import hybrid, mha


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(word) for word in arguments])


def of_type(text, kind):
    """The JSON value, which has all that the type has and nothing else."""
    value = json.loads(text)
    assert msgspec.to_builtins(msgspec.convert(value, kind)) == value
    return value


def check(command, *arguments, status=0):
    done = run(*command.split(), *arguments, "--json")
    assert done.exit_code == status, done.output
    return of_type(done.stdout, output_type(command))


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("budget", "deepseek_v4 --draft --tp 8 --pp 3"),
        ("budget", "kimi_linear_48b --pp 9 --block-pool --page-size 512 --weights none"),
        ("explain", "llama_3_1_70b --tp 8:4 --link 400Gb"),
        ("store explain", "llama_3_1_70b llama_3_1_70b --tp 8:4"),
    ],
)
def test_a_command_about_models_prints_its_type(command, options):
    check(command, *options.split())


def test_what_cannot_be_paired_is_of_the_same_type():
    refused = check("explain", *["llama_3_1_70b", "--packing", "bf16:fp8"], status=1)
    assert refused["refused"]
    check("store explain", *["llama_3_1_70b", "qwen3_235b"], status=1)


def test_describe_prints_a_layout():
    done = run("describe", "deepseek_v32", "--json")
    layout = msgspec.json.decode(done.stdout, type=output_type("describe"))
    assert layout.model == "deepseek_v32"


def test_doctor_and_keys_print_their_types(tmp_path):
    done = run("doctor", "--json")  # its status depends on the machine
    of_type(done.stdout, output_type("doctor"))
    check("keys", tmp_path / "keys")


def test_snapshot_prints_a_row_for_each_file_refused_or_not(tmp_path):
    pool = hybrid()
    save(tmp_path / "a", pool.layout, oracle.filled(pool, 21))
    rows = check("snapshot", "check", tmp_path / "a", tmp_path / "none", status=1)
    assert ["refused" in row for row in rows] == [False, True]


def test_pair_prints_its_type_whether_they_fit_or_not(tmp_path):
    for name, split in {
        "p": Split(tp=2, serves=("prefill",)),
        "d": Split(page=8, serves=("decode",)),
    }.items():
        (tmp_path / name).write_text(split.contract().to_json())
    assert check("pair", tmp_path / "p", tmp_path / "d")["pair"]
    check("pair", tmp_path / "d", tmp_path / "none", status=1)


def test_commands_of_a_store_print_their_types(tmp_path):
    url = f"file://{tmp_path}"
    write(url, [mha(**BIG)], FIRST, **LLAMA)
    listing = check("store ls", url)
    namespace = listing["namespaces"][0]["namespace"]
    for what in (namespace, f"{namespace}/0"):
        check("store show", url, what)
    check("store check", url)
    check("store gc", url, "--keep", "1b", "--dry-run")


@pytest.mark.parametrize(
    ("line", "status", "kind", "words"),
    [
        ("budget deepseek_v3", 1, "failed", "does not fit: deepseek_v3"),
        ("budget none", 2, "usage", "config 'none'"),
        ("budget llama_3_1_70b --tp x", 2, "usage", "--tp"),
        ("describe none", 2, "usage", "config 'none'"),
        ("explain none", 2, "usage", "none"),
        ("keys /", 1, "failed", "/"),
        ("pair", 2, "usage", "Missing argument"),
        ("store ls file:///none-such", 1, "failed", "there is no such folder"),
        ("check", 2, "usage", ""),
        ("bench --only none", 2, "usage", "--only none"),
        ("conform --only none", 2, "usage", ""),
        ("accept --only none", 2, "usage", "none"),
        ("demo --model none", 2, "usage", "--model none"),
        ("budgets", 2, "usage", "No such command"),
    ],
)
def test_a_command_that_fails_says_why_in_json_and_on_stderr(line, status, kind, words):
    done, plain = run(*line.split(), "--json"), run(*line.split())
    assert done.exit_code == plain.exit_code == status, done.output
    error = of_type(done.stdout, FailureJSON)["error"]
    assert (error["kind"], error["exit_status"]) == (kind, status) and words in error["message"]
    assert (plain.stdout, plain.stderr) == ("", done.stderr)


def test_every_command_that_has_json_has_a_schema_with_failures():
    groups = {"store": ("ls", "show", "check", "explain", "gc", "serve")}
    named = {f"{name} {one}" for name, ones in groups.items() for one in ones}
    named |= {*commands()} - {"proxy", "schema", *groups}
    assert named <= {*json_commands()}
    for name in json_commands():
        schema = json.loads(run("schema", *name.split()).stdout)
        assert schema["anyOf"][1] == {"$ref": "#/$defs/FailureJSON"}, name
    assert run("schema", "none").exit_code == 2
