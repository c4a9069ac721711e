"""Benchmark cases and their sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from disagg.cli.bench.handoff.decode import TimedHandOffs
from disagg.cli.bench.peer import OneOpen, PeerReader
from disagg.cli.bench.work import Work
from kvpool.device import Device

COPY = "copy"
"""The bound of cases that move bytes: one contiguous copy in the device's memory."""


class BenchContext(NamedTuple):
    """Where cases run: a device, and peers in another process that has memory of the same kind."""

    device: Device
    readers: OneOpen[PeerReader]
    """By engine."""
    handoffs: OneOpen[TimedHandOffs]
    """By engine and family."""


@dataclass(frozen=True, slots=True, kw_only=True)
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

    @property
    def title(self) -> str:
        """Group and name."""
        return f"{self.group}: {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
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
    handoff_tokens: tuple[int, ...] = (1, 128, 8192)
    handoff_chunk: int = 2048
    """Tokens of requests, and of their chunks where they come in several."""
    least_rounds: int = 5
    rounds: int = 20
    seconds: float = 1.5
    batch_seconds: float = 0.005


MIB = 1 << 20
QUICK = Sizes(
    entry_bytes=MIB // 4,
    pages=2,
    run_bytes=MIB,
    transfer_bytes=2 * MIB,
    handoff_tokens=(1, 512),
    handoff_chunk=256,
    least_rounds=3,
    seconds=0.0,
    batch_seconds=0.0,
)
TINY = replace(
    QUICK,
    entry_bytes=MIB // 32,
    pages=1,
    run_bytes=MIB // 4,
    handoff_tokens=(1, 128),
    handoff_chunk=64,
)
HOST_SIZES = Sizes(entry_bytes=22 * MIB, pages=8, run_bytes=32 * MIB, transfer_bytes=32 * MIB)
ACCELERATOR = Sizes(entry_bytes=256 * MIB, pages=128, run_bytes=256 * MIB, transfer_bytes=64 * MIB)


def sizes_for(device: Device, quick: bool) -> Sizes:
    """Larger than the device's caches, or minimal if `quick` or on an emulated device."""
    if quick or device.emulated:
        return QUICK
    return HOST_SIZES if device.memory_kind == "cpu" else ACCELERATOR
