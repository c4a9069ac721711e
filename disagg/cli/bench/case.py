"""What a benchmark case is: what is timed, beside what, and the check that it did what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvpool.device import Device

if TYPE_CHECKING:
    from disagg.cli.bench.peer import PeerReader

COPY = "copy"
"""The bound of what moves bytes: one copy between two stretches of the device's memory."""


class CannotRun(Exception):
    """A case that this device or engine cannot run, and why."""


class WrongBytes(Exception):
    """What was to be timed did not do what it says."""


class Work(NamedTuple):
    """A case with its memory. `check`, called after the first call of `ours`, raises WrongBytes
    unless it did its work.
    """

    ours: Callable[[], object]
    reference: Callable[[], object]
    check: Callable[[], None]


class BenchContext(NamedTuple):
    """Where cases run: memory of a device, and what reads a peer's memory of the same kind."""

    device: Device
    reader: Callable[[str], PeerReader]
    """The reader of an engine by name; the one before it is given up. Raises CannotRun."""


@dataclass(frozen=True, slots=True)
class BenchCase:
    """`nbytes` is what a copy moves that reads and writes as much as the case does in all; 0 where
    nothing is moved.

    `bound` names the reference: `COPY`, or what else does the same. `calls` of both are timed
    together (0: as many as take long enough to be timed).
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
    """How much each case moves, and how long it is timed: some `seconds`, in `least_rounds` to
    `rounds`. As many calls are timed together as take `batch_seconds`.
    """

    entry_bytes: int
    """Of entries written and read."""
    pages: int
    """Of 64 tokens in 61 layers, moved."""
    run_bytes: int
    """Gathered and scattered."""
    transfer_bytes: int
    bound_pages: int
    """Of 64 tokens in 61 layers, bound."""
    least_rounds: int = 5
    rounds: int = 20
    seconds: float = 1.5
    batch_seconds: float = 0.005


MIB = 1 << 20
QUICK = Sizes(MIB // 4, 2, MIB, 2 * MIB, 64, least_rounds=3, seconds=0.0, batch_seconds=0.0)
HOST = Sizes(32 * MIB, 8, 32 * MIB, 32 * MIB, 2048)
ACCELERATOR = Sizes(256 * MIB, 128, 256 * MIB, 64 * MIB, 2048)


def sizes_for(device: Device, quick: bool) -> Sizes:
    """Larger than the caches of the device, or (`quick`) as small as can be, which is all that
    Triton's interpreter can do in reasonable time.
    """
    if quick or device.name.partition(":")[0] == "interpret":
        return QUICK
    return HOST if device.memory_kind == "cpu" else ACCELERATOR


def plain_copy(device: Device, nbytes: int) -> Callable[[], object]:
    """The reference: a copy of `nbytes` contiguous bytes."""
    src, dst = (device.allocate(nbytes) for _ in range(2))
    if src.device.type == "cpu":  # memcpy, which is faster than torch's copy
        there, here = src.numpy(), dst.numpy()
        return lambda: np.copyto(here, there)
    return lambda: dst.copy_(src)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random bytes on the host."""
    made = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return torch.from_numpy(made)


def need_equal(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises WrongBytes where two uint8 tensors `[N, byte]` differ."""
    wrong = (found.cpu() != expected.cpu()).flatten(1).any(1)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise WrongBytes(f"{what}: {int(wrong.sum())} of {len(wrong)} differ, the first: {first}.")
