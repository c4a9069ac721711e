"""Starts engine processes, and asks them for tokens."""

from __future__ import annotations

import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.engines.launcher import launcher
from tests.engines.process import EngineFailed, Process

if TYPE_CHECKING:
    from tests.hosts.network import Host

Role = Literal["single", "prefill", "decode", "store"]
KV_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer", "store": "kv_both"}
PREFILL = {
    # what vLLM's proxies send
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
"""vLLM's own connector, to compare with."""


def side_channel(role: Role) -> dict[str, str]:
    """The environment in which each side's NixlConnector has a port of its own."""
    return {"VLLM_NIXL_SIDE_CHANNEL_PORT": "15600" if role == "prefill" else "15700"}


ARGUMENTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_seqs": 8,
    "enable_prefix_caching": False,
    "seed": 0,
}
"""vLLM's, of engines and servers."""


class Engine(Process):
    """A process of `tests.engines.vllm.engine`. `extra` is the connector's config, `watch` a folder
    for what `watched.WatchedConnector` sees, `policy` what vLLM does with a request whose state did
    not come, `python` the environment's that has vLLM, `host` where it runs (`tests.hosts`); other
    arguments are vLLM's.
    """

    def __init__(
        self,
        role: Role,
        model: Path,
        logs: Path,
        *,
        extra: dict[str, Any] | None = None,
        watch: Path | None = None,
        noise: bool = False,
        policy: Literal["fail", "recompute"] = "fail",
        connector: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
        python: str = sys.executable,
        host: Host | None = None,
        **arguments: Any,
    ) -> None:
        given = {"model": str(model), "max_num_batched_tokens": 1024, **ARGUMENTS}
        given["disable_log_stats"] = True
        if role != "single":
            module = "disagg.connectors.vllm" if watch is None else "tests.engines.vllm.watched"
            name = "KvpoolConnector" if watch is None else "WatchedConnector"
            given["kv_transfer_config"] = connector or {
                "kv_connector": name,
                "kv_connector_module_path": module,
                "kv_role": KV_ROLE[role],
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": extra or {},
            }
        given |= arguments
        environment = {"KVPOOL_WATCH": str(watch or ""), "KVPOOL_SIDE": role}
        environment["KVPOOL_NOISE"] = "1" if noise else ""
        environment |= environ or {}
        super().__init__(role, logs)
        with self.theirs:
            forks = launcher("tests.engines.vllm.engine", python)
            keeper = host and host.namespaces.pid
            self.process = forks.fork(self.theirs, environment, self.log, given, keeper=keeper)

    def busy(self) -> tuple[int, int] | None:
        """Blocks in use, and requests that are known."""
        self.send(do="blocks")
        found = self.event("blocks")
        held = found["total"] - 1 - found["free"], found["requests"]
        return held if any(held) else None

    def close(self) -> None:
        with suppress(OSError):
            self.send(do="close")
            self.ended(30)
        super().close()


def asked_at_once(
    prefill: Engine, decode: Engine, asked: list[list[int]], tokens: int, addresses: list[str]
) -> tuple[list[str], list[str]]:
    """Requests of both engines, by name: decode is asked while prefill computes, so the rooms are
    named here. `addresses` are prefill's, of an earlier answer.
    """
    rooms = [f"room {time.monotonic_ns()} {number}" for number in range(len(asked))]
    named = [dict(PREFILL, room=room) for room in rooms]
    known = {"do_remote_prefill": True, "remote_addresses": addresses}
    first = [prefill.add(each, tokens=1, params=params) for each, params in zip(asked, named)]
    last = [
        decode.add(each, tokens=tokens, params={**known, "room": room})
        for each, room in zip(asked, rooms)
    ]
    return first, last


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(4, 500) for _ in range(length)] for length in lengths]


def prefilled(prefill: Engine, asked: list[list[int]]) -> list[dict[str, Any]]:
    """What a prefill's answers name."""
    first = prefill.generate(asked, tokens=1, params=[dict(PREFILL) for _ in asked])
    return [one["params"] for one in first]


def handed_over(
    prefill: Engine, decode: Engine, asked: list[list[int]], tokens: int = 24
) -> list[list[int]]:
    """Tokens of prompts that one engine prefills and the other decodes."""
    last = decode.generate(asked, tokens=tokens, params=prefilled(prefill, asked))
    reasons = [one["reason"] for one in last]
    if reasons != [["length"]] * len(asked):
        raise EngineFailed(f"decode ended with {reasons}.\n{decode.tail()}\n{prefill.tail()}")
    return [one["tokens"][0] for one in last]
