"""A process that has imported a serving engine, and forks one whenever a test wants one: the import
takes seconds of processor time, the fork milliseconds.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.hosts.namespaces import inside

ROOT = Path(__file__).parents[2]
STACKS = signal.SIGUSR2
"""At which an engine writes what its threads do to its log."""


class Launcher:
    """Runs `module` with `python`, which calls `serve`. It ends with this process."""

    def __init__(self, module: str, python: str, environ: tuple[tuple[str, str], ...]) -> None:
        self._line, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [python, "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(environ),
                cwd=ROOT,
                stderr=subprocess.DEVNULL,  # of what the engine could not import
            )

    def fork(
        self,
        line: socket.socket,
        environ: dict[str, str],
        log: Path,
        arguments: dict[str, Any],
        *,
        keeper: int | None = None,
    ) -> int:
        """Starts an engine; returns its process, which leads its group. With `keeper`, it runs in
        that process's namespaces (`tests.hosts`).
        """
        told = {"environ": environ, "log": str(log), "arguments": arguments, "keeper": keeper}
        socket.send_fds(self._line, [json.dumps(told).encode()], [line.fileno()])
        return int(self._line.recv(64))

    def close(self) -> None:
        """Ends it, once it has started what it was told to."""
        self._line.close()
        self._process.wait()


_launchers: list[Launcher] = []


@cache
def launcher(
    module: str, python: str = sys.executable, environ: tuple[tuple[str, str], ...] = ()
) -> Launcher:
    """One for all tests."""
    _launchers.append(Launcher(module, python, environ))
    return _launchers[-1]


def end_launchers() -> None:
    while _launchers:
        _launchers.pop().close()


def serve(descriptor: int, run: Callable[[socket.socket, dict[str, Any]], None]) -> None:
    """Forks engines, each of which does `run(line, arguments)` and ends, until the socket ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as own:
        while True:
            text, fds, _, _ = socket.recv_fds(own, 1 << 20, 1)
            if not text:
                return
            if not (child := os.fork()):
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                own.close()
                _child(fds[0], run, **json.loads(text))
            os.close(fds[0])
            own.sendall(f"{child}\n".encode())


def _child(
    descriptor: int,
    run: Callable[[socket.socket, dict[str, Any]], None],
    environ: dict[str, str],
    log: str,
    arguments: dict[str, Any],
    keeper: int | None,
) -> None:
    status = 1
    os.setsid()
    os.environ.update(environ)
    with open(log, "wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    faulthandler.register(STACKS)
    try:
        with socket.socket(fileno=descriptor) as line:
            if keeper is None:
                run(line, arguments)
            else:
                inside(line, keeper, run, arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
