"""Engines of a few ranks, their contracts, and the handshake of their endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest.mock import patch

from hypothesis import strategies as st

from disagg import DecodeEndpoint, HandshakeRefused, PrefillEndpoint, create_engine
from disagg.contract.contract import Contract, ContractRank
from disagg.plan import IncompatibleLayouts
from disagg.protocol.versions import EARLIER, PROTOCOL
from kvpool import MHAPool, MLAPool, NSAPool
from kvpool.layout.formats import Shard
from kvpool.pools.base import KVPool

LAYERS, HEADS = 3, 4
KINDS = {
    "mha": (MHAPool, {"num_kv_heads": HEADS, "head_dim": 4}),
    "wide": (MHAPool, {"num_kv_heads": HEADS, "head_dim": 8}),
    "mla": (MLAPool, {"kv_lora_rank": 8, "qk_rope_head_dim": 4}),
    "nsa": (NSAPool, {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "index_head_dim": 8}),
}


@dataclass(frozen=True, kw_only=True)
class Split:
    """How an engine is built. `layers` ends its stages, of which the last may be too early."""

    kind: str = "mha"
    tp: int = 1
    layers: tuple[int, ...] = (LAYERS,)
    page: int = 16
    dtype: str = "bf16"
    engine: str = "local"
    protocol: int = PROTOCOL
    serves: tuple[str, ...] = ("prefill", "decode")
    allow_missing: tuple[str, ...] = ()
    conventions: dict[str, object] = field(default_factory=dict)
    said_by_last: dict[str, object] = field(default_factory=dict)

    def pools(self) -> list[KVPool]:
        build, numbers = KINDS[self.kind]
        sizes = {"num_pages": 3, "page_size": self.page, "dtype": self.dtype}
        stages = [range(*edges) for edges in zip((0, *self.layers), self.layers)]
        return [
            build(
                layers=stage, shard=Shard(rank, self.tp), total_kv_layers=LAYERS, **numbers, **sizes
            )
            for stage in stages
            for rank in range(self.tp)
        ]

    def said(self, last: bool) -> dict[str, object]:
        return self.conventions | (self.said_by_last if last else {})

    def contract(self) -> Contract:
        layouts = [pool.layout for pool in self.pools()]
        return Contract(
            engine=self.engine,
            serves=self.serves,
            size=len(layouts),
            ranks=tuple(
                ContractRank.of(n, layout, self.said(n == len(layouts) - 1))
                for n, layout in enumerate(layouts)
            ),
            allow_missing=self.allow_missing,
            versions={"kvpool": "0.1.0"},
            protocol=self.protocol,
        )


def said_values() -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(
        st.sampled_from(["model", "theta"]), st.sampled_from(["a", "b", 1, 1.5]), max_size=2
    )


def splits(**fixed: object) -> st.SearchStrategy[Split]:
    """Most of them like most others, so that pairs differ in a few things."""

    def mostly(usual: object, *others: object) -> st.SearchStrategy[object]:
        return st.sampled_from([usual] * 7 + [*others])

    choices = {
        "kind": mostly("mha", "wide", "mla", "nsa"),
        "tp": st.sampled_from([1, 2, 4]),
        "layers": st.sampled_from([(LAYERS,), (LAYERS,), (1, LAYERS), (2,)]),
        "page": st.sampled_from([8, 16]),
        "dtype": mostly("bf16", "f16"),
        "engine": mostly("local", "other"),
        "protocol": mostly(PROTOCOL, PROTOCOL - EARLIER - 1),
        "allow_missing": mostly((), ("index_key",)),
        "conventions": st.just({}) | said_values(),
        "said_by_last": st.just({}) | said_values(),
    }
    return st.builds(Split, **choices | {name: st.just(value) for name, value in fixed.items()})


def shake_hands(prefill: Split, decode: Split) -> str | None:
    """Connects real endpoints of all ranks; returns why that was refused, or None."""
    with ExitStack() as stack:
        addresses = [e.address for e in endpoints(stack, PrefillEndpoint, prefill)]
        options = {"allow_missing": decode.allow_missing}
        for endpoint in endpoints(stack, DecodeEndpoint, decode, **options):
            try:
                endpoint.connect(addresses, timeout=30)
            except (HandshakeRefused, IncompatibleLayouts) as refusal:
                return str(refusal)
    return None


def endpoints(stack: ExitStack, kind: type, split: Split, **options: object) -> Sequence[object]:
    pools = split.pools()
    stack.callback(pools.clear)  # memory that peers read outlives the endpoints
    made = []
    for number, pool in enumerate(pools):
        engine = create_engine("local")
        engine.name = split.engine
        said = split.said(number == len(pools) - 1)
        with patch("disagg.runtime.endpoint.PROTOCOL", split.protocol):
            endpoint = kind(pool.layout, engine, conventions=said, **options)
        made.append(stack.enter_context(endpoint))
    return made
