"""`kvpool doctor` lists what works here, whatever else is broken."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer

from disagg.cli import doctor
from tests.disagg.engines.peers import ENGINES
from tests.outputs import output_of

KVPOOL = Path(sys.executable).with_name("kvpool")


class Absent:
    @staticmethod
    def availability():
        return "no such card in this machine. Put one in."


class Broken:
    @staticmethod
    def availability():
        raise OSError("libvendor.so: undefined symbol")


class Works:
    def __init__(self, name="works"):
        self.name = name

    @staticmethod
    def availability():
        return None


def offer(monkeypatch, missing=(), **groups):
    """Entry points of names of this module, by group; `missing`: of a module that imports a package
    that is not installed.
    """
    made = {
        group: [EntryPoint(name, f"{__name__}:{name}", group) for name in names]
        for group, names in groups.items()
    }
    for group in missing:
        made[group].append(EntryPoint("optional", "tests.disagg.cli.optional:Optional", group))
    monkeypatch.setattr(doctor, "entry_points", lambda group: made[group.partition(".")[2]])


def test_installed_devices_and_engines_work():
    done = subprocess.run([KVPOOL, "doctor", "--json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = output_of("doctor", done.stdout)
    works = {(each["kind"], each["name"]) for each in said["found"] if each["problem"] is None}
    assert works >= {("device", "cpu"), ("device", "meta"), *(("engine", name) for name in ENGINES)}
    assert ("helper", "native copies") in works
    for name in ("ascend", "mori"):
        [found] = [each for each in said["found"] if each["name"] == name]
        assert found["problem"] is None or found["problem"].startswith("missing: ")
    assert said["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    table = subprocess.run([KVPOOL, "doctor"], capture_output=True, text=True, timeout=60).stdout
    assert all(name in table for kind, name in works if kind != "command")


def test_each_failure_has_a_reason_and_the_others_are_still_checked(monkeypatch):
    offer(monkeypatch, devices=["Missing"], engines=["Absent", "Broken"], commands=[])
    missing, absent, broken, *_ = doctor.availabilities()
    assert [each.kind for each in (missing, absent, broken)] == ["device", "engine", "engine"]
    assert "AttributeError" in missing.problem and "Missing" in missing.problem
    assert absent.problem == "no such card in this machine. Put one in."
    assert broken.problem == "OSError: libvendor.so: undefined symbol"
    assert [each.broken for each in (missing, absent, broken)] == [True, False, True]


def doctored(capsys):
    """The exit status, and what is said on a terminal with colours."""
    status = 0
    try:
        doctor.doctor()
    except typer.Exit as ended:
        status = ended.exit_code
    return status, capsys.readouterr()


@pytest.mark.parametrize(
    ("engines", "missing", "status", "words", "red"),
    [
        (["Works", "Absent"], (), 0, "no such card in this machine. Put one in.", False),
        (["Works"], ("engines",), 0, "needs not_installed_anywhere, which is not", False),
        (["Works", "Broken"], (), 1, "OSError: libvendor.so: undefined symbol", True),
    ],
)
def test_red_and_the_status_are_of_what_is_broken(
    monkeypatch, capsys, engines, missing, status, words, red
):
    """Not of what is optional and missing: a card, or a package that a module imports."""
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "120")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    offer(monkeypatch, missing, devices=["Works"], engines=engines, commands=[])
    ended, said = doctored(capsys)
    assert ended == status and words in " ".join(said.out.split())
    assert ("\x1b[31m" in said.out) == red and ("broken" in said.out) == red
    assert "\x1b[32m" in said.out and ("not here" in said.out) == (not red)


def test_a_machine_on_which_no_engine_works_is_exit_status_1(monkeypatch, capsys):
    offer(monkeypatch, devices=["Works"], engines=["Absent"], commands=[])
    ended, said = doctored(capsys)
    assert ended == 1
    assert "no such card" in " ".join(said.out.split()) and said.err == "no engine works here.\n"
