"""`python -m tests.engines.vllm.bench_http`: time to the first token over HTTP.

Three API servers of vLLM on this machine, one of them alone, and before the other two, in turns:
nothing (the client asks prefill, then decode), `vllm-router` where it is installed, and
`kvpool proxy` in both of its orders. Figures are medians, in milliseconds; for `kvpool proxy`, its
own steps of them (the header Server-Timing).

vLLM's workers spin for a second after each request, which on few cores takes the time of the other
server's: the pause between two requests is longer.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPResponse
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from disagg.cli.proxy.asks import vllm_prefill
from tests.engines.servers import Server, greedy, kvpool_proxy
from tests.engines.vllm.engines import Role, prompts
from tests.engines.vllm.models import save
from tests.engines.vllm.servers import api_server
from tests.ports import free_port

PATH = "/v1/completions"
Body = dict[str, Any]


def posted(server: Server, body: Body) -> tuple[HTTPConnection, HTTPResponse]:
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", PATH, json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status} {answer.read()!r}\n{server.tail()}")
    return connection, answer


def streamed(server: Server, body: Body) -> tuple[float, dict[str, float]]:
    """When the first token was there, and the steps before it that the answer names."""
    connection, answer = posted(server, body | {"stream": True})
    while not answer.readline().startswith(b"data: {"):
        pass
    first = time.perf_counter()
    answer.read()
    connection.close()
    timing = answer.getheader("Server-Timing", "")
    return first, {name: float(ms) for name, ms in re.findall(r"(\w+);dur=([\d.]+)", timing)}


def directly(prefill: Server, decode: Server, body: Body) -> tuple[float, dict[str, float]]:
    """The two requests of a hand-off, one after the other."""
    connection, answer = posted(prefill, vllm_prefill(body))
    params = json.loads(answer.read())["kv_transfer_params"]
    connection.close()
    return streamed(decode, body | {"kv_transfer_params": params})


def ways(stack: ExitStack, model: Path, logs: Path) -> dict[str, Callable[[Body], Any]]:
    """Servers that are ready, and how each is asked."""
    sides: tuple[Role, ...] = ("prefill", "decode", "single")
    prefill, decode, single = (stack.enter_context(api_server(role, model, logs)) for role in sides)
    for server in (prefill, decode, single):
        server.ready(600)
    before = {
        "kvpool proxy": kvpool_proxy([prefill], [decode], logs),
        "kvpool proxy --at-once": kvpool_proxy([prefill], [decode], logs, "--at-once"),
    }
    if find_spec("vllm_router"):
        router = ["--vllm-pd-disaggregation", "--policy", "round_robin"]
        router += ["--prefill", prefill.url, "--decode", decode.url]
        router += ["--prometheus-port", str(free_port())]
        before["vllm-router"] = Server("router", "vllm_router.launch_router", router, logs)
    for server in before.values():
        stack.enter_context(server).ready()
    return {
        "one server": lambda body: streamed(single, body),
        "prefill, then decode": lambda body: directly(prefill, decode, body),
        **{
            name: lambda body, server=server: streamed(server, body)
            for name, server in before.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 300, 700])
    parser.add_argument("--rounds", type=int, default=11, help="the first is not counted")
    parser.add_argument("--pause", type=float, default=1.6, help="seconds between two requests")
    parser.add_argument("--model", default="llama", help="of tests.engines.vllm.models")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvpool-bench-"))
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    steps: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    with ExitStack() as stack:
        asked = ways(stack, save(options.model, folder), folder)
        for number, length, name in product(range(options.rounds), options.tokens, asked):
            (prompt,) = prompts(length, seed=number)
            time.sleep(options.pause)
            began = time.perf_counter()
            first, named = asked[name](greedy(model=options.model, prompt=prompt, max_tokens=2))
            if number:
                times[name, length].append(1e3 * (first - began))
                steps[name, length].append(named)
    print_tables(options.tokens, list(asked), times, steps)


def print_tables(
    lengths: list[int],
    names: list[str],
    times: dict[tuple[str, int], list[float]],
    steps: dict[tuple[str, int], list[dict[str, float]]],
) -> None:
    table = Table("ms to the first token: lowest, median", *[f"{n} tokens" for n in lengths])
    for name in names:
        cells = [times[name, length] for length in lengths]
        table.add_row(name, *[f"{min(each):.0f}, {statistics.median(each):.0f}" for each in cells])
    trace = Table("through", "tokens", "prefill", "decode", "in it", "until its first byte")
    for name, length in product(names, lengths):
        if rows := [row for row in steps[name, length] if row]:
            # decode's first byte may be there before prefill's answer, where both are asked at once
            after = [row for row in rows if "prefill" in row and "once" not in name]
            prefill = [row["prefill"] for row in rows if "prefill" in row]
            inside = [row["total"] - row["prefill"] - row["decode"] for row in after]
            decode, total = ([row[step] for row in rows] for step in ("decode", "total"))
            figures = [f"{statistics.median(ms):.1f}" if ms else "" for ms in (prefill, decode)]
            figures += [f"{statistics.median(ms):.1f}" if ms else "" for ms in (inside, total)]
            trace.add_row(name, str(length), *figures)
    console = Console(width=120)
    console.print(table)
    console.print(trace)


if __name__ == "__main__":
    main()
