"""Commands in documents and helps are those that exist: names, options, modules, targets, paths.

None is run; `tests/test_documents.py` runs the documents' Python.
"""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest
import typer

from kvpool.cli import app, commands, load

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "README.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
PROGRAM = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S+/bin/)?(kvpool|python|pytest|make) (.+)")
OURS = ("tests", "disagg", "kvpool")


def written() -> dict[str, tuple[str, str, list[str]]]:
    """By document and command: who wrote it, its program and its words."""
    found = {}
    for path in PAGES:
        text = path.read_text()
        shell = [body for language, body in BLOCK.findall(text) if not language]
        lines = "".join(shell).replace("\\\n", " ").splitlines()
        for each in [*lines, *re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))]:
            if match := PROGRAM.fullmatch(each.strip()):
                found[f"{path.name}: {each.strip()}"] = path.name, *words(*match.groups())
    for name, entry in commands().items():
        if entry.module.partition(".")[0] in OURS:
            for line in re.findall(r"^ *kvpool (.+)$", inspect.getdoc(load(entry)) or "", re.M):
                found[f"help: {line}"] = f"kvpool {name} --help", *words("kvpool", line)
    return found


def words(program: str, line: str) -> tuple[str, list[str]]:
    """A program's arguments, without comment and redirection."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="><|;")
    lexer.commenters, lexer.whitespace_split = "#", True
    try:
        return program, [*iter(lambda: lexer.get_token() or ">", ">")]
    except ValueError:  # a quotation goes on in the next line
        return program, line.split()


WRITTEN = written()


def of(program: str):
    """Parameters: who wrote it, and the arguments."""
    rows = {key: (by, said) for key, (by, name, said) in WRITTEN.items() if name == program}
    return pytest.mark.parametrize(("by", "said"), rows.values(), ids=rows)


@of("kvpool")
def test_a_command_has_the_options_that_documents_give_it(by, said):
    root = typer.main.get_command(app)
    if said[0].startswith("-"):
        assert said[0] in {name for each in root.params for name in each.opts}, by
        return
    context = root.make_context("kvpool", [*said])
    name, command, rest = root.resolve_command(context, said)
    if rest and rest != ["--help"]:  # else it is named, and not called
        command.make_context(name, rest, parent=context)


@of("python")
def test_a_module_or_file_that_documents_run_is_there(by, said):
    if "pytest" in said:
        test_tests_that_documents_run_are_there(by, said)
    elif "-m" in said:
        name = said[said.index("-m") + 1]
        path = ROOT.joinpath(*name.split("."))
        here = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        assert here or name.partition(".")[0] not in OURS, f"{by}: {name}"


@of("pytest")
def test_tests_that_documents_run_are_there(by, said):
    for word in said:
        if word.startswith("tests/"):
            assert (ROOT / word).exists(), f"{by}: {word}"


@of("make")
def test_a_target_that_documents_make_is_there(by, said):
    targets = re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert {word for word in said if re.fullmatch(r"[\w.-]+", word)} <= {*targets}, by


def test_documents_have_commands_of_each_kind():
    assert {program for _, program, _ in WRITTEN.values()} == {"kvpool", "python", "pytest", "make"}
    assert len(WRITTEN) > 100
