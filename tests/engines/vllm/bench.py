"""`python -m tests.engines.vllm.bench`: time to first token and throughput beside NixlConnector.

Two engine processes a connector, in turns, on this machine: prefill computes all prompts, then
decode is asked for them at once. Times are decode's, from the request to its first token, medians
of the rounds; ratios are to vLLM's own NixlConnector in the same run (below 1: sooner).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.engines.vllm.engines import NIXL, PREFILL, Engine, prompts, side_channel
from tests.engines.vllm.models import save

REFERENCE = "NixlConnector"
CONNECTORS = (REFERENCE, "local", "nixl")
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
    first = prefill.generate(asked, tokens=1, params=[dict(PREFILL) for _ in asked])
    began = time.monotonic()
    names = [
        decode.add(prompt, params=one["params"], tokens=16) for prompt, one in zip(asked, first)
    ]
    seconds = [decode.event("first", id=name, timeout=300)["seconds"] for name in names]
    for name in names:
        decode.finished(name, timeout=300)
    return statistics.mean(seconds), 16 * len(asked) / (time.monotonic() - began)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--rounds", type=int, default=5, help="the first is not counted")
    parser.add_argument("--connectors", nargs="+", default=list(CONNECTORS))
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvpool-bench-"))
    model = save("llama_wide", folder)
    cases = [(count, length) for length in given.tokens for count in given.requests]
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
