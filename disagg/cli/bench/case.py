"""Benchmark cases: what is timed, its reference, the check of its result, and its row."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvpool.device import Device
from kvpool.testing.case import fail

if TYPE_CHECKING:
    from disagg.cli.bench.peer import BenchContext

COPY = "copy"
"""The bound of cases that move bytes: one contiguous copy in the device's memory."""
GIB, MIB = 1 << 30, 1 << 20


class Work(NamedTuple):
    """A case with its memory. `check` runs after the first call of `ours`, and raises CheckFailure
    if its result is wrong. `clock` gives seconds; one of its own runs only during what is timed.
    """

    ours: Callable[[], object]
    reference: Callable[[], object]
    check: Callable[[], None]
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A case as a row of the JSON object. `bytes` are of a copy with as much memory traffic as the
    case, 0 if it moves none; `bound` names the reference: `COPY`, or another implementation;
    `target` is the least ratio to reach on an H200, or None.

    If it was timed: median seconds of a call of it and of its reference, GiB/s where they move
    bytes, and medians of the rounds' ratios (reference over case: 1 is as fast as the bound) and
    differences. If it did not run or has `failed`, the reason.
    """

    group: str
    case: str
    engine: str | None = None
    bytes: int
    bound: str = COPY
    target: float | None = None
    seconds: float | None = None
    reference_seconds: float | None = None
    gib_per_second: float | None = None
    reference_gib_per_second: float | None = None
    ratio: float | None = None
    beyond_seconds: float | None = None
    rounds: int = 0
    reason: str | None = None
    failed: bool = False

    @property
    def title(self) -> str:
        """Group and name of the case."""
        return f"{self.group}: {self.case}"

    @property
    def moves(self) -> bool:
        """Whether a plain copy bounds it."""
        return self.bound == COPY

    def timed(self, rounds: Sequence[tuple[float, float]]) -> Measurement:
        """With medians over rounds of (case, reference), in seconds per call."""
        ours, theirs = (median(times) for times in zip(*rounds))
        return replace(
            self,
            seconds=ours,
            reference_seconds=theirs,
            gib_per_second=self.bytes / ours / GIB if self.bytes else None,
            reference_gib_per_second=self.bytes / theirs / GIB if self.bytes else None,
            ratio=median(reference / mine for mine, reference in rounds),
            beyond_seconds=median(mine - reference for mine, reference in rounds),
            rounds=len(rounds),
        )


class BenchCase(NamedTuple):
    """A case and its row before it is timed. `calls` of it and of its reference are timed together
    (0: as many as the clock's resolution needs).
    """

    row: Measurement
    open: Callable[[BenchContext], Work]
    calls: int = 0


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


QUICK = Sizes(
    entry_bytes=MIB // 32,
    pages=1,
    run_bytes=MIB // 4,
    transfer_bytes=2 * MIB,
    handoff_tokens=(1, 128),
    handoff_chunk=64,
    least_rounds=3,
    seconds=0.0,
    batch_seconds=0.0,
)
HOST_SIZES = Sizes(entry_bytes=22 * MIB, pages=8, run_bytes=32 * MIB, transfer_bytes=32 * MIB)
ACCELERATOR = Sizes(entry_bytes=256 * MIB, pages=128, run_bytes=256 * MIB, transfer_bytes=64 * MIB)


def sizes_for(device: Device, quick: bool) -> Sizes:
    """Larger than the device's caches, or minimal if `quick` or on an emulated device."""
    if quick or device.emulated:
        return QUICK
    return HOST_SIZES if device.memory_kind == "cpu" else ACCELERATOR


def plain_copy(device: Device, nbytes: int) -> Callable[[], object]:
    """The reference: a copy of `nbytes` contiguous bytes."""
    src, dst = (device.allocate(nbytes) for _ in range(2))
    if src.device.type == "cpu":  # memcpy is faster than torch's copy
        source, dest = src.numpy(), dst.numpy()
        return lambda: np.copyto(dest, source)
    return lambda: dst.copy_(src)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random bytes on the host."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def need_equal(what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises CheckFailure where two tensors `[N, ...]` differ in a byte."""
    rows = [tensor.cpu().contiguous().view(torch.uint8).flatten(1) for tensor in (actual, expected)]
    wrong = (rows[0] != rows[1]).any(1)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        fail(f"{what}: {int(wrong.sum())} of {len(wrong)} differ, the first: {first}.")
