"""Processes for tests: forked off one that has imported torch, they start in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "disagg.runtime.endpoint", "tests.oracle", "tests.pools"])


def stands_still(pid: int) -> bool:
    """Whether every thread of a process is stopped by a signal, or dead; see proc(5)."""
    try:
        stats = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread has just ended
    return all(stat.rpartition(")")[2].split()[0] in "TZX" for stat in stats)


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process, as `subprocess.Popen` starts it, in a group of its own: what it has started ends
    with it, where it is itself only a script that waits for another program too.
    """
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def forked(work, *given):
    """A fork of this process that does `work` and then waits: its number, and what `work` returned,
    as text.
    """
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(write, str(work(*given)).encode())
            signal.pause()
        finally:
            os._exit(1)
    try:
        os.close(write)
        yield pid, os.read(read, 4096).decode()
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
