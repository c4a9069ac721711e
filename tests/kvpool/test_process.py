"""Another process answers calls: results, errors, its end, its restart, progress between calls."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpool.process import OtherProcess, ProcessFailed
from tests.processes import until


class Server:
    progress_seconds = None

    def __init__(self, first=0):
        self.number = first * (first - 1) // (first - 1)  # 1 is refused

    def add(self, more):
        self.number += more
        return self.number

    def fail(self, error):
        raise error

    def leave(self, status):
        os._exit(status)

    def sleep(self, seconds):
        time.sleep(seconds)

    def pid(self):
        return os.getpid()

    def tick(self):
        self.progress_seconds = 0.01

    def progress(self):
        self.number += 1


def test_calls_are_answered_in_order():
    with OtherProcess(Server, 5) as other:
        other.post("add", 1)
        assert (other.answer(), other.call("add", 2)) == (6, 8)
        assert other.alive and not other.answers()
    assert not other.alive


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (KeyError("x"), "in the peer: KeyError: 'x'"),
        (ProcessFailed("no such memory."), "in the peer: no such memory."),
        (MemoryError(), "in the peer: MemoryError"),
    ],
)
def test_an_error_is_raised_here_and_the_next_call_is_answered(error, sentence):
    with OtherProcess(Server, name="the peer") as other:
        with pytest.raises(ProcessFailed, match=f"^{sentence}$"):
            other.call("fail", error)
        assert other.call("add", 1) == 1


def test_what_cannot_be_made_is_the_answer_to_the_first_call():
    with OtherProcess(Server, 1) as other, pytest.raises(ProcessFailed, match="ZeroDivision"):
        other.call("add", 1)


def test_a_process_that_ends_or_does_not_answer_is_named():
    with OtherProcess(Server, name="the peer") as other:
        other.post("leave", 7)
        assert other.answers(20)
        for _ in range(2):
            with pytest.raises(ProcessFailed, match=r"^the peer ended with status 7\.$"):
                other.answer()
    with OtherProcess(Server, name="the peer") as other:
        other.call("add", 1)
        with pytest.raises(ProcessFailed, match="the peer did not answer in 0 s"):
            other.call("sleep", 60, timeout=0.1)
        assert not other.alive


def test_another_is_started_after_one_has_ended():
    with OtherProcess(Server, 3) as other:
        assert other.revived().call("add", 1) == other.revived().call("add", 0) == 4
        with pytest.raises(ProcessFailed):
            other.call("leave", 0)
        assert other.revived().call("add", 1) == 4
    assert not other.alive


def test_a_server_makes_progress_between_calls():
    with OtherProcess(Server) as other:
        other.call("tick")
        time.sleep(0.2)
        assert other.call("add", 0) > 2


def test_it_ends_with_its_parent():
    code = f"import {__name__} as test; test.parent()"
    command = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as running:
        child = int(running.stdout.readline())
        running.kill()
    until(lambda: ended(child))


def parent():
    """Prints the number of another process, and waits."""
    other = OtherProcess(Server)
    print(other.call("pid"), flush=True)
    time.sleep(60)


def ended(pid):
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
