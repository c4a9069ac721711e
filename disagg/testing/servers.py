"""Serving engines as processes: started, asked over HTTP, and ended with all their children."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

POLL = 0.2
"""Seconds between two looks at a process that starts."""


class ServerEnded(RuntimeError):
    """A server's process is gone. `signalled`: not by its own will."""

    def __init__(self, server: EngineServer) -> None:
        status = server.process.returncode
        self.server, self.signalled = server, status is not None and status < 0
        super().__init__(f"{server.name} has ended with status {status}.")


class RequestFailed(RuntimeError):
    """A request that a server answered with an error, or did not answer."""


class EngineServer:
    """A process that will serve HTTP at `url`, the leader of a group of its own."""

    def __init__(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str], port: int, log: Path
    ) -> None:
        self.name, self.port, self.log = name, port, log
        self.url = f"http://127.0.0.1:{port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            out.write(f"{' '.join(command)}\n".encode())
            out.flush()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=env,
                start_new_session=True,
            )

    def ready(self, timeout: float, beside: Sequence[EngineServer] = ()) -> EngineServer:
        """Waits until it serves. Raises ServerEnded, also if one `beside` it has ended, and
        TimeoutError.
        """
        until = time.monotonic() + timeout
        while not self._serves():
            for server in (self, *beside):
                server.alive()
            if time.monotonic() > until:
                raise TimeoutError(f"{self.name} does not serve for {timeout:.0f} s.")
            time.sleep(POLL)
        return self

    def alive(self) -> None:
        """Raises ServerEnded if its process is gone."""
        if self.process.poll() is not None:
            raise ServerEnded(self)

    def _serves(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float,
    ) -> dict[str, Any]:
        """What is answered to a POST. Raises RequestFailed with the body of an error."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise RequestFailed(f"{self.name}: HTTP {error.code}: {text}") from None
        except TimeoutError:
            raise RequestFailed(f"{self.name}: no answer for {timeout:.0f} s.") from None
        except OSError as error:
            raise RequestFailed(f"{self.name}: {error}") from None

    def text(self, start: int = 0) -> str:
        """Its log from a byte on."""
        with self.log.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")

    def mark(self) -> int:
        """Where its log ends now."""
        return self.log.stat().st_size

    def close(self, timeout: float = 10.0) -> None:
        """SIGTERM to the server, then SIGKILL to all that is left of its group."""
        try:
            if self.process.poll() is None:
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout)
        finally:  # also where Ctrl-C is pressed again
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def __enter__(self) -> EngineServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports without a listener, outside the range from which the
    kernel chooses ports.
    """
    while True:
        first = random.randrange(12000, 32000 - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
