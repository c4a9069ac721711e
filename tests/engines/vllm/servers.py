"""Starts vLLM's API servers and the proxy as processes, and asks them over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.engines.process import EngineFailed
from tests.engines.vllm.engines import ARGUMENTS, KV_ROLE, Role
from tests.ports import free_port

CONNECTOR = {
    "kv_connector": "KvpoolConnector",
    "kv_connector_module_path": "disagg.connectors.vllm",
}
PLUGIN = {"kv_connector": "KvpoolConnector"}  # found by the entry point group vllm.general_plugins
SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # threads of several engines spin on the same cores
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
SERVED = {
    **ARGUMENTS,
    "disable_uvicorn_access_log": True,
    "max_num_batched_tokens": 256,
    "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
}


class Server:
    """A process that serves HTTP at `url`, in a process group of its own."""

    def __init__(self, name: str, module: str, arguments: list[str], logs: Path) -> None:
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
                env=SETTINGS | os.environ,
                start_new_session=True,
            )

    def up(self) -> bool:
        """Whether it serves. Raises EngineFailed if its process has ended."""
        if self.process.poll() is not None:
            raise EngineFailed(f"{self.name} has ended: {self.process.returncode}.\n{self.tail()}")
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


def api_server(
    role: Role,
    model: Path,
    logs: Path,
    *,
    extra: dict[str, Any] | None = None,
    transfer: dict[str, Any] | None = None,
    **arguments: Any,
) -> Server:
    """`vllm serve` of a model. `extra` is the connector's config, `transfer` what else is in
    vLLM's `--kv-transfer-config`; other arguments are vLLM's.
    """
    given = ["--model", str(model), "--served-model-name", model.name]
    for name, value in (SERVED | arguments).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            given.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            given += [f"--{flag}", str(value)]
    if role != "single":
        config = {
            **(CONNECTOR if transfer is None else transfer),
            "kv_role": KV_ROLE[role],
            "kv_connector_extra_config": extra or {},
        }
        given += ["--kv-transfer-config", json.dumps(config)]
    return Server(role, "vllm.entrypoints.openai.api_server", given, logs)


def proxy_server(prefill: Server, decode: Server, logs: Path) -> Server:
    """The proxy before one server of each side."""
    given = ["--prefill", prefill.url, "--decode", decode.url]
    return Server("proxy", "tests.engines.vllm.proxy", given, logs)


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
