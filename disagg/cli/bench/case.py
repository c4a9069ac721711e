"""Benchmark cases and their sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from disagg.cli.bench.handoff.decode import DecodeSide
from disagg.cli.bench.peer import PeerReader
from disagg.cli.bench.work import Work
from kvpool.device import Device

COPY = "copy"
"""The bound of cases that move bytes: one contiguous copy in the device's memory."""


class BenchContext(NamedTuple):
    """Where cases run: a device, and readers of a peer's memory of the same kind."""

    device: Device
    reader: Callable[[str], PeerReader]
    """The reader of an engine by name; closes the previous one. Raises CannotRun."""
    handoffs: Callable[[str, str], DecodeSide]
    """Endpoints of an engine and a family; closes the previous ones. Raises CannotRun."""


@dataclass(frozen=True, slots=True)
class BenchCase:
    """`nbytes` are the bytes of a copy with as much memory traffic as the case; 0 if it moves none.

    `bound` names the reference: `COPY`, or another implementation. `calls` of each are timed
    together (0: as many as the clock's resolution needs).
    """

    group: str
    name: str
    nbytes: int
    open: Callable[[BenchContext], Work]
    bound: str = COPY
    calls: int = 0
    engine: str | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much each case moves, and for how many `seconds` and rounds it is timed. Calls that take
    `batch_seconds` together are timed as one.
    """

    entry_bytes: int
    """Size of the entries that are written and read."""
    pages: int
    """Pages to move, of 64 tokens in 61 layers."""
    run_bytes: int
    """Bytes to gather and scatter."""
    transfer_bytes: int
    bound_pages: int
    """Pages to bind, of 64 tokens in 61 layers."""
    plan_ranks: int
    """Ranks of prefill to plan with, a multiple of 64."""
    handoff_tokens: tuple[int, ...] = (1, 128, 8192)
    handoff_chunk: int = 2048
    """Tokens of requests, and of their chunks where they come in several."""
    least_rounds: int = 5
    rounds: int = 20
    seconds: float = 1.5
    batch_seconds: float = 0.005


MIB = 1 << 20
QUICK = Sizes(
    *(MIB // 4, 2, MIB, 2 * MIB, 64, 64, (1, 512), 256),
    least_rounds=3,
    seconds=0.0,
    batch_seconds=0.0,
)
HOST_SIZES = Sizes(22 * MIB, 8, 32 * MIB, 32 * MIB, 2048, 512)
ACCELERATOR = Sizes(256 * MIB, 128, 256 * MIB, 64 * MIB, 2048, 512)


def sizes_for(device: Device, quick: bool) -> Sizes:
    """Larger than the device's caches, or minimal if `quick` or on an emulated device."""
    if quick or device.emulated:
        return QUICK
    return HOST_SIZES if device.memory_kind == "cpu" else ACCELERATOR
