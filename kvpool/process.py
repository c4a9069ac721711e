"""Another process of this program that answers calls: a peer, or code that may end a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

TIMEOUT = 60.0
"""Seconds to wait for an answer."""
CODE = "from kvpool.process import serve; serve()"


class ProcessFailed(RuntimeError):
    """Another process has failed in a call or has ended."""


class OtherProcess(AbstractContextManager["OtherProcess"]):
    """A process that makes `server(*arguments)` and calls its methods, one after the other. The
    first call starts it, and the first after `close` or `revived` another.

    It is a new interpreter with this one's `sys.path`, so `server` must be importable. Ctrl-C does
    not reach it, and it ends with this process. `name` stands for it in errors. If the server has
    `progress_seconds`, which may be None, its `progress()` is called as often between calls.
    """

    def __init__(
        self, server: Callable[..., Any], *arguments: Any, name: str = "the other process"
    ) -> None:
        self._server, self._name = (server, arguments), name
        self.process: Any = None  # a Popen, once started

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    def answers(self, seconds: float = 0.0) -> bool:
        """Whether `answer` will not have to wait, within some seconds."""
        return self._pipe.poll(seconds) or not self.alive

    def call(self, method: str, *arguments: Any, timeout: float = TIMEOUT) -> Any:
        """The result of a method. Raises ProcessFailed."""
        self.post(method, *arguments)
        return self.answer(timeout)

    def post(self, method: str, *arguments: Any) -> None:
        """Calls a method whose result `answer` returns."""
        if self.process is None:
            self._start()
        with suppress(OSError):  # `answer` says that the process has ended
            self._pipe.send((method, arguments))

    def answer(self, timeout: float = TIMEOUT) -> Any:
        """The result of the next posted call. Raises ProcessFailed with the error of the call."""
        try:
            if not self._pipe.poll(timeout):
                self.close()
                raise ProcessFailed(f"{self._name} did not answer in {timeout:.0f} s.")
            right, answer = self._pipe.recv()
        except (EOFError, OSError):
            raise ProcessFailed(f"{self._name} ended with status {self.process.wait()}.") from None
        if not right:
            raise ProcessFailed(f"in {self._name}: {answer}")
        return answer

    def revived(self) -> OtherProcess:
        """This one; if the process has ended, the next call starts another."""
        if not self.alive:
            self.close()
        return self

    def close(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self._pipe.close()
            self.process = None

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            # not multiprocessing's spawn, which runs the main module of the caller again
            self.process = subprocess.Popen(
                [sys.executable, "-c", CODE, str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,  # it ends when this end is closed
                start_new_session=True,  # without the terminal's signals
            )
        self._pipe.send(self._server)


def serve() -> None:
    """What the other process runs: it answers calls until its pipe is closed."""
    Thread(target=_end_with_parent, daemon=True).start()
    pipe = Connection(int(sys.argv[1]))
    server: Any = None
    with suppress(EOFError, OSError):
        make, made_with = pipe.recv()
        while True:
            while not pipe.poll(getattr(server, "progress_seconds", None)):
                server.progress()
            method, arguments = pipe.recv()
            try:
                # an error of the constructor is the answer to the first call
                server = make(*made_with) if server is None else server
                answer = True, getattr(server, method)(*arguments)
            except Exception as error:
                answer = False, sentence_of(error)
            pipe.send(answer)


def sentence_of(error: BaseException) -> str:
    """An error's message, after the name of its class where that is one of Python's."""
    message, kind = str(error), type(error)
    if message and kind.__module__ != "builtins":
        return message
    return f"{kind.__name__}: {message}" if message else kind.__name__


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)
