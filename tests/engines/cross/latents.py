"""vLLM's rank of a pair with SGLang, over tensors that its own planner has laid out on a CPU.

`python -m tests.engines.cross.latents`, in vLLM's environment, reads lines. `KIND prefill`: it
answers with an address, and serves until the next line. `KIND decode ADDRESS`: it reads from there,
and answers with what has become of that.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np

COMMON = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64,
    "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 4, "index_topk": 64,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "dsa": {
        **COMMON, "model_type": "glm_moe_dsa", "num_hidden_layers": 8, "kv_lora_rank": 512,
        "index_topk_pattern": "FFSSFSSS", "indexer_rope_interleave": True,
    },
    "v4": {
        **COMMON, "model_type": "deepseek_v4", "num_hidden_layers": 6, "sliding_window": 128,
        "compress_ratios": [0, 4, 128, 4, 128, 4],
    },
}  # fmt: skip
"""The models' configurations, which both engines read."""
TOKENS = 300


def value(layer: int, what: str, token: int, size: int) -> np.ndarray:
    """The bytes of a row, in either engine's tensors."""
    seed = crc32(f"{layer} {what} {token}".encode())
    return np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8)


def rank_of(kind: str) -> tuple[Any, Any]:
    """The rank, and a request's block table."""
    from tests.engines import deepseek_v4, test_shared_indexers

    if kind == "dsa":
        one = test_shared_indexers.Engine(range(8), 1)
        return one, one.table
    other = deepseek_v4.Rank(deepseek_v4.Model(), range(6), 1)
    return other, other.address(other.blocks(TOKENS), TOKENS)


def serve(kind: str, role: str, address: str = "") -> None:
    """One line."""
    from disagg import DecodeEndpoint, HandshakeRefused, KVPoll, PrefillEndpoint, create_engine
    from disagg.connectors.vllm.connector import engine_conventions

    model = SimpleNamespace(
        hf_text_config=CONFIGS[kind], revision=None, model="/models/tiny", quantization=None
    )
    said = engine_conventions(
        SimpleNamespace(
            model_config=model,
            speculative_config=None,
            load_config=SimpleNamespace(load_format="auto"),
        )
    )
    (rank, table), engine = rank_of(kind), create_engine("local")
    if role == "prefill":
        if kind == "dsa":
            rank.write()
        with PrefillEndpoint(rank.seen.layout, engine, conventions=said) as prefill:
            prefill.send("room", table)
            print(prefill.address, flush=True)
            sys.stdin.readline()
        return
    with DecodeEndpoint(rank.seen.layout, engine, conventions=said) as decode:
        try:
            decode.connect([address], timeout=60)
        except HandshakeRefused as refused:
            print(str(refused).replace("\n", " "), flush=True)
            return
        decode.receive("room", table)
        assert decode.wait("room", 60) is KVPoll.Success, decode.failure("room")
    got = rank.raw.clone()
    live = rank.write()
    print("equal" if got[live].equal(rank.raw[live]) else "differs", flush=True)


if __name__ == "__main__":
    for line in sys.stdin:
        serve(*line.split())
