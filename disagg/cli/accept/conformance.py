"""The conformance kit, by pytest in a process of its own: a device that crashes ends only that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import NamedTuple
from xml.etree import ElementTree

from disagg.cli.accept.report import FAILED, NOT_HERE, PASSED, Row, State
from disagg.cli.accept.scope import Scope

KIT_TIMEOUT = 1800.0
"""Seconds until the kit is ended."""
QUICK_POOL = "mla fp8"
NAMES = re.compile(r"test_(?:device|pool)\[(?:(?P<subject>.*)-)?(?P<check>\w+)\]")
SHARE = re.compile(r"\[ *(\d+)%\]")


class Check(NamedTuple):
    """A check of a pool, or of the device, and how it ended."""

    subject: str
    name: str
    state: State
    sentence: str
    seconds: float


def conformance_rows(scope: Scope) -> list[Row]:
    """A row for the device, one for each pool, and one for each check that failed."""
    if find_spec("pytest") is None:
        return [Row("kit", NOT_HERE, "pytest is not installed. pip install pytest.")]
    with TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        ended = _run(scope, results)
        checks = list(_checks(results)) if results.exists() else []
    rows = list(_rows(scope.device.name, checks))
    if ended is not None:
        rows.append(Row("kit", FAILED, ended))
    return rows


def _run(scope: Scope, results: Path) -> str | None:
    """Runs the kit; why it has ended before its end, or None."""
    kit = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]
    # a project's own options and plugins are for its own tests
    kit += ["-c", os.devnull, "--rootdir", str(results.parent), f"--junitxml={results}"]
    kit += ["-p", "kvpool.testing.plugin", "--pyargs", "kvpool.testing"]
    kit += ["--device", scope.device.name]
    kit += ["--pool", QUICK_POOL] * scope.quick
    paths = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        kit,
        env={**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=results.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    clock = Timer(KIT_TIMEOUT, process.kill)
    clock.start()
    last = ""
    try:
        for line in process.stdout or ():
            if done := SHARE.search(line):
                scope.tell(f"{done[1]} % of the checks")
            last = line.strip() or last
        status = process.wait()
    finally:
        timed_out = clock.finished.is_set()
        clock.cancel()
        process.kill()
        process.wait()
    if timed_out:
        return f"ended after {KIT_TIMEOUT:.0f} s."
    return None if status in (0, 1) else f"pytest ended with status {status}: {last}"


def _checks(results: Path) -> Iterator[Check]:
    for case in ElementTree.parse(results).iter("testcase"):
        named = NAMES.fullmatch(case.get("name", ""))
        subject, name = (named["subject"], named["check"]) if named else ("", case.get("name", ""))
        state, sentence = PASSED, ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                state = NOT_HERE if child.tag == "skipped" else FAILED
                text = " ".join((child.get("message") or child.text or "").split())
                # the kit names device, pool and check itself
                sentence = re.sub(r"^(?:[\w.]+: )?device .*?, check \w+: ", "", text)
        yield Check(subject or "", name, state, sentence, float(case.get("time", 0)))


def _rows(device: str, checks: list[Check]) -> Iterator[Row]:
    for subject in dict.fromkeys(check.subject for check in checks):
        mine = [check for check in checks if check.subject == subject]
        what = f"device {device}" if subject == device else f"pool {subject}"
        passed = [check for check in mine if check.state == PASSED]
        if passed:
            spent = sum(check.seconds for check in passed)
            yield Row(what, PASSED, f"{len(passed):,} checks", spent)
        for check in mine:
            if check.state != PASSED:
                yield Row(f"{what}, {check.name}", check.state, check.sentence, check.seconds)
