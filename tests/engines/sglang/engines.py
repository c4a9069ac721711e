"""Starts engine processes, and asks them for tokens."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from disagg.connectors.sglang.bootstrap import BootstrapServer, join
from tests.engines.launcher import ROOT, launcher
from tests.engines.process import Process
from tests.ports import free_port

if TYPE_CHECKING:
    from tests.hosts.network import Host

Role = Literal["single", "prefill", "decode"]
ENVIRON = (
    ("PYTHONPATH", os.pathsep.join(map(str, (Path(__file__).parent / "stubs", ROOT)))),
    ("HF_HUB_OFFLINE", "1"),
    ("OMP_NUM_THREADS", "1"),  # more would wait for one another, two engines on two cores
    ("TORCHDYNAMO_DISABLE", "1"),  # some models would be compiled, a minute each time
)


class Engine(Process):
    """Processes of `tests.engines.sglang.engine`. `extra` is the connector's settings, `watch` a
    folder for what `watched` sees, `port` the bootstrap server's, `host` where it runs
    (`tests.hosts`); other arguments are SGLang's.
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
        port: int | None = None,
        environ: dict[str, str] | None = None,
        host: Host | None = None,
        **arguments: Any,
    ) -> None:
        self.port = port or free_port()
        self.address = host.ipv4 if host else "127.0.0.1"
        given = options(role, model, self.port, {"host": self.address} | arguments)
        told = environment(arguments, extra=extra, watch=watch, noise=noise) | (environ or {})
        super().__init__(role, logs)
        with self.theirs:
            forks = launcher("tests.engines.sglang.engine", environ=ENVIRON)
            keeper = host and host.namespaces.pid
            self.process = forks.fork(self.theirs, told, self.log, given, keeper=keeper)

    def held(self) -> list[dict[str, int]]:
        """What each rank holds: `watched.counts`."""
        self.send(do="counts")
        found: list[dict[str, int]] = self.event("counts")["ranks"]
        return found

    def busy(self, cached: bool = False) -> list[dict[str, int]]:
        """Ranks that hold anything, or (`cached`) more than their prefix cache does."""
        return [
            rank
            for rank in self.held()
            if rank["tokens"] != cached * rank["cached"] or rank["requests"] or rank["metadata"]
        ]


def options(role: Role, model: Path, port: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """SGLang's arguments; `port` is the bootstrap server's."""
    given: dict[str, Any] = {
        "model_path": str(model),
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "dtype": "bfloat16",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "max_total_tokens": 4096,
        "mem_fraction_static": 0.2,
        "page_size": 1,
        "log_level": "info",
        "random_seed": 0,
        "port": free_port(),
    }
    if role != "single":
        given |= {
            "disaggregation_mode": role,
            "disaggregation_transfer_backend": "kvpool",
            "disaggregation_bootstrap_port": port,
        }
    if role == "decode":
        given["disaggregation_decode_retraction_backup"] = "none"
    return given | arguments


def environment(
    arguments: dict[str, Any],
    *,
    extra: dict[str, Any] | None = None,
    watch: Path | None = None,
    noise: bool = False,
) -> dict[str, str]:
    return {
        "KVPOOL_WATCH": str(watch or ""),
        "KVPOOL_NOISE": "1" if noise else "",
        "KVPOOL_SGLANG": json.dumps(extra or {}),
        "SGLANG_CPU_OMP_THREADS_BIND": _cores(arguments),
    }


def _cores(arguments: dict[str, Any]) -> str:
    """SGLang asks for cores for each rank of a stage, and of each stage."""
    ranks = arguments.get("tp_size", 1) * arguments.get("pp_size", 1)
    return "0-1" if ranks == 1 else "|".join(str(rank % 2) for rank in range(ranks))


def failure(answer: dict[str, Any]) -> str:
    """Why a request was aborted; empty if it was not."""
    reason: dict[str, Any] = answer["reason"]
    return "" if reason.get("type") == "length" else str(reason)


def asked(
    prefill: Engine, decode: Engine, prompts: list[list[int]], tokens: int = 24, **more: Any
) -> tuple[list[str], list[str]]:
    """Requests of both engines, by name, as SGLang's router sends them: to both at once."""
    rooms = [time.monotonic_ns() + number for number in range(len(prompts))]
    where = {
        "bootstrap_host": prefill.address,
        "bootstrap_port": prefill.port,
        "tokens": tokens,
    }
    first = [
        prefill.add(each, bootstrap_room=room, **where, **more)
        for each, room in zip(prompts, rooms)
    ]
    last = [
        decode.add(each, bootstrap_room=room, **where, **more) for each, room in zip(prompts, rooms)
    ]
    return first, last


def handed_over(
    prefill: Engine, decode: Engine, prompts: list[list[int]], tokens: int = 24, **more: Any
) -> list[dict[str, Any]]:
    """What decode answers to prompts that one engine prefills and the other decodes. What comes
    with the first token is what prefill has answered.
    """
    first, last = asked(prefill, decode, prompts, tokens, **more)
    found = [decode.finished(name) for name in last]
    for name, one in zip(first, found):
        told = prefill.finished(name)
        assert told["tokens"] == one["tokens"][:1]
        for there, here in zip(told["logprobs"], one["logprobs"]):
            assert not there or there[-1] == here[0]
    return found


def addresses(port: int) -> list[str]:
    """Endpoints of SGLang's prefill, as its bootstrap server names them."""

    def ask(**which: int) -> dict[str, Any]:
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        query = "&".join(f"{name}={which.get(name, which['rest'])}" for name in names)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/route?{query}") as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    sizes = ask(rest=-1)
    ranks = [
        ask(rest=0, target_pp_rank=stage, target_tp_rank=rank)
        for stage in range(sizes["pp_size"])
        for rank in range(sizes["attn_tp_size"])
    ]
    return [join(each["rank_ip"], each["rank_port"]) for each in ranks]


@contextmanager
def bootstrap(addresses: list[str]) -> Iterator[int]:
    """The port of a server that names these ranks to SGLang."""
    with BootstrapServer("127.0.0.1", 0, addresses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()
