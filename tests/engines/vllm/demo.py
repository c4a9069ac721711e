"""`make vllm-demo`: a prompt is prefilled by one vLLM API server and decoded by another.

Beside the pair runs a single server with the same model: both must give the same tokens. The model
is tiny and has random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import signal
import sys
import time
from pathlib import Path

from rich.table import Table

from tests.engines.demo import console, pair_parser, shown
from tests.engines.servers import Server, greedy, kvpool_proxy, tokens
from tests.engines.vllm import models
from tests.engines.vllm.engines import prompts
from tests.engines.vllm.servers import api_server


def main() -> int:
    """0 where every prompt has the same tokens from both, 1 where one differs or a server fails."""
    made = pair_parser("vllm-demo", __doc__)
    sizes = {"metavar": ("PREFILL", "DECODE"), "help": "tokens a block (128 32)"}
    made.add_argument("--block-sizes", type=int, nargs=2, default=(128, 32), **sizes)
    text = "leave the servers running, and print curl commands"
    made.add_argument("--keep", action="store_true", help=text)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with contextlib.ExitStack() as stack:
        run = functools.partial(_run, stack)
        return shown("vllm-demo", made.parse_args(), run)


def _run(stack: contextlib.ExitStack, options: argparse.Namespace, folder: Path) -> bool:
    with console.status(f"making {options.model} in {folder}"):
        model = models.save(options.model, folder / "models")
    logs, extra = folder / "logs", {"engine": options.engine}
    theirs, ours = options.block_sizes
    # the single server's block size is prefill's: attention adds up in that order
    prefill = api_server("prefill", model, logs, extra=extra, block_size=theirs)
    servers = [
        stack.enter_context(prefill),
        stack.enter_context(api_server("decode", model, logs, extra=extra, block_size=ours)),
        stack.enter_context(api_server("single", model, logs, block_size=theirs)),
    ]
    _, decode, single = servers
    pair = stack.enter_context(kvpool_proxy([prefill], [decode], logs))
    with console.status("starting prefill, decode, a single server and the proxy"):
        for server in (*servers, pair):
            server.ready(600)
            console.print(f"{server.name:8} {server.url} serves", highlight=False)
    table = Table("prompt", "tokens of prefill and decode", "of one server", "", "seconds")
    equal = 0
    for prompt in prompts(*options.prompt_tokens):
        asked = {"model": model.name, "prompt": prompt, "max_tokens": options.tokens}
        began = time.monotonic()
        found = tokens(pair.ask(**asked))
        seconds, expected = time.monotonic() - began, tokens(single.ask(**asked))
        equal += found == expected
        verdict = "[green]equal[/]" if found == expected else "[red]differ[/]"
        table.add_row(
            f"{len(prompt):,}", _tokens(found), _tokens(expected), verdict, f"{seconds:.2f}"
        )
    console.print(table)
    read = decode.metric("kvpool_rooms_total", outcome="success") or 0
    nbytes = decode.metric("kvpool_moved_bytes_total") or 0
    console.print(f"decode's /metrics: {read:.0f} prompts read from prefill, {nbytes:,.0f} bytes")
    count = len(options.prompt_tokens)
    console.print(f"{equal} of {count} prompts have the single server's tokens")
    if options.keep:
        _keep(pair, servers, model.name)
    return equal == count and read >= count


def _tokens(made: list[int]) -> str:
    return " ".join(map(str, made[:4])) + (f" … {made[-1]}" if len(made) > 5 else "")


def _keep(pair: Server, servers: list[Server], model: str) -> None:
    body = json.dumps(greedy(model=model, prompt="w7 w77 w177", max_tokens=8))
    console.print("\nThe servers stay until Ctrl-C. Ask the pair, and one server:\n")
    for server in (pair, servers[-1]):
        asked = f"-H 'Content-Type: application/json' -d '{body}'"
        console.out(f"curl {server.url}/v1/completions {asked}")
    console.out("".join(f"\ncurl {server.url}/metrics  # {server.name}" for server in servers))
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
