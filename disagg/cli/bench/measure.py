"""Times a case and its reference in alternating rounds: ratios vary less than times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch

from disagg.cli.bench.case import COPY, BenchCase, BenchContext, Sizes
from disagg.cli.bench.work import CannotRun, Work, WrongBytes
from kvpool.device import Device, DeviceUnavailable

GIB = 1 << 30
MOST_CALLS = 1000
UNABLE = (CannotRun, DeviceUnavailable, MemoryError, NotImplementedError, torch.OutOfMemoryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Median seconds of a call of a case and of its reference, and medians of the rounds' ratios
    (reference over case: 1 is as fast as the bound) and differences (`beyond` the reference, in
    seconds); or the reason why it did not run, or `failed`.
    """

    case: BenchCase
    seconds: float | None = None
    reference_seconds: float | None = None
    ratio: float | None = None
    beyond: float | None = None
    rounds: int = 0
    reason: str | None = None
    failed: bool = False

    @property
    def moves(self) -> bool:
        """Whether a plain copy bounds it."""
        return self.case.bound == COPY

    @property
    def rate(self) -> float | None:
        """GiB/s; None if nothing is moved."""
        return self._rate(self.seconds)

    @property
    def reference_rate(self) -> float | None:
        """GiB/s of the reference, if it moves the same bytes."""
        return self._rate(self.reference_seconds)

    def _rate(self, seconds: float | None) -> float | None:
        return self.case.nbytes / seconds / GIB if seconds and self.case.nbytes else None


def measured(case: BenchCase, context: BenchContext, sizes: Sizes) -> Measurement:
    """Times a case, or records why it cannot run or has failed."""
    try:
        with one_thread():
            work = opened(case, context)
            return _timed(case, work, context.device, sizes)
    except UNABLE as error:
        return Measurement(case=case, reason=str(error))
    except WrongBytes as error:
        return Measurement(case=case, reason=f"wrong: {error}", failed=True)
    except Exception as error:  # a failure of one case must not end the others
        return Measurement(case=case, reason=f"{type(error).__name__}: {error}", failed=True)


def opened(case: BenchCase, context: BenchContext) -> Work:
    """A case with its memory, run once and checked."""
    work = case.open(context)
    work.ours()
    context.device.record().synchronize()
    work.check()
    return work


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread, as the references use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def batch(
    call: Callable[[], object],
    calls: int,
    device: Device,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds per call of `calls` in a row, until the device has finished."""
    began = clock()
    for _ in range(calls):
        call()
    device.record().synchronize()
    return (clock() - began) / calls


class Effort(NamedTuple):
    """Calls that are timed together, of the case and of its reference, and rounds."""

    calls: int
    reference_calls: int
    rounds: int


def effort(case: BenchCase, work: Work, device: Device, sizes: Sizes) -> Effort:
    """Calls and rounds for these sizes, from the time of one call. The reference runs at least a
    tenth as long as the case, to see the same noise.
    """
    calls, spent = [], 0.0
    for call in (work.ours, work.reference):
        batch(call, 1, device, work.clock)
        taken, wanted = batch(call, 1, device, work.clock), max(sizes.batch_seconds, spent / 10)
        calls.append(case.calls or min(max(1, round(wanted / taken)), MOST_CALLS))
        spent += calls[-1] * taken
    rounds = min(max(sizes.least_rounds, round(sizes.seconds / spent)), sizes.rounds)
    return Effort(calls[0], calls[1], rounds)


def measurement_of(case: BenchCase, taken: Sequence[tuple[float, float]]) -> Measurement:
    """Medians over rounds of (case, reference), in seconds per call."""
    ours, theirs = (median(times) for times in zip(*taken))
    ratio = median(reference / mine for mine, reference in taken)
    beyond = median(mine - reference for mine, reference in taken)
    return Measurement(
        case=case,
        seconds=ours,
        reference_seconds=theirs,
        ratio=ratio,
        beyond=beyond,
        rounds=len(taken),
    )


def _timed(case: BenchCase, work: Work, device: Device, sizes: Sizes) -> Measurement:
    calls, reference_calls, rounds = effort(case, work, device, sizes)
    taken = []
    for _ in range(rounds):
        # the reference first: it evicts the case's data from the caches
        theirs = batch(work.reference, reference_calls, device, work.clock)
        taken.append((batch(work.ours, calls, device, work.clock), theirs))
    return measurement_of(case, taken)
