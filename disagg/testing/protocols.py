"""Connectors: what each needs, how its servers are configured, and how a request is handed over.

A connector is a row of `CONNECTORS`. Proxies are not run: what a connector's own proxy sends is
sent here.
"""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal

from disagg.connectors.sglang.bootstrap import BootstrapServer, join
from disagg.testing.launch import CPU
from disagg.testing.servers import RequestFailed, Server
from disagg.testing.suite import Pair

ConnectorRole = Literal["prefill", "decode"]
Made = tuple[dict[str, Any], dict[str, str]]
"""Arguments and environment of a server."""
KV_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer"}
ASKED_OF_PREFILL = {
    # as vLLM's proxies send it
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request of token ids. `number` is no other's; answers come within `timeout` seconds."""

    number: int
    tokens: tuple[int, ...]
    new_tokens: int
    timeout: float

    @property
    def name(self) -> str:
        return f"conform-{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Both sides of a pair. `port` is that of prefill's bootstrap server."""

    prefill: Server
    decode: Server
    port: int


HandOver = Callable[[Servers, Prompt], tuple[int, ...]]
"""Tokens of a prompt that one server prefills and the other decodes. Raises RequestFailed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    """`modules` are imported by the engines; `configure` is asked with a side's role and the first
    of the ports that the side may listen at, `bootstrap` is a prefill's first port.
    """

    modules: Mapping[str, tuple[str, ...]]
    configure: Callable[[Pair, ConnectorRole, int], Made]
    hand_over: Mapping[tuple[str, str], HandOver]


# vLLM


def ask_vllm(
    server: Server, prompt: Prompt, *, new_tokens: int | None = None, params: Any = None
) -> dict[str, Any]:
    """The answer to a greedy completion."""
    body = {
        "model": "model",
        "prompt": list(prompt.tokens),
        "max_tokens": prompt.new_tokens if new_tokens is None else new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if params is not None:
        body["kv_transfer_params"] = params
    headers = {"X-Request-Id": prompt.name}
    return server.ask("/v1/completions", body, headers=headers, timeout=prompt.timeout)


def tokens_of_vllm(answer: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens of an answer. Raises RequestFailed if the request was ended."""
    (choice,) = answer["choices"]
    if choice["finish_reason"] != "length":
        raise RequestFailed(f"finish_reason {choice['finish_reason']}")
    return tuple(choice["token_ids"])


def one_after_the_other(servers: Servers, prompt: Prompt) -> tuple[int, ...]:
    """As vLLM's toy proxy: decode is told what prefill has answered."""
    first = ask_vllm(servers.prefill, prompt, new_tokens=1, params=dict(ASKED_OF_PREFILL))
    params = first.get("kv_transfer_params")
    if not params:
        raise RequestFailed("prefill answered no kv_transfer_params")
    return tokens_of_vllm(ask_vllm(servers.decode, prompt, params=params))


def both_at_once(servers: Servers, prompt: Prompt) -> tuple[int, ...]:
    """As the proxy of vLLM's MooncakeConnector: both are told a transfer's name, decode also where
    prefill's ranks are found.
    """
    where = f"http://127.0.0.1:{servers.port}"
    with urllib.request.urlopen(f"{where}/query", timeout=prompt.timeout) as answer:
        engine = next(iter(json.load(answer).values()))["engine_id"]
    transfer = {"transfer_id": f"xfer-{prompt.name}"}
    first = {"do_remote_decode": True, "do_remote_prefill": False, **transfer}
    last = {"do_remote_decode": False, "do_remote_prefill": True, **transfer}
    last |= {"remote_engine_id": engine, "remote_bootstrap_addr": where}
    answers = _together(
        lambda: ask_vllm(servers.prefill, prompt, new_tokens=1, params=first),
        lambda: ask_vllm(servers.decode, prompt, params=last),
    )
    return tokens_of_vllm(answers[1])


def _together(*calls: Callable[[], Any]) -> list[Any]:
    """What they return, of which the first that fails ends the wait for the others."""
    pool = ThreadPoolExecutor(len(calls))
    futures = [pool.submit(call) for call in calls]
    wait(futures, return_when=FIRST_EXCEPTION)
    pool.shutdown(wait=False)
    for future in futures:
        if future.done():
            future.result()
    return [future.result() for future in futures]


def _kvpool_in_vllm(pair: Pair, role: ConnectorRole) -> Made:
    config = {
        "kv_connector": "KvpoolConnector",
        "kv_connector_module_path": "disagg.connectors.vllm",
        "kv_role": KV_ROLE[role],
        "kv_connector_extra_config": {"engine": pair.transport, **pair.settings},
    }
    return {"kv_transfer_config": config}, {}


def _nixl(pair: Pair, role: ConnectorRole, port: int) -> Made:
    config: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": KV_ROLE[role]}
    config["kv_connector_extra_config"] = dict(pair.settings)
    if CPU:
        config["kv_buffer_device"] = "cpu"
    channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
    return {"kv_transfer_config": config}, channel


def _mooncake(pair: Pair, role: ConnectorRole, port: int) -> Made:
    config = {
        "kv_connector": "MooncakeConnector",
        "kv_role": KV_ROLE[role],
        "kv_connector_extra_config": {"mooncake_protocol": "tcp", **pair.settings},
    }
    env = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port), "VLLM_HOST_IP": "127.0.0.1"}
    return {"kv_transfer_config": config}, env


# SGLang


def ask_sglang(server: Server, prompt: Prompt, **bootstrap: Any) -> tuple[int, ...]:
    """The tokens that a greedy request generates. Raises RequestFailed if it was aborted."""
    new_tokens = bootstrap.pop("new_tokens", prompt.new_tokens)
    body = {
        "input_ids": list(prompt.tokens),
        "rid": prompt.name,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        **bootstrap,
    }
    answer = server.ask("/generate", body, timeout=prompt.timeout)
    reason = answer["meta_info"]["finish_reason"]
    if reason["type"] != "length":
        raise RequestFailed(f"{server.name}: {reason.get('message', reason)}")
    return tuple(answer["output_ids"])


def by_room(servers: Servers, prompt: Prompt) -> tuple[int, ...]:
    """As SGLang's router: both are asked at once, with the room's number."""
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": servers.port}
    where["bootstrap_room"] = prompt.number
    answers = _together(
        lambda: ask_sglang(servers.prefill, prompt, **where),
        lambda: ask_sglang(servers.decode, prompt, **where),
    )
    return tuple(answers[1])


def _sglang(backend: str, role: ConnectorRole, port: int) -> dict[str, Any]:
    flags: dict[str, Any] = {"disaggregation_mode": role}
    flags["disaggregation_transfer_backend"] = backend
    flags["disaggregation_bootstrap_port"] = port
    if role == "decode":
        flags["disaggregation_decode_retraction_backup"] = "none"
    return flags


def _kvpool(pair: Pair, role: ConnectorRole, port: int) -> Made:
    if getattr(pair, role).engine == "vllm":
        return _kvpool_in_vllm(pair, role)
    settings = {"engine": pair.transport, **pair.settings}
    return _sglang("kvpool", role, port), {"KVPOOL_SGLANG": json.dumps(settings)}


# between vLLM and SGLang: vLLM hands over a prompt without its last token, SGLang all of its prompt


def vllm_to_sglang(servers: Servers, prompt: Prompt) -> tuple[int, ...]:
    """SGLang is given the prompt without its last token, which it takes for the first sampled."""
    params = {**ASKED_OF_PREFILL, "room": prompt.number}
    first = ask_vllm(servers.prefill, prompt, new_tokens=1, params=params)
    cut = Prompt(
        number=prompt.number,
        tokens=prompt.tokens[:-1],
        new_tokens=prompt.new_tokens + 1,
        timeout=prompt.timeout,
    )
    with _bootstrap(first["kv_transfer_params"]["remote_addresses"]) as port:
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port}
        tokens = ask_sglang(servers.decode, cut, bootstrap_room=prompt.number, **where)
    if tokens[:1] != prompt.tokens[-1:]:
        raise RequestFailed(f"decode begins with {tokens[:1]}, not with the prompt's last token")
    return tokens[1:]


def sglang_to_vllm(servers: Servers, prompt: Prompt) -> tuple[int, ...]:
    """SGLang is given the prompt without its last token, which vLLM computes."""
    cut = Prompt(
        number=prompt.number, tokens=prompt.tokens[:-1], new_tokens=1, timeout=prompt.timeout
    )
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": servers.port}
    params = {"do_remote_prefill": True, "remote_addresses": addresses(servers.port)}
    params["remote_request_id"] = prompt.number
    answers = _together(
        lambda: ask_sglang(servers.prefill, cut, bootstrap_room=prompt.number, **where),
        lambda: ask_vllm(servers.decode, prompt, params=params),
    )
    return tokens_of_vllm(answers[1])


def addresses(port: int) -> list[str]:
    """Endpoints of SGLang's prefill, as its bootstrap server names them."""

    def ask(stage: int, rank: int, rest: int) -> dict[str, Any]:
        which = {"prefill_dp_rank": rest, "prefill_cp_rank": rest}
        which |= {"target_tp_rank": rank, "target_pp_rank": stage}
        query = "&".join(f"{name}={value}" for name, value in which.items())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/route?{query}") as answer:
            return dict(json.load(answer))

    sizes = ask(-1, -1, -1)
    stages, ranks = range(sizes["pp_size"]), range(sizes["attn_tp_size"])
    ends = [ask(stage, rank, 0) for stage in stages for rank in ranks]
    return [join(end["rank_ip"], end["rank_port"]) for end in ends]


@contextlib.contextmanager
def _bootstrap(addresses: list[str]) -> Iterator[int]:
    """The port of a server that names these ranks to SGLang."""
    with BootstrapServer("127.0.0.1", 0, addresses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _transport_modules(pair_transport: str) -> tuple[str, ...]:
    return {"nixl": ("nixl",), "mooncake": ("mooncake.engine",)}.get(pair_transport, ())


CONNECTORS: dict[str, Connector] = {
    "kvpool": Connector(
        modules={"vllm": ("disagg.connectors.vllm",), "sglang": ("disagg.connectors.sglang",)},
        configure=_kvpool,
        hand_over={
            ("vllm", "vllm"): one_after_the_other,
            ("sglang", "sglang"): by_room,
            ("vllm", "sglang"): vllm_to_sglang,
            ("sglang", "vllm"): sglang_to_vllm,
        },
    ),
    "nixl": Connector(
        modules={"vllm": ("nixl",)},
        configure=_nixl,
        hand_over={("vllm", "vllm"): one_after_the_other},
    ),
    "mooncake": Connector(
        modules={"vllm": ("mooncake.engine",)},
        configure=_mooncake,
        hand_over={("vllm", "vllm"): both_at_once},
    ),
    "sglang-nixl": Connector(
        modules={"sglang": ("nixl",)},
        configure=lambda pair, role, port: (_sglang("nixl", role, port), {}),
        hand_over={("sglang", "sglang"): by_room},
    ),
    "sglang-mooncake": Connector(
        modules={"sglang": ("mooncake.engine",)},
        configure=lambda pair, role, port: (
            _sglang("mooncake", role, port),
            {"MC_FORCE_TCP": "true", "MOONCAKE_PROTOCOL": "tcp"},
        ),
        hand_over={("sglang", "sglang"): by_room},
    ),
}


def modules(pair: Pair, engine: str) -> tuple[str, ...]:
    """What an engine of a pair has to import."""
    return (*CONNECTORS[pair.connector].modules[engine], *_transport_modules(pair.transport))
