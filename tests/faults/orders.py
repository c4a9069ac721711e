"""How a process is set up, and the requests that it serves."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from disagg.engines.base import Engine
from kvpool.allocation.allocator import Request
from kvpool.layout import RequestAddress


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
