"""The `kvpool` command lists and runs commands of any package, whatever else is broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from disagg.engines.base import EngineUnavailable, create_engine, engine_names
from kvpool.cli import app
from kvpool.device import DeviceUnavailable, get_device
from kvpool.models import declare
from tests.kvpool.cli.plugins import package

KVPOOL = Path(sys.executable).with_name("kvpool")
OURS = {"accept", "bench", "budget", "demo", "describe", "doctor", "explain", "keys"}
OURS |= {"snapshot", "store"}
every_command = pytest.mark.parametrize("name", sorted(OURS))
GREETS = '''
print("imported")
def greet(who: str = "world") -> None:
    """Greet someone, who may be far away, in a sentence that is longer than a terminal is wide.

    More.
    """
    print("hello", who)
'''
GROUP = '''
import typer
print("imported")
fleet = typer.Typer(rich_markup_mode=None)
@fleet.callback()
def about() -> None:
    """Ships and what they carry. More."""
@fleet.command()
def sail(ship: str) -> None:
    print(ship, "sails")
@fleet.command()
def sink(ship: str) -> None:
    print(ship, "sinks")
'''


def run(*arguments, width=80, **environment):
    terminal = CliRunner(env={"COLUMNS": str(width), **environment})
    return terminal.invoke(app, arguments, prog_name="kvpool")


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """Commands of another package, of which one works, one is an app of two, one raises, and two
    have no module; and an engine that raises.
    """
    (tmp_path / "greeting.py").write_text(GREETS)
    (tmp_path / "raising.py").write_text('raise OSError("libvendor.so: undefined symbol")')
    (tmp_path / "needing.py").write_text("import not_installed_anywhere")
    (tmp_path / "harbour.py").write_text(GROUP)
    lines = ["fleet = harbour:fleet"]
    lines += ["greet = greeting:greet", "raising = raising:run", "gone = nowhere.at.all:run"]
    lines += ["needing = needing:run", "inside = raising.needing:run"]
    lines += ["[disagg.engines]", "pigeon = raising:Engine"]
    package(tmp_path, "vendor-tools", "\n".join(["[kvpool.commands]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)


def test_a_list_of_commands_imports_none_and_cuts_no_sentence(plugins):
    done = run("--help")
    assert done.exit_code == 0, done.stderr
    assert "imported" not in done.stdout and "undefined symbol" not in done.stderr
    said = " ".join(done.stdout.split())
    assert "greet Greet someone, who may be far away, in a " in said
    assert "sentence that is longer than a terminal is wide" in said
    assert OURS | {"raising"} <= set(re.findall(r"^  (\w+)\b", done.stdout, re.M))


def test_an_app_of_several_commands_is_a_command(plugins):
    assert re.search(r"^  fleet +Ships and what they carry$", run("--help").stdout, re.M)
    assert re.findall(r"^  (s\w+)", run("fleet", "--help").stdout, re.M) == ["sail", "sink"]
    assert run("fleet", "sail", "Erebus").stdout.endswith("Erebus sails\n")
    assert run("fleet", "sing").exit_code == 2


def test_a_broken_command_is_named_with_its_package_and_error(plugins):
    listed = " ".join(run("--help").stdout.split())
    for name, module in (("gone", "nowhere"), ("inside", "raising.needing")):
        error = f"ModuleNotFoundError: No module named {module!r}"
        assert f"command {name!r} of package vendor-tools is broken: {error}" in listed
    errors = {"raising": "OSError: libvendor.so: undefined", "gone": "ModuleNotFound"}
    for name, error in errors.items():
        done = run(name, "--help")
        assert done.exit_code == 1 and done.stdout == ""
        assert f"command {name!r} of package vendor-tools is broken: {error}" in done.stderr


def test_a_command_that_lacks_a_package_says_which(plugins):
    done = run("needing")
    reason = "needs not_installed_anywhere, which is not installed."
    assert done.exit_code == 1
    assert done.stderr == f"command 'needing' of package vendor-tools {reason}\n"


def test_others_work_beside_a_broken_command(plugins):
    assert run("greet", "--who", "you").stdout == "imported\nhello you\n"
    version = subprocess.run([KVPOOL, "--version"], capture_output=True, text=True, timeout=120)
    assert version.stdout.startswith("kvpool ")


def test_doctor_shows_what_is_broken_beside_what_works(plugins):
    """A command and an engine, of which the modules raise."""
    done = run("doctor")
    assert done.exit_code == 1
    said = " ".join(done.stdout.split())
    error = "broken of package vendor-tools. OSError: libvendor.so: undefined symbol"
    assert f"command raising {error}" in said and f"engine pigeon {error}" in said
    assert "device cpu works" in said and "engine local works" in said
    needing = "command needing not here of package vendor-tools. needs not_installed_anywhere"
    assert needing in said and "greet" not in said


def test_engines_work_beside_a_broken_one(plugins):
    reason = "engine 'pigeon' of package vendor-tools cannot be loaded: OSError: libvendor.so"
    with pytest.raises(EngineUnavailable, match=reason):
        create_engine("pigeon")
    assert "pigeon" in engine_names()
    create_engine("local").close()


@every_command
def test_every_help_has_an_example_and_a_first_sentence_that_fits(name):
    done = run(name, "--help")
    assert done.exit_code == 0, done.output
    assert re.search(rf"Examples?:\n    kvpool {name} ", done.output), done.output
    assert max(map(len, done.output.splitlines())) <= 80
    assert "--json " in done.output
    listed = run("--help").output
    (line,) = [each for each in listed.splitlines() if each.startswith(f"  {name} ")]
    assert line.endswith(".") and len(line) <= 80


def test_completion_is_shown_for_a_shell():
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [KVPOOL, "--show-completion", "fish"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert "_KVPOOL_COMPLETE" in shown.stdout, shown.stderr


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("kvpool b", ["bench", "budget"]),
        ("kvpool budget --mem", ["--memory"]),
        ("kvpool describe deepseek_v3", ["deepseek_v3", "deepseek_v32"]),
        ("kvpool raising --x", []),
        ("kvpool bench --engine mo", ["mooncake", "mori"]),
    ],
)
def test_commands_options_and_models_are_completed(plugins, words, completed):
    asked = {"_KVPOOL_COMPLETE": "complete_bash", "COMP_WORDS": words}
    done = run(**asked, COMP_CWORD=str(words.count(" ")))
    assert (done.stdout.split(), done.stderr) == (completed, "")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["bugdet"], "No such command 'bugdet'. Did you mean 'budget'?"),
        (["budget", "deepsek_v3"], "Did you mean 'deepseek_v3'?"),
        (["describe", "llama_3_1_80b"], "Did you mean 'llama_3_1_70b'?"),
        (["explain", "kimi_linear"], "Did you mean 'kimi_linear_48b'?"),
        (["budget", "deepseek_v3", "--dtype", "pf8"], "Did you mean 'fp8'?"),
        (["bench", "--only", "stores"], "Did you mean 'store'?"),
        (["bench", "--device", "cup"], "Did you mean 'cpu'?"),
        (["bench", "--only", "transfer", "--engine", "nxil"], "Did you mean 'nixl'?"),
        (["demo", "--model", "lama"], "Did you mean 'llama'?"),
        (["accept", "--only", "stream"], "Did you mean 'streams'?"),
    ],
)
def test_an_unknown_name_gets_the_nearest_known(arguments, meant):
    done = run(*arguments)
    assert done.exit_code == 2
    assert meant in " ".join(done.output.split())


def test_the_library_says_the_nearest_too():
    with pytest.raises(DeviceUnavailable, match="Did you mean 'meta'"):
        get_device("mata")
    pool = declare("deepseek_v3").build(num_pages=2, dtype="bf16", device="meta")
    with pytest.raises(KeyError, match="Did you mean 'latent'"):
        pool.view("latents", 0)
    with pytest.raises(ValueError, match="Did you mean 'llama'"):
        declare({"model_type": "lama"})


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("describe {}", "No such file or directory. Give the path"),
        ("budget {}", "No such file or directory. Give the path"),
        ("explain {} llama_3_1_70b", "No such file or directory. Give the path"),
        ("snapshot show {}", "No such file or directory."),
        ("keys {}/a/b", "No such file or directory."),
        ("accept --out /dev/null{}", "Not a directory."),
        ("describe llama_3_1_70b --svg {}/a.svg", "there is no such directory."),
        ("explain llama_3_1_70b --html {}/a.html", "there is no such directory."),
    ],
)
def test_an_error_of_a_file_says_its_path_once(tmp_path, command, reason):
    path = str(tmp_path / "none")
    done = run(*command.format(path).split(), width=300)
    assert done.exit_code in (1, 2) and reason in done.stderr
    assert done.stderr.count(path) == 1


@pytest.mark.parametrize(
    "command",
    [
        "describe llama_3_1_70b --json --svg",
        "describe llama_3_1_70b --json --html",
        "explain llama_3_1_70b --json --html",
        "bench --quick --only gather --json --chart",
        "demo --json --timeline",
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path, command):
    folder = tmp_path / "folder.html"
    folder.mkdir()
    for path, problem in (
        (tmp_path / "no/such.html", "there is no such directory"),
        (folder, "that is a directory"),
    ):
        done = run(*command.split(), str(path), width=300)
        assert done.exit_code == 2 and [*json.loads(done.stdout)] == ["error"]
        assert f"{command.split()[-1]} {path}: {problem}" in done.stderr
