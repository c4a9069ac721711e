"""`make vllm-demo`: a prompt is prefilled by one vLLM API server and decoded by another.

Beside the pair runs a single server with the same model: both must give the same tokens. The model
is tiny and has random weights, so times show that it runs, and no more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.engines.vllm import models
from tests.engines.vllm.servers import (
    Server,
    ServerFailed,
    api_server,
    greedy,
    proxy_server,
    tokens,
)

console = Console(width=None if sys.stdout.isatty() else 100)


@dataclass(frozen=True)
class Answer:
    """A streamed answer. Seconds are from the request to the first token, and to the last."""

    tokens: list[int]
    first: float
    last: float


def main() -> int:
    """0 where every prompt has the same tokens from both, 1 where one differs or a server fails."""
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(given.folder or tempfile.mkdtemp(prefix="kvpool-vllm-demo-"))
    with contextlib.ExitStack() as stack:
        try:
            return _run(given, folder, stack)
        except ServerFailed as failure:
            console.print(str(failure), markup=False, style="red")
            return 1
        except KeyboardInterrupt:
            return 1
        finally:
            console.print(f"logs: {folder}/logs", highlight=False)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make vllm-demo VLLM_DEMO=...", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--model", default="llama", choices=models.MODELS, help="which tiny model")
    parser.add_argument(
        "--engine", default="local", help="what moves bytes: local, nixl, mooncake (local)"
    )
    parser.add_argument(
        "--block-sizes",
        type=int,
        nargs=2,
        default=(128, 32),
        metavar=("PREFILL", "DECODE"),
        help="tokens a block (128 32)",
    )
    parser.add_argument(
        "--prompt-tokens", type=int, nargs="+", default=[300, 77, 16, 513], help="(300 77 16 513)"
    )
    parser.add_argument("--tokens", type=int, default=24, help="to decode (24)")
    parser.add_argument("--folder", help="for the model and logs (a new one under /tmp)")
    parser.add_argument(
        "--keep", action="store_true", help="leave the servers running, and print curl commands"
    )
    return parser.parse_args()


def _run(given: argparse.Namespace, folder: Path, stack: contextlib.ExitStack) -> int:
    with console.status(f"making {given.model} in {folder}"):
        model = models.save(given.model, folder / "models")
    logs, extra = folder / "logs", {"engine": given.engine}
    sizes = given.block_sizes
    # the single server's block size is prefill's: attention adds up in that order
    servers = [
        stack.enter_context(api_server("prefill", model, logs, extra=extra, block_size=sizes[0])),
        stack.enter_context(api_server("decode", model, logs, extra=extra, block_size=sizes[1])),
        stack.enter_context(api_server("single", model, logs, block_size=sizes[0])),
    ]
    prefill, decode, single = servers
    pair = stack.enter_context(proxy_server(prefill, decode, logs))
    _wait([*servers, pair])
    source = random.Random(1)
    asked = [[source.randrange(4, 500) for _ in range(count)] for count in given.prompt_tokens]
    for server in (pair, single):  # first requests pay for what is made once
        _answer(server, model.name, [source.randrange(4, 500) for _ in range(32)], 2)
    ours, theirs = (_answers(server, model.name, asked, given.tokens) for server in (pair, single))
    console.print(_table(ours, theirs, given.prompt_tokens))
    equal = sum(a.tokens == b.tokens for a, b in zip(ours, theirs))
    together = _throughput(pair, model.name, asked, given.tokens)
    alone = _throughput(single, model.name, asked, given.tokens)
    console.print(
        f"all prompts at once: {together:,.0f} tokens/s by the pair, {alone:,.0f} by one server"
    )
    read = decode.metric("vllm:kvpool_rooms_total", outcome="read") or 0
    nbytes = decode.metric("vllm:kvpool_bytes_total") or 0
    console.print(f"decode's /metrics: {read:.0f} prompts read from prefill, {nbytes:,.0f} bytes")
    passed = equal == len(asked) and read >= len(asked)
    verdict = "[green]PASS[/]" if passed else "[red]FAIL[/]"
    console.print(f"{verdict} {equal} of {len(asked)} prompts have the single server's tokens")
    if given.keep:
        _keep(pair, single, servers, model.name)
    return 0 if passed else 1


def _wait(servers: list[Server]) -> None:
    """Shows how many serve."""
    began, left = time.monotonic(), list(servers)
    with console.status("") as status:
        while left:
            names = ", ".join(server.name for server in left)
            status.update(f"starting {names}: {time.monotonic() - began:.0f} s")
            time.sleep(0.2)
            for server in [server for server in left if server.up()]:
                console.print(
                    f"{server.name:8} {server.url} serves after {time.monotonic() - began:.0f} s",
                    highlight=False,
                )
                left.remove(server)
            if time.monotonic() - began > 600:
                raise ServerFailed(f"{names} do not serve for 600 s.\n{left[0].tail()}")


def _answer(server: Server, model: str, prompt: list[int], count: int) -> Answer:
    events, times = server.stream(model=model, prompt=prompt, max_tokens=count)
    came = [at for event, at in zip(events, times) if tokens([event])]
    if not came:
        raise ServerFailed(f"{server.name} answers without tokens: {events}.\n{server.tail()}")
    return Answer(tokens(events), came[0], came[-1])


def _answers(server: Server, model: str, asked: list[list[int]], count: int) -> list[Answer]:
    """One after another."""
    return [_answer(server, model, prompt, count) for prompt in asked]


def _throughput(server: Server, model: str, asked: list[list[int]], count: int) -> float:
    """Tokens a second, all prompts at once: the median of three runs."""

    def run() -> float:
        began = time.monotonic()
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = pool.map(lambda prompt: _answer(server, model, prompt, count), asked)
            made = sum(len(answer.tokens) for answer in answers)
        return made / (time.monotonic() - began)

    return statistics.median(run() for _ in range(3))


def _table(ours: list[Answer], theirs: list[Answer], lengths: list[int]) -> Table:
    table = Table(
        "prompt", "tokens of prefill and decode", "of one server", "", "first token", "tokens/s"
    )
    for length, pair, single in zip(lengths, ours, theirs):
        same = pair.tokens == single.tokens
        table.add_row(
            f"{length:,}",
            _shown(pair.tokens),
            _shown(single.tokens),
            "[green]equal[/]" if same else "[red]differ[/]",
            f"{1e3 * pair.first:.0f} ms ({1e3 * single.first:.0f})",
            f"{_rate(pair):.0f} ({_rate(single):.0f})",
        )
    return table


def _shown(made: list[int]) -> str:
    return " ".join(map(str, made[:4])) + (f" … {made[-1]}" if len(made) > 5 else "")


def _rate(answer: Answer) -> float:
    """Tokens a second of the whole request: a slow client is sent several tokens at once."""
    return len(answer.tokens) / answer.last


def _keep(pair: Server, single: Server, servers: list[Server], model: str) -> None:
    body = json.dumps(greedy(model=model, prompt="w7 w77 w177", max_tokens=8))
    console.print("\nThe servers stay until Ctrl-C. Ask the pair, and one server:\n")
    for server in (pair, single):
        asked = f"-H 'Content-Type: application/json' -d '{body}'"
        console.out(f"curl {server.url}/v1/completions {asked}")
    console.out("".join(f"\ncurl {server.url}/metrics  # {server.name}" for server in servers))
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
