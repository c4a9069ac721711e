"""`kvpool doctor` lists what works here, whatever else is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer

from disagg.cli import doctor
from tests.disagg.engines.peers import ENGINES

KVPOOL = Path(sys.executable).with_name("kvpool")


class Absent:
    @staticmethod
    def availability():
        return "no such card in this machine. Put one in."


class Broken:
    @staticmethod
    def availability():
        raise OSError("libvendor.so: undefined symbol")


def offer(monkeypatch, **groups):
    """Entry points of modules of this test; `absent` names a missing one."""
    made = {
        group: [EntryPoint(name, f"{__name__}:{name}", group) for name in names]
        for group, names in groups.items()
    }
    monkeypatch.setattr(doctor, "entry_points", lambda group: made[group.partition(".")[2]])


def test_installed_devices_and_engines_work():
    done = subprocess.run([KVPOOL, "doctor", "--json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    works = {(each["kind"], each["name"]) for each in said["found"] if each["problem"] is None}
    assert works >= {("device", "cpu"), ("device", "meta"), *(("engine", name) for name in ENGINES)}
    assert {("helper", "native copies"), ("helper", "native binding")} <= works
    for name in ("ascend", "mori"):
        [found] = [each for each in said["found"] if each["name"] == name]
        assert found["problem"] is None or found["problem"].startswith("missing: ")
    assert said["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    table = subprocess.run([KVPOOL, "doctor"], capture_output=True, text=True, timeout=60).stdout
    assert all(name in table for _, name in works)


def test_each_failure_has_a_reason_and_the_others_are_still_checked(monkeypatch):
    offer(monkeypatch, devices=["Missing"], engines=["Absent", "Broken"])
    missing, absent, broken, *_ = doctor.availabilities()
    assert [each.kind for each in (missing, absent, broken)] == ["device", "engine", "engine"]
    assert "AttributeError" in missing.problem and "Missing" in missing.problem
    assert absent.problem == "no such card in this machine. Put one in."
    assert broken.problem == "OSError: libvendor.so: undefined symbol"


def test_a_machine_on_which_no_engine_works_is_exit_status_1(monkeypatch, capsys):
    offer(monkeypatch, devices=[], engines=["Absent"])
    with pytest.raises(typer.Exit) as ended:
        doctor.doctor()
    assert ended.value.exit_code == 1
    assert "no such card" in capsys.readouterr().out
