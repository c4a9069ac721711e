"""Servers over HTTP as processes, and requests to them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.engines.launcher import Launcher
from tests.engines.process import EngineFailed
from tests.ports import free_port


class Server:
    """A process that serves HTTP at `url`, in a process group of its own."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: list[str],
        logs: Path,
        environ: dict[str, str] | None = None,
    ) -> None:
        port = free_port()
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self.command = [sys.executable, "-m", module, *arguments]
        self.command += ["--host", "127.0.0.1", "--port", str(port)]
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{name}-{port}.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=(environ or {}) | os.environ,
                start_new_session=True,
            )

    def ended(self) -> bool:
        return self.process.poll() is not None

    def up(self) -> bool:
        """Whether it serves. Raises EngineFailed if its process has ended."""
        if self.ended():
            raise EngineFailed(f"{self.name} has ended.\n{self.tail()}")
        try:
            return httpx.get(f"{self.url}/health", timeout=2).is_success
        except httpx.TransportError:
            return False

    def ready(self, timeout: float = 300.0) -> Server:
        until = time.monotonic() + timeout
        while not self.up():
            if time.monotonic() > until:
                raise EngineFailed(f"{self.name} does not serve for {timeout} s.\n{self.tail()}")
            time.sleep(0.1)
        return self

    def ask(self, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        """The answer to a greedy request that is not streamed."""
        answer = httpx.post(self.url + path, json=greedy(**body), timeout=120)
        answer.raise_for_status()
        return dict(answer.json())

    def stream(self, path: str = "/v1/completions", **body: Any) -> list[Any]:
        """The events of a streamed greedy request."""
        asked = greedy(**body) | {"stream": True}
        with httpx.stream("POST", self.url + path, json=asked, timeout=120) as answer:
            if answer.is_error:
                answer.read()
            answer.raise_for_status()
            lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def metric(self, name: str, **labels: str) -> float | None:
        """The sum of a metric's samples with those labels; None where there is no sample."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
        found = [float(value) for held, value in lines if all(one in held for one in wanted)]
        return sum(found) if found else None

    def until(self, name: str, value: float, timeout: float = 60.0, **labels: str) -> None:
        until = time.monotonic() + timeout
        while (found := self.metric(name, **labels)) != value:
            if time.monotonic() > until:
                raise EngineFailed(
                    f"{self.name}: {name} {labels} is {found} and not {value}.\n{self.tail()}"
                )
            time.sleep(0.1)

    def idle(self, timeout: float = 60.0) -> None:
        """Waits until an engine runs no request and holds no block."""
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            self.until(f"vllm:{name}", 0, timeout)

    def tail(self, characters: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-characters:]

    def close(self) -> None:
        """SIGTERM, and SIGKILL to what is left after 20 s."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ForkedServer(Server):
    """A server of a launcher whose `run` serves HTTP at the arguments' `host` and `port`."""

    def __init__(
        self,
        name: str,
        forks: Launcher,
        logs: Path,
        arguments: dict[str, Any],
        environ: dict[str, str],
    ) -> None:
        self.name, port = name, free_port()
        self.url = f"http://127.0.0.1:{port}"
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{name}-{port}.log"
        given = arguments | {"host": "127.0.0.1", "port": port}
        self._line, theirs = socket.socketpair()
        with theirs:
            self._pid = forks.fork(theirs, environ, self.log, given)

    def ended(self) -> bool:
        """Its launcher leaves no zombies, so a process that has ended is gone."""
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return True
        return False

    def terminate(self) -> None:
        """SIGTERM, to the server and not to its workers."""
        os.kill(self._pid, signal.SIGTERM)

    def close(self) -> None:
        """SIGKILL, to it and to its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        while not self.ended():
            time.sleep(0.01)
        self._line.close()


def kvpool_proxy(prefills: list[Server], decodes: list[Server], logs: Path, *more: str) -> Server:
    """`kvpool proxy` before servers of both sides."""
    given = ["proxy", *more]
    for side, servers in (("--prefill", prefills), ("--decode", decodes)):
        given += [word for server in servers for word in (side, server.url)]
    return Server("proxy", "kvpool", given, logs)


def greedy(**body: Any) -> dict[str, Any]:
    """A request whose answer is the same each time, with its tokens' ids."""
    return {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True} | body


def tokens(events: list[Any] | dict[str, Any], index: int = 0) -> list[int]:
    """The tokens of one choice, of an answer or of its streamed events."""
    found: list[int] = []
    for event in events if isinstance(events, list) else [events]:
        for choice in event["choices"]:
            if choice["index"] == index:
                found += choice.get("token_ids") or []
    return found


def texts(server: Server, path: str, **asked: Any) -> tuple[str, str]:
    """The text of a greedy request's one choice: of a whole answer, and of a streamed one."""
    body = {"temperature": 0, "max_tokens": 24, "ignore_eos": True} | asked
    whole = httpx.post(server.url + path, json=body, timeout=120)
    if whole.is_error:
        raise EngineFailed(f"{whole.status_code} {whole.text}\n{server.tail()}")
    with httpx.stream("POST", server.url + path, json=body | {"stream": True}, timeout=120) as one:
        lines = [line for line in one.iter_lines() if line.startswith("data: {")]
    (choice,) = whole.json()["choices"]
    pieces = [piece for line in lines for piece in json.loads(line[6:])["choices"]]
    if "message" in choice:
        streamed = "".join(piece["delta"].get("content") or "" for piece in pieces)
        return choice["message"]["content"], streamed
    return choice["text"], "".join(piece["text"] for piece in pieces)
