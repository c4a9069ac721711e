"""How a process is set up, its pools and engine, and the requests that it serves."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from disagg.engines.base import Engine
from kvpool import Shard
from kvpool.allocation.allocator import Request
from kvpool.layout import RequestAddress
from tests import pools
from tests.disagg.engines.peers import ENGINES


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One process. `pool` builds its pool, `options` go to the endpoint."""

    engine: str
    pool: Any
    salts: range
    options: dict[str, Any]
    bind: str | None = None
    """Prefill's endpoint address; None for decode."""
    max_bytes: int = 1 << 20
    environment: dict[str, str] = field(default_factory=dict)
    log: str = os.devnull
    """File for what the process prints."""
    keys: str | None = None
    """The folder of the deployment's keys; without, TCP is open to all."""
    make: Callable[[], Engine] | None = None
    """Makes the engine, if it is not one by name."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """The course of a request. Times in seconds."""

    tokens: int
    salt: int
    stops: tuple[int, ...] = ()
    """Where prefill's chunks end."""
    gap: float = 0.0
    """Between two chunks."""
    start: int = 0
    """The first position that decode lacks."""
    offered: float = 0.0
    """When prefill begins."""
    wanted: float = 0.0
    """When decode begins."""


@dataclass(eq=False)
class Order:
    """One side of one request."""

    number: int
    room: str
    course: Course
    link: str
    request: Request | None = None
    address: RequestAddress | None = None
    chunks: int = 0
    due: float = 0.0
    asked: bool = False
    wanted: bool = False
    ended: bool = False


@dataclass(frozen=True)
class Shape:
    """Pools by process, and how they are linked: `ranks` prefills are one link, `readers` decodes
    read each room.
    """

    name: str
    engine: str
    prefill: tuple[Any, Any]
    decode: tuple[Any, Any]
    ranks: int = 1
    readers: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    keys: bool = False
    """Whether messages go over TLS."""

    def links(self) -> dict[str, list[str]]:
        return {"p": ["p0", "p1"]} if self.ranks == 2 else {"p0": ["p0"], "p1": ["p1"]}


mla = pools.mla.but(kv_lora_rank=64, qk_rope_head_dim=16, page_size=8, num_pages=160)
mha = pools.mha.but(head_dim=16, v_head_dim=8, page_size=8, num_pages=160)
hybrid = pools.hybrid_mla.but(page_size=8, num_pages=160, num_slots=24)


def shapes(engine: str) -> list[Shape]:
    small = mla.but(page_size=4, num_pages=320)
    halves = tuple(mha.but(shard=Shard(rank, 2)) for rank in range(2))
    all_shapes = [
        Shape(f"{engine} pair", engine, (mla, small), (mla, mla)),
        Shape(f"{engine} states", engine, (hybrid, hybrid), (hybrid, hybrid)),
        Shape(f"{engine} two ranks", engine, halves, (mha, mha.but(page_size=16)), ranks=2),
        Shape(f"{engine} two readers", engine, (mha, mha), halves, readers=2),
    ]
    if engine == "local":
        all_shapes.append(Shape("local keys", engine, (mla, small), (mla, mla), keys=True))
    if engine == "nixl":
        tcp = {"UCX_TLS": "tcp,self"}
        all_shapes.append(Shape("nixl tcp", engine, (mla, small), (mla, mla), environment=tcp))
    return all_shapes


SHAPES = {shape.name: shape for engine in ENGINES for shape in shapes(engine)}
