"""`python -m tests.hosts.streaming`: milliseconds to the first token over links of several rates.

Two vLLM engines on two hosts, prefill in chunks; each `stream` of kvpool with both sides asked at
once, and vLLM's NixlConnector, whose decode is asked when prefill has answered. One request at a
time, medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics

from rich.console import Console
from rich.table import Table

from tests.engines.launcher import end_launchers
from tests.engines.vllm.bench import APART, OPTIONS, REFERENCE, streamed
from tests.engines.vllm.engines import NIXL, Engine, prefilled, prompts, side_channel
from tests.hosts.network import Network
from tests.hosts.sides import Sides, sides

STREAMS = {APART: None, "none": None, "chunks": "chunks", "layers": "layers"}
MODEL = "llama_wide"
TOKEN_BYTES = 32 << 10


def pair(engines: Sides, way: str, most: int, chunk: int) -> tuple[Engine, Engine]:
    """Prefill and decode, ready, with room for a prompt of `most` tokens."""
    options = OPTIONS | {
        "max_model_len": most + 128,
        "hf_overrides": {"max_position_embeddings": most + 128},
        "max_num_batched_tokens": chunk,
        "kv_cache_memory_bytes": 2 * (most + 1024) * TOKEN_BYTES,
    }
    started = []
    for role, host in zip(("prefill", "decode"), engines.network.hosts):
        environment = {"VLLM_HOST_IP": host.ipv4, "VLLM_NIXL_SIDE_CHANNEL_HOST": host.ipv4}
        more = {"connector": NIXL} if way == REFERENCE else {}
        extra = {"engine": "nixl", "stream": STREAMS.get(way)}
        engine = engines.start(
            role,
            MODEL,
            extra={name: value for name, value in extra.items() if value},
            environ=environment | side_channel(role),
            **options,
            **more,
        )
        started.append(engine)
    prefill, decode = (engine.ready() for engine in started)
    return prefill, decode


def measured(network: Network, way: str, given: argparse.Namespace) -> dict[tuple[str, int], float]:
    """By rate and tokens, the median of a way."""
    found: dict[tuple[str, int], float] = {}
    with sides(network, Engine) as engines:
        prefill, decode = pair(engines, way, max(given.tokens), given.chunk)
        params = prefilled(prefill, [[7, 8]])
        decode.generate([[7, 8]], tokens=1, params=params)
        together = way not in (REFERENCE, APART)
        addresses = params[0]["remote_addresses"] if together else []
        for rate in given.rates:
            for host in network.hosts:
                network.rate(host, rate)
            for tokens in given.tokens:
                times = [
                    streamed(prefill, decode, prompts(tokens, seed=number)[0], addresses)
                    for number in range(given.rounds)
                ]
                found[rate, tokens] = statistics.median(times)
                print(f"{way}, {rate}, {tokens}: {[*map(round, times)]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.streaming", description=__doc__)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a step of prefill")
    ways = [REFERENCE, *STREAMS]
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    given = parser.parse_args()
    found = {}
    try:
        for way in given.ways:
            with Network(2) as network:
                found[way] = measured(network, way, given)
    finally:
        end_launchers()
    columns = [f"{tokens:,} tokens" for tokens in given.tokens]
    table = Table("link", "stream", *columns, title="ms to first token, medians")
    for rate in given.rates:
        for way, values in found.items():
            table.add_row(rate, way, *[f"{values[rate, tokens]:,.0f}" for tokens in given.tokens])
    Console().print(table)


if __name__ == "__main__":
    main()
