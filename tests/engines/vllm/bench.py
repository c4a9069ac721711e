"""`python -m tests.engines.vllm.bench`: time to first token and throughput beside NixlConnector.

Two engine processes a connector, in turns, on this machine: prefill computes all prompts, then
decode is asked for them at once. Times are decode's, from the request to its first token, medians
of the rounds; ratios are to vLLM's own NixlConnector in the same run (below 1: sooner).

With `--streams`: both engines are asked for one prompt at once, by each way of streaming; times are
from then to decode's first token. In the first row decode is asked when prefill has answered, as a
proxy does that does not name rooms.

With `--store`: the time to first token with a store beside computing, and with `--writing` tokens a
second of an engine that writes to one (`bench_store`).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.engines.vllm import bench_store
from tests.engines.vllm.engines import NIXL, Engine, asked_at_once, prefilled, prompts, side_channel
from tests.engines.vllm.models import save

REFERENCE = "NixlConnector"
CONNECTORS = (REFERENCE, "local", "nixl")
APART = "none, decode asked after prefill"
STREAMS = (
    (APART, None, None),
    ("none", None, None),
    ("chunks", "chunks", None),
    ("layers", "layers", None),
    ("layers, decode waits in its pass", "layers", "layers"),
)
"""Ways to stream, and the setting of prefill and of decode."""
OPTIONS: dict[str, Any] = {
    "max_model_len": 8192,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 4096,
    "block_size": 128,
}


@contextmanager
def pair(connector: str, model: Path, logs: Path, most: int) -> Iterator[tuple[Engine, Engine]]:
    """Two engines that are ready, with room for `most` tokens."""
    options = OPTIONS | {"kv_cache_memory_bytes": (most + 64 * 128) * (32 << 10)}
    options |= {"connector": NIXL} if connector == REFERENCE else {"extra": {"engine": connector}}
    with (
        Engine("prefill", model, logs, environ=side_channel("prefill"), **options) as prefill,
        Engine("decode", model, logs, environ=side_channel("decode"), **options) as decode,
    ):
        yield prefill.ready(), decode.ready()


def timed(prefill: Engine, decode: Engine, asked: list[list[int]]) -> tuple[float, float]:
    """Mean seconds to the first token, and tokens a second from request to end."""
    params = prefilled(prefill, asked)
    began = time.monotonic()
    names = [decode.add(prompt, params=one, tokens=16) for prompt, one in zip(asked, params)]
    seconds = [decode.event("first", id=name, timeout=300)["seconds"] for name in names]
    for name in names:
        decode.finished(name, timeout=300)
    return statistics.mean(seconds), 16 * len(asked) / (time.monotonic() - began)


def streamed(prefill: Engine, decode: Engine, asked: list[int], addresses: list[str]) -> float:
    """Milliseconds from the request to decode's first token. Without `addresses`, decode is asked
    when prefill has answered.
    """
    began = time.monotonic()
    if addresses:
        (sent,), (name,) = asked_at_once(prefill, decode, [asked], 2, addresses)
    else:
        name = decode.add(asked, tokens=2, params=prefilled(prefill, [asked])[0])
    decode.event("first", id=name, timeout=300)
    seconds = time.monotonic() - began
    decode.finished(name)
    if addresses:
        prefill.finished(sent)
    return 1e3 * seconds


def streams(model: Path, logs: Path, tokens: list[int], rounds: int, chunk: int) -> None:
    """Prints the table of ways to stream. They take turns in every round."""
    options = OPTIONS | {"kv_cache_memory_bytes": 512 << 20, "max_num_batched_tokens": chunk}
    found: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        prefills, decodes = (
            {
                stream: stack.enter_context(
                    Engine(role, model, logs, extra={"stream": stream}, **options)
                )
                for stream in dict.fromkeys(way[side] for _, *way in STREAMS)
            }
            for side, role in enumerate(("prefill", "decode"))
        )
        addresses = {}
        for stream, prefill in prefills.items():
            for decode in decodes.values():
                params = prefilled(prefill.ready(), [[7, 8]])
                decode.ready().generate([[7, 8]], tokens=1, params=params)
                addresses[stream] = params[0]["remote_addresses"]
        for number, length, (name, there, here) in product(range(rounds), tokens, STREAMS):
            known = [] if name == APART else addresses[there]
            asked = prompts(length, seed=number)[0]
            seconds = streamed(prefills[there], decodes[here], asked, known)
            found.setdefault((name, length), []).append(seconds)
    title = f"ms to first token: lowest, median; prefill in chunks of {chunk:,}"
    table = Table("stream", *[f"{length:,} tokens" for length in tokens], title=title)
    for name, *_ in STREAMS:
        each = [found[name, length][1:] for length in tokens]
        table.add_row(name, *[f"{min(one):.0f}, {statistics.median(one):.0f}" for one in each])
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--rounds", type=int, default=5, help="the first is not counted")
    parser.add_argument("--model", default="llama_wide", help="of tests.engines.vllm.models")
    parser.add_argument("--connectors", nargs="+", default=list(CONNECTORS))
    parser.add_argument("--streams", action="store_true", help="the ways to stream, beside none")
    parser.add_argument("--chunk", type=int, default=512, help="tokens, with --streams")
    parser.add_argument("--store", action="store_true", help="hits of a store, beside computing")
    parser.add_argument("--writing", action="store_true", help="what writing to a store costs")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvpool-bench-"))
    model = save(given.model, folder)
    if given.streams:
        streams(model, folder, given.tokens, given.rounds, given.chunk)
        return
    cases = [(count, length) for length in given.tokens for count in given.requests]
    if given.store or given.writing:
        if given.store:
            bench_store.hits(model, folder, given.tokens, given.rounds, OPTIONS)
        if given.writing:
            bench_store.writing(model, folder, cases, given.rounds, OPTIONS)
        return
    found: dict[tuple[str, int, int], tuple[float, float]] = {}
    console = Console()
    for connector in given.connectors:
        most = max(count * length for count, length in cases)
        with console.status(connector), pair(connector, model, folder, most) as (prefill, decode):
            for count, length in cases:
                rounds = [
                    timed(prefill, decode, prompts(*[length] * count, seed=number))
                    for number in range(given.rounds)
                ]
                best = [statistics.median(column) for column in zip(*rounds[1:])]
                found[connector, count, length] = best[0], best[1]
    table = Table(
        "requests x tokens", *given.connectors, title="ms to first token (ratio), tokens/s"
    )
    for count, length in cases:
        row = []
        for connector in given.connectors:
            first, rate = found[connector, count, length]
            known = found.get((REFERENCE, count, length))
            ratio = f" ({first / known[0]:.2f})" if known else ""
            row.append(f"{1e3 * first:.0f}{ratio}, {rate:.0f}/s")
        table.add_row(f"{count} x {length:,}", *row)
    console.print(table)


if __name__ == "__main__":
    main()
