"""How a request is handed over: what each connector's own proxy sends to both servers."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from disagg.connectors.sglang.bootstrap import BootstrapServer, join
from disagg.connectors.source import REMOTE_DECODE
from disagg.testing.servers import EngineServer, RequestFailed

STORED = 2.0
"""Seconds after which a prompt's state is in a store."""


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

    prefill: EngineServer
    decode: EngineServer
    port: int


HandOver = Callable[[Servers, Prompt], tuple[int, ...]]
"""Tokens of a prompt that one server prefills and the other decodes. Raises RequestFailed."""


# vLLM


def ask_vllm(
    server: EngineServer, prompt: Prompt, *, new_tokens: int | None = None, params: Any = None
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
    first = ask_vllm(servers.prefill, prompt, new_tokens=1, params=dict(REMOTE_DECODE))
    params = first.get("kv_transfer_params")
    if not params:
        raise RequestFailed("prefill answered no kv_transfer_params")
    return tokens_of_vllm(ask_vllm(servers.decode, prompt, params=params))


def both_at_once(servers: Servers, prompt: Prompt) -> tuple[int, ...]:
    """As the proxy of vLLM's MooncakeConnector: both are told a transfer's name, decode also where
    prefill's ranks are found.
    """
    url = f"http://127.0.0.1:{servers.port}"
    with urllib.request.urlopen(f"{url}/query", timeout=prompt.timeout) as answer:
        engine = next(iter(json.load(answer).values()))["engine_id"]
    transfer = {"transfer_id": f"xfer-{prompt.name}"}
    first = {"do_remote_decode": True, "do_remote_prefill": False, **transfer}
    last = {"do_remote_decode": False, "do_remote_prefill": True, **transfer}
    last |= {"remote_engine_id": engine, "remote_bootstrap_addr": url}
    answers = _together(
        lambda: ask_vllm(servers.prefill, prompt, new_tokens=1, params=first),
        lambda: ask_vllm(servers.decode, prompt, params=last),
    )
    return tokens_of_vllm(answers[1])


def by_store(servers: Servers, prompt: Prompt) -> tuple[int, ...]:
    """Decode finds in a store what prefill has put there, by the prompt's tokens. Prefill answers
    before it has.
    """
    ask_vllm(servers.prefill, prompt, new_tokens=1)
    time.sleep(STORED)
    return tokens_of_vllm(ask_vllm(servers.decode, prompt))


def _together(*calls: Callable[[], Any]) -> list[Any]:
    """What they return; the first that fails ends the wait for the others."""
    pool = ThreadPoolExecutor(len(calls))
    futures = [pool.submit(call) for call in calls]
    wait(futures, return_when=FIRST_EXCEPTION)
    pool.shutdown(wait=False)
    for future in futures:
        if future.done():
            future.result()
    return [future.result() for future in futures]


# SGLang


def ask_sglang(server: EngineServer, prompt: Prompt, **bootstrap: Any) -> tuple[int, ...]:
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
    bootstrap = {"bootstrap_host": "127.0.0.1", "bootstrap_port": servers.port}
    bootstrap["bootstrap_room"] = prompt.number
    answers = _together(
        lambda: ask_sglang(servers.prefill, prompt, **bootstrap),
        lambda: ask_sglang(servers.decode, prompt, **bootstrap),
    )
    return tuple(answers[1])


# between vLLM and SGLang: vLLM hands over a prompt without its last token, SGLang all of its prompt


def vllm_to_sglang(servers: Servers, prompt: Prompt) -> tuple[int, ...]:
    """SGLang is given the prompt without its last token, which it takes for the first sampled."""
    params = {**REMOTE_DECODE, "room": prompt.number}
    first = ask_vllm(servers.prefill, prompt, new_tokens=1, params=params)
    cut = Prompt(
        number=prompt.number,
        tokens=prompt.tokens[:-1],
        new_tokens=prompt.new_tokens + 1,
        timeout=prompt.timeout,
    )
    with _bootstrap(first["kv_transfer_params"]["remote_addresses"]) as port:
        bootstrap = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port}
        tokens = ask_sglang(servers.decode, cut, bootstrap_room=prompt.number, **bootstrap)
    if tokens[:1] != prompt.tokens[-1:]:
        raise RequestFailed(f"decode begins with {tokens[:1]}, not with the prompt's last token")
    return tokens[1:]


def sglang_to_vllm(servers: Servers, prompt: Prompt) -> tuple[int, ...]:
    """SGLang is given the prompt without its last token, which vLLM computes."""
    cut = Prompt(
        number=prompt.number, tokens=prompt.tokens[:-1], new_tokens=1, timeout=prompt.timeout
    )
    bootstrap = {"bootstrap_host": "127.0.0.1", "bootstrap_port": servers.port}
    params = {"do_remote_prefill": True, "remote_addresses": addresses(servers.port)}
    params["remote_request_id"] = prompt.number
    answers = _together(
        lambda: ask_sglang(servers.prefill, cut, bootstrap_room=prompt.number, **bootstrap),
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
