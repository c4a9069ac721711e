"""No process outlives a run of the suite, however that ends; where a test leaves one, the run fails
and names it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from uuid import uuid4

import pytest

from tests.leftovers import MARK, alive

LEAVING = """
import os, signal, subprocess, sys, time
from pathlib import Path
import pytest

QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
SLEEP = "import time; time.sleep(600)", "left by a test"
COMMAND = [sys.executable, "-c", *SLEEP]
DETACHED = f"import subprocess; subprocess.Popen({COMMAND}, **{QUIET}, start_new_session=True)"

def test_leaves_a_child():
    subprocess.Popen(COMMAND, **QUIET)

def test_leaves_a_child_of_a_process_that_has_ended():
    subprocess.run([sys.executable, "-c", DETACHED], check=True)

def test_leaves_a_fork():
    if not os.fork():
        os.closerange(0, 1000)  # among them what a worker talks to its run by
        signal.pause()

def test_stays():
    Path("reached").write_text(str(os.getpid()))
    while Path("stay").exists():
        time.sleep(0.01)
"""
HASTE = """
import tests.leftovers
tests.leftovers.PATIENCE = 0.2
"""


class Run:
    """A run of pytest, with the hooks of this suite, on tests that leave processes."""

    def __init__(self, folder, *options):
        self._folder, self._run = folder, uuid4().hex
        (folder / "test_leaving.py").write_text(LEAVING)
        (folder / "conftest.py").write_text(HASTE)
        command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
        self.process = subprocess.Popen(
            [*command, "-c", os.devnull, "--rootdir", str(folder), *options],
            cwd=folder,
            env={
                **os.environ,
                MARK: f"{os.environ[MARK]} {self._run}",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def alive(self):
        """Its processes, and what they have left."""
        return alive(self._run)

    def reach(self):
        """The process that runs the tests, once it has come to the last, which stays."""
        file = self._folder / "reached"
        while not (file.exists() and file.read_text()):
            assert self.process.poll() is None
            time.sleep(0.02)
        return int(file.read_text())

    def end(self):
        """What it printed, once all its processes have ended."""
        text, _ = self.process.communicate(timeout=60)
        until = time.monotonic() + 30
        while left := self.alive():
            assert time.monotonic() < until, left
            time.sleep(0.02)
        return text


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_run_whose_tests_leave_processes_fails_and_names_them(tmp_path, workers):
    run = Run(tmp_path, "-n", workers)
    text = run.end()
    _, _, lines = text.partition("processes that outlived the tests")
    assert run.process.returncode == pytest.ExitCode.TESTS_FAILED
    assert lines.count("left by a test") == 2 and len(lines.splitlines()) >= 4, text
    assert "4 passed" in text and "failed" not in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_process(tmp_path, number):
    (tmp_path / "stay").touch()
    run = Run(tmp_path, "-n", "1")
    run.reach()
    assert sum("left by a test" in line for line in run.alive().values()) == 2
    signalled = os.killpg if number == signal.SIGINT else os.kill  # Ctrl-C reaches the group
    signalled(run.process.pid, number)
    run.end()


def test_what_a_killed_worker_leaves_is_named(tmp_path):
    (tmp_path / "stay").touch()
    run = Run(tmp_path, "-n", "1", "--max-worker-restart", "0")
    os.kill(run.reach(), signal.SIGKILL)
    text = run.end()
    assert text.count("left by a test") == 2, text
