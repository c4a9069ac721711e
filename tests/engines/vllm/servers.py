"""vLLM's API servers as processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.engines.launcher import launcher
from tests.engines.servers import ForkedServer, Server
from tests.engines.vllm.engines import ARGUMENTS, KV_ROLE, Role

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
    given = served(role, model, extra=extra, transfer=transfer, **arguments)
    module = "vllm.entrypoints.openai.api_server"
    return Server(role, module, flags(given), logs, SETTINGS)


def served(
    role: Role,
    model: Path,
    *,
    extra: dict[str, Any] | None = None,
    transfer: dict[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Arguments of `vllm serve`."""
    given = {"model": str(model), "served_model_name": model.name, **SERVED, **arguments}
    if role != "single":
        given["kv_transfer_config"] = {
            **(CONNECTOR if transfer is None else transfer),
            "kv_role": KV_ROLE[role],
            "kv_connector_extra_config": extra or {},
        }
    return given


def flags(arguments: dict[str, Any]) -> list[str]:
    """Arguments as the command line takes them."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def forked_server(role: Role, model: Path, logs: Path, **arguments: Any) -> ForkedServer:
    """As `api_server`, without importing vLLM again. Workers do not spin."""
    python = os.environ.get("KVPOOL_VLLM_PYTHON", sys.executable)
    forks = launcher("tests.engines.vllm.http_server", python, tuple(SETTINGS.items()))
    return ForkedServer(role, forks, logs, served(role, model, **arguments), {})
