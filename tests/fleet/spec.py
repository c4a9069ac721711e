"""What a fleet consists of, what is asked of it, and what goes wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvpool import MHAPool, PoolLayout, Shard
from kvpool.models import declare

PAGE = 64  # tokens
SPARE = 4  # pages of a rank, as a multiple of what its rooms hold on average
# how long a rank that died is away, in peer time-outs: shorter and longer than its peers wait
RESTART = 0.1, 3.0
MOST_TOKENS = 8  # of the longest request, as a multiple of the mean


@dataclass(frozen=True, slots=True)
class Spec:
    """A fleet: `prefill` and `decode` ranks, of which each `prefill_tp` and `decode_tp` are one
    engine; a room touches all ranks of one engine on each side. Times are in seconds.
    """

    prefill: int = 16
    decode: int = 32
    prefill_tp: int = 2
    decode_tp: int = 2
    rooms: int = 10_000
    in_flight: int = 16  # rooms of a decode engine at a time: when one ends, the next begins
    tokens: int = 1024  # mean length of a request; lengths are exponential, whole pages
    chunks: int = 1  # in which prefill offers a request, at most
    compute: float = 0.1  # mean time of a prefill; times are exponential
    latency: float = 200e-6  # mean time of a message, and of a read beside its bytes
    rate: float = 50e9  # bytes a second of a rank's port, into it and out of it
    turn: float = 20e-6  # what a rank's thread needs for a message
    loss: float = 0.0  # part of the messages that get lost
    deaths: int = 0  # ranks that die without a word, one after another, and restart
    peer_timeout: float = 10.0
    lease: float = 60.0
    offer_timeout: float = 60.0
    unused: float = 120.0  # after this time without a room, decode disconnects from prefill
    model: str = ""  # whose layouts the ranks have: a shipped config or a config.json
    seed: int = 0
    groups: bool = True  # whether a decode rank has its Group, and asks a part of prefill

    def __post_init__(self) -> None:
        for side in ("prefill", "decode"):
            ranks, tp = getattr(self, side), self.tp(side)
            if tp < 1 or ranks < tp or ranks % tp:
                raise ValueError(f"{ranks} {side} ranks: give a multiple of {tp}, of an engine.")

    @property
    def ranks(self) -> int:
        return self.prefill + self.decode

    def tp(self, side: str) -> int:
        return int(getattr(self, f"{side}_tp"))

    def engines(self, side: str) -> int:
        return int(getattr(self, side)) // self.tp(side)

    def pages(self, side: str) -> int:
        """Pages of a rank, with the one that is reserved."""
        ratio = self.engines("decode") / self.engines("prefill") if side == "prefill" else 1
        pages = -(-self.tokens // PAGE)
        return 1 + max(pages * MOST_TOKENS, math.ceil(SPARE * self.in_flight * ratio * pages))

    def layout(self, side: str, rank: int) -> PoolLayout:
        """The layout of one rank of an engine: of the model, or of four layers of K and V, of which
        it has a share of the heads. Raises ValueError.
        """
        common: dict[str, Any] = {"device": "meta", "dtype": "bf16", "page_size": PAGE}
        common |= {"shard": Shard(rank, self.tp(side)), "num_pages": self.pages(side)}
        if not self.model:
            heads = math.lcm(8, self.prefill_tp, self.decode_tp)
            kv: dict[str, Any] = {"num_kv_heads": heads, "head_dim": 128, "order": "hnd"}
            return MHAPool(layers=range(4), **kv, **common).layout
        layout = declare(self.model).build(requests=1, **common).layout
        if [space.name for space in layout.spaces] != ["kv"]:
            names = ", ".join(space.name for space in layout.spaces)
            raise ValueError(f"model {self.model}: pages alone are simulated, it has {names}.")
        return layout

    def growing(self, what: str, ranks: int) -> Iterator[Spec]:
        """Fleets of 8 ranks to `ranks`, twice as many each time. `fleet`: more engines, half of
        them prefill, and rooms in proportion; `prefill`, `decode`: one engine of 4 ranks on the
        other side and one that gets larger; `both`: one engine on each side, of as many ranks.
        Of one engine there are fewer rooms: each is of all ranks.
        """
        for size in (8 << n for n in range(ranks.bit_length() - 3) if 8 << n <= ranks):
            prefill = {"prefill": size - 4, "decode": 4}.get(what, size // 2)
            sides = {"prefill": prefill, "decode": size - prefill}
            if what == "fleet":
                rooms = max(1, self.rooms * size // ranks)
            else:
                rooms = max(4, self.rooms // (4 * size))
                sides |= {"prefill_tp": prefill, "decode_tp": size - prefill}
            yield replace(self, rooms=rooms, **sides)
