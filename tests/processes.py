"""Processes for tests: forked off one that has imported torch, they start in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from typing_extensions import Self

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "disagg.runtime.endpoint", "tests.oracle", "tests.pools"])


class Child:
    """A forked process that runs `target(pipe, *arguments)`, and this end of the pipe. As a context
    it kills the process at the end.
    """

    def __init__(self, target: Callable[..., Any], *arguments: Any) -> None:
        self.pipe, end = FORKS.Pipe()
        self.process = FORKS.Process(target=target, args=(end, *arguments), daemon=True)
        self.process.start()
        end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join(20)
        self.pipe.close()

    def answer(self) -> Any:
        """What it sends next."""
        assert self.pipe.poll(120), "the process does not answer"
        return self.pipe.recv()

    def ask(self, *order: Any) -> Any:
        """Its answer to an order."""
        self.pipe.send(order)
        return self.answer()

    def close(self) -> int | None:
        """Sends None, which tells it to end; its exit status."""
        self.pipe.send(None)
        self.process.join(30)
        return self.process.exitcode


def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    """Waits; the limit is for overloaded machines, not for what is tested."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


def stands_still(pid: int) -> bool:
    """Whether every thread of a process is stopped by a signal, or dead; see proc(5)."""
    try:
        stats = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread has just ended
    return all(stat.rpartition(")")[2].split()[0] in "TZX" for stat in stats)


def python(
    *arguments: str, drop: str | tuple[str, ...] = (), limit: int = 120, **environment: str
) -> str:
    """What a fresh interpreter prints with these arguments; it must succeed. It has this process's
    environment but for variables whose names begin with `drop`, and `environment`.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=limit,
        env=kept | environment,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


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
def forked(work, *arguments):
    """A fork of this process that does `work` and then waits: its number, and what `work` returned,
    as text.
    """
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(write, str(work(*arguments)).encode())
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
