"""Benchmark cases, timed in turn with their references, since ratios vary less than times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvpool.device import Device, DeviceUnavailable
from kvpool.testing.case import CheckFailure, Inapplicable, fail

if TYPE_CHECKING:
    from disagg.cli.bench.peer import BenchContext

COPY = "copy"  # the bound of cases that move bytes: one contiguous copy in the device's memory
GIB, MIB = 1 << 30, 1 << 20
MOST_CALLS = 1000
UNABLE = (Inapplicable, DeviceUnavailable, MemoryError, NotImplementedError, torch.OutOfMemoryError)
"""What says that a case cannot run here."""


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
    differences; half of the ratios are between `ratio_quartiles`. If it did not run or has
    `failed`, the reason.
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
    ratio_quartiles: tuple[float, float] | None = None
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
        ratios = [reference / mine for mine, reference in rounds]
        low, high = np.quantile(ratios, (0.25, 0.75)).tolist()
        return replace(
            self,
            seconds=ours,
            reference_seconds=theirs,
            gib_per_second=self.bytes / ours / GIB if self.bytes else None,
            reference_gib_per_second=self.bytes / theirs / GIB if self.bytes else None,
            ratio=median(ratios),
            ratio_quartiles=(low, high),
            beyond_seconds=median(mine - reference for mine, reference in rounds),
            rounds=len(rounds),
        )


class BenchCase(NamedTuple):
    """A case and its row; `calls` that are timed together (0: as many as the clock needs)."""

    row: Measurement
    open: Callable[[BenchContext], Work]
    calls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much each case moves, and how long it is timed; calls of `batch_seconds` are one."""

    entry_bytes: int  # of the entries that are written and read
    pages: int  # to move, of 64 tokens in 61 layers
    run_bytes: int  # to gather and scatter
    transfer_bytes: int
    handoff_tokens: tuple[int, ...] = (1, 128, 8192)
    handoff_chunk: int = 2048  # tokens of the chunks of longer requests
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


def measured(
    case: BenchCase, context: BenchContext, sizes: Sizes, *, timed: bool = True
) -> Measurement:
    """Checks a case and times it, or records why it cannot run or has failed."""
    row = case.row
    try:
        with one_thread():
            work = case.open(context)
            work.ours()
            context.device.record().synchronize()
            work.check()
            return row.timed(_rounds(case, work, context.device, sizes)) if timed else row
    except UNABLE as error:
        return replace(row, reason=str(error))
    except CheckFailure as error:
        return replace(row, reason=f"wrong: {error}", failed=True)
    except Exception as error:  # a failure of one case must not end the others
        return replace(row, reason=f"{type(error).__name__}: {error}", failed=True)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread, as the references use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rounds(case: BenchCase, work: Work, device: Device, sizes: Sizes) -> list[tuple[float, float]]:
    """Calls and rounds follow from the time of one call. The reference runs at least a tenth as
    long as the case, to see the same noise.
    """
    calls, spent = [], 0.0
    for call in (work.ours, work.reference):
        _batch(call, 1, device, work.clock)
        taken, wanted = _batch(call, 1, device, work.clock), max(sizes.batch_seconds, spent / 10)
        calls.append(case.calls or min(max(1, round(wanted / taken)), MOST_CALLS))
        spent += calls[-1] * taken
    rounds = []
    for _ in range(min(max(sizes.least_rounds, round(sizes.seconds / spent)), sizes.rounds)):
        # the reference first: it evicts the case's data from the caches
        theirs = _batch(work.reference, calls[1], device, work.clock)
        rounds.append((_batch(work.ours, calls[0], device, work.clock), theirs))
    return rounds


def _batch(
    call: Callable[[], object], calls: int, device: Device, clock: Callable[[], float]
) -> float:
    """Seconds per call of `calls` in a row, until the device has finished."""
    began = clock()
    for _ in range(calls):
        call()
    device.record().synchronize()
    return (clock() - began) / calls


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
