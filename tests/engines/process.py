"""An engine process of a test: commands go to it, and events come back, as lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import Self

from tests.engines.launcher import STACKS

E = TypeVar("E", bound="Process")


class EngineFailed(RuntimeError):
    """An engine process ended or is silent; the message has the end of its log."""


class Process:
    """An engine's log, and this end of its socket; `theirs` is the other. `process` leads its group
    and was forked by a launcher.
    """

    process: int

    def __init__(self, role: str, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.role, self.log = role, logs / f"{role}-{time.monotonic_ns()}.log"
        self._line, self.theirs = socket.socketpair()
        self._left, self._events = b"", deque[dict[str, Any]]()
        self._count, self._ready = 0, False

    def send(self, **command: Any) -> None:
        self._line.sendall(json.dumps(command).encode() + b"\n")

    def add(self, prompt: list[int], name: str | None = None, **more: Any) -> str:
        self._count += 1
        name = name or f"{self.role}{self._count}"
        self.send(do="add", id=name, prompt=prompt, **more)
        return name

    def generate(self, prompts: list[list[int]], **more: Any) -> list[dict[str, Any]]:
        """All at once; `params`, if given, is a list."""
        each = [{"params": one} for one in more.pop("params", ())] or [{}] * len(prompts)
        names = [self.add(prompt, **one, **more) for prompt, one in zip(prompts, each)]
        return [self.finished(name) for name in names]

    def finished(self, name: str, timeout: float = 120.0) -> dict[str, Any]:
        """The end of a request: `tokens`, `reason`, and what else its engine tells."""
        return self.event("finished", id=name, timeout=timeout)

    def event(self, kind: str, timeout: float = 60.0, **fields: Any) -> dict[str, Any]:
        """The next event of that kind and with those fields."""
        until = time.monotonic() + timeout
        while True:
            for event in self._events:
                if event["event"] == kind and fields.items() <= event.items():
                    self._events.remove(event)
                    return event
            left = until - time.monotonic()
            if not wait([self._line], max(left, 0)):
                raise EngineFailed(
                    f"{self.role}: no {kind} {fields} for {timeout} s.\n{self.tail()}"
                )
            data = self._line.recv(1 << 20)
            if not data:
                self.ended(2)  # its log is whole by then
                raise EngineFailed(f"{self.role} has ended.\n{self.tail()}")
            *lines, self._left = (self._left + data).split(b"\n")
            self._events.extend(json.loads(text) for text in lines)

    def busy(self, **more: Any) -> Any:
        """What it holds of requests, if anything."""
        raise NotImplementedError

    def idle(self, timeout: float = 60.0, **more: Any) -> None:
        until = time.monotonic() + timeout
        while held := self.busy(**more):
            if time.monotonic() > until:
                raise EngineFailed(f"{self.role} holds {held}.\n{self.tail()}")
            time.sleep(0.02)

    def ready(self, timeout: float = 300.0) -> Self:
        if not self._ready:
            self.event("ready", timeout=timeout)
            self._ready = True
        return self

    def tail(self, characters: int = 8000) -> str:
        """The end of its log, with what the threads of its first process do now."""
        with suppress(ProcessLookupError):
            os.kill(self.process, STACKS)
            time.sleep(0.5)
        return self.log.read_text(errors="replace")[-characters:]

    def ended(self, timeout: float = 60.0) -> bool:
        """Whether it ends by itself in that time."""
        until = time.monotonic() + timeout
        while (alive := self.alive()) and time.monotonic() < until:
            time.sleep(0.01)
        return not alive

    def alive(self) -> bool:
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL, to it and to its workers."""
        with suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        self.ended()

    def close(self) -> None:
        self.kill()
        self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ending(start: Callable[..., E]) -> Iterator[Callable[..., E]]:
    """For a fixture: `start`, whose engines end with the test."""
    started: list[E] = []

    def one(*given: Any, **more: Any) -> E:
        started.append(start(*given, **more))
        return started[-1]

    yield one
    for engine in started:
        engine.close()
