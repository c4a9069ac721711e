"""What commands print with --json is of the types whose schemas `kvpool schema` prints, and they
print JSON where they fail too.
"""

from __future__ import annotations

import json

import msgspec
import pytest
from typer.testing import CliRunner

from kvpool.cli import app, commands
from kvpool.cli.output import FailureJSON
from kvpool.cli.schema import json_commands, output_type
from tests.outputs import of_type


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(word) for word in arguments])


def test_describe_prints_a_layout():
    done = run("describe", "deepseek_v32", "--json")
    layout = msgspec.json.decode(done.stdout, type=output_type("describe"))
    assert layout.model == "deepseek_v32"


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
