"""No process outlives a run of the suite. What is left when the tests have ended fails the run,
which names and kills it; and however the run itself ends, a guard beside it kills what is left.

A process is known by the environment that it was started with, which has the run's mark.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from uuid import uuid4

MARK = "KVPOOL_TEST_RUN"
"""The environment variable: marks of this run, and of those that it was started by."""
PATIENCE = 5.0
"""Seconds in which processes may end by themselves once the tests have ended."""
HELPERS = b"multiprocessing.forkserver import main", b"multiprocessing.resource_tracker import main"
"""What multiprocessing runs beside a process, and what ends with it."""
Lines = dict[int, str]
"""Command lines of processes, by number."""


def alive(run: str, root: int = 0) -> Lines:
    """The processes that carry the mark of a run, and those that descend from `root`: the mark of a
    fork is that of the process, which got it too late to have it there.
    """
    parents: dict[int, int] = {}
    lines: dict[int, bytes] = {}
    marked = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command, environment = (folder / name for name in ("cmdline", "environ"))
            if state in "ZX":
                continue
            number = int(folder.name)
            parents[number], lines[number] = int(parent), command.read_bytes()
            if run.encode() in environment.read_bytes():
                marked.add(number)
    family = {root} - {0}
    while more := {n for n, parent in parents.items() if parent in family} - family:
        family |= more
    helpers = {n for n in family if parents.get(n) == root and any(h in lines[n] for h in HELPERS)}
    left = (marked | family) - helpers - {root}
    return {n: lines[n].replace(b"\0", b" ").decode(errors="replace").strip() for n in left}


def end(listed: Callable[[], Lines], patience: float) -> Lines:
    """Kills the processes that do not end by themselves; returns them."""
    until = time.monotonic() + patience
    while (left := listed()) and time.monotonic() < until:
        time.sleep(0.05)
    lines, until = left, time.monotonic() + PATIENCE
    while left and time.monotonic() < until:
        for number in left:
            with suppress(OSError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.02)
        left = listed()  # which may have started others meanwhile
    return lines


class Guard:
    """Marks what this process starts from now on, and is a process that ends what is left of that
    when this one has ended, in whatever way.
    """

    def __init__(self) -> None:
        self._run, self._parent = uuid4().hex, os.getpid()
        command = [sys.executable, "-S", __file__, self._run, str(self._parent), str(PATIENCE)]
        # in a session of its own, which the signals of a terminal do not reach
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.environ[MARK] = f"{os.environ.get(MARK, '')} {self._run}"

    def end(self) -> list[str]:
        """Kills what does not end by itself; returns the command lines."""
        return sorted(end(self._alive, PATIENCE).values())

    def _alive(self) -> Lines:
        return {
            n: line for n, line in alive(self._run, self._parent).items() if n != self._process.pid
        }


def main(run: str, parent: str, patience: str) -> None:
    """The guard's process."""
    with suppress(ProcessLookupError):  # it has ended
        wait([os.pidfd_open(int(parent))])
    end(lambda: alive(run), float(patience))


if __name__ == "__main__":
    main(*sys.argv[1:])
