"""SGLang's API servers as processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx

from tests.engines.launcher import launcher
from tests.engines.process import EngineFailed
from tests.engines.servers import ForkedServer
from tests.engines.sglang.engines import ENVIRON, Role, environment, options
from tests.engines.vllm.servers import SERVED
from tests.ports import free_port


class SglangServer(ForkedServer):
    """An API server with the model's tokenizer. `bootstrap_port` is its bootstrap server's."""

    def __init__(self, role: Role, model: Path, logs: Path, **arguments: Any) -> None:
        self.bootstrap_port = free_port()
        extra = arguments.pop("extra", None)
        given = options(role, model, self.bootstrap_port, arguments)
        given |= {"skip_tokenizer_init": False, "served_model_name": model.name}
        forks = launcher("tests.engines.sglang.http_server", environ=ENVIRON)
        told = environment(arguments, extra=extra)
        told["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # /health would compute a token
        super().__init__(role, forks, logs, given, told)

    def idle(self, timeout: float = 60.0) -> None:
        """Waits until its scheduler holds no token, request or row of metadata."""
        until = time.monotonic() + timeout
        while any((held := self.held()).values()):
            if time.monotonic() > until:
                raise EngineFailed(f"{self.name} holds {held}.\n{self.tail()}")
            time.sleep(0.1)

    def held(self) -> dict[str, int]:
        """`watched.held`; nothing here caches prefixes."""
        told = httpx.get(f"{self.url}/server_info", timeout=30).json()
        (state,) = told["internal_states"]
        return dict(state["kvpool"])


def chat_template(folder: Path) -> str:
    """A file with the template of vLLM's servers."""
    path = folder / "template.jinja"
    path.write_text(SERVED["chat_template"])
    return str(path)
