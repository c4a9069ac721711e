"""The servers behind the proxy: which engine each is, and where prefill's ranks are."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from aiohttp import ClientError, ClientSession

from disagg.connectors.sglang.bootstrap import BootstrapServer, join

RANK_NAMES = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")


class NoAnswer(Exception):
    """A server that does not answer, or not as its role asks; the message names it."""


@dataclass(eq=False, kw_only=True)
class Upstream:
    """One server. What it has told is kept: `addresses` are those of prefill's ranks."""

    role: str
    url: str
    sglang: bool | None = None
    bootstrap_port: int = 0
    addresses: tuple[str, ...] = ()

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    async def identify(self, session: ClientSession) -> bool:
        """Whether it is SGLang's, which alone says a mode of disaggregation. Raises NoAnswer."""
        if self.sglang is None:
            info = await get_json(session, f"{self.url}/server_info") or {}
            self.sglang = "disaggregation_mode" in info
            if self.sglang and (mode := info["disaggregation_mode"]) != self.role:
                self.sglang = None
                raise NoAnswer(
                    f"{self.url} has --disaggregation-mode {mode}, --{self.role} needs {self.role}."
                )
            self.bootstrap_port = info.get("disaggregation_bootstrap_port") or 0
        return self.sglang

    async def sglang_ranks(self, session: ClientSession) -> tuple[str, ...]:
        """Addresses of prefill's ranks, from SGLang's bootstrap server. Raises NoAnswer."""
        if not self.addresses:
            ask = partial(self._route, session)
            sizes = await ask(dict.fromkeys(RANK_NAMES, -1))
            ranks = [
                await ask({**dict.fromkeys(RANK_NAMES, 0), **number})
                for number in (
                    {"target_pp_rank": stage, "target_tp_rank": rank}
                    for stage in range(sizes["pp_size"])
                    for rank in range(sizes["attn_tp_size"])
                )
            ]
            self.addresses = tuple(join(rank["rank_ip"], rank["rank_port"]) for rank in ranks)
        return self.addresses

    async def _route(self, session: ClientSession, ranks: dict[str, int]) -> dict[str, Any]:
        query = "&".join(f"{name}={number}" for name, number in ranks.items())
        host = f"[{self.host}]" if ":" in self.host else self.host
        url = f"http://{host}:{self.bootstrap_port}/route?{query}"
        rank = await get_json(session, url)
        if rank is None:
            raise NoAnswer(f"{url}: SGLang's bootstrap server has no such rank.")
        return rank


async def get_json(session: ClientSession, url: str) -> dict[str, Any] | None:
    """What a GET answers; None for an error's status or another form. Raises NoAnswer."""
    try:
        async with session.get(url) as answer:
            document = await answer.json(content_type=None) if answer.ok else None
    except ValueError:
        return None
    except (ClientError, OSError) as error:
        raise NoAnswer(f"{url}: {error or type(error).__name__}") from None
    return document if isinstance(document, dict) else None


@dataclass(eq=False)
class BootstrapServers:
    """Bootstrap servers of vLLM's prefills, which have none, for SGLang's decodes."""

    _ports: dict[tuple[str, tuple[str, ...]], int] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def place(self, decode: Upstream, addresses: tuple[str, ...]) -> tuple[str, int]:
        """Host and port at which `decode` is told these addresses. Raises NoAnswer."""
        url = urlsplit(decode.url)
        try:  # this host, as it is reached from decode's
            with socket.create_connection((decode.host, url.port or 80), 5.0) as connection:
                host = str(connection.getsockname()[0])
        except OSError as error:
            raise NoAnswer(f"{decode.url}: {error}") from None
        if (host, addresses) not in self._ports:
            server = self._stack.enter_context(BootstrapServer(host, 0, addresses))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self._stack.callback(server.shutdown)
            self._ports[host, addresses] = server.server_port
        return host, self._ports[host, addresses]

    def close(self) -> None:
        self._stack.close()
