"""Real engines on hosts: messages with TLS, a port for each rank, and a folder that all hosts see
for models, logs and what oracles save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from disagg.runtime.keys import write_keys
from tests.engines.process import Process
from tests.engines.vllm.models import save
from tests.hosts.network import Network

PORT = 19100
"""Of the first rank; below the ports that servers of tests take."""
HOSTS = {"prefill": 0, "decode": 1}
"""Where an engine runs that names no host."""


class Sides:
    """Engines of a class (`tests.engines.*.engines.Engine`) on the hosts of a network."""

    def __init__(self, network: Network, engine: Callable[..., Any]) -> None:
        self.network, self.folder = network, Path(network.folder)
        self._engine, self._started = engine, list[Process]()
        if not (self.folder / "keys").exists():
            write_keys(self.folder / "keys")

    def start(
        self,
        role: str,
        model: str,
        *,
        at: int | None = None,
        extra: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> Any:
        """One on host number `at`. `extra` is the connector's config, `options` the transfer
        engine's; other arguments are the class's.
        """
        settings = {"keys": str(self.folder / "keys"), **(extra or {})}
        if options:
            settings["engine_options"] = options
        if role == "prefill":
            settings["bind"] = f"tcp://eth0:{PORT}+rank"
        host = self.network.hosts[HOSTS[role] if at is None else at]
        return self._make(role, model, extra=settings, host=host, **arguments)

    def single(self, model: str, **arguments: Any) -> Any:
        """One that prefills and decodes, beside the hosts."""
        return self._make("single", model, **arguments)

    def _make(self, role: str, model: str, **arguments: Any) -> Any:
        place = save(model, self.folder / "models")
        engine = self._engine(role, place, self.folder / "logs", **arguments)
        self._started.append(engine)
        return engine

    def close(self) -> None:
        """Ends them all."""
        while self._started:
            self._started.pop().close()


@contextmanager
def sides(network: Network, engine: Callable[..., Any]) -> Iterator[Sides]:
    """Engines that end with the context."""
    engines = Sides(network, engine)
    try:
        yield engines
    finally:
        engines.close()
