"""Times a case and its reference in turn, round by round: machines are noisy, ratios less so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch

from disagg.cli.bench.case import COPY, BenchCase, BenchContext, CannotRun, Sizes, Work, WrongBytes
from kvpool.device import Device, DeviceUnavailable

GIB = 1 << 30
MOST_CALLS = 1000
UNABLE = (CannotRun, DeviceUnavailable, MemoryError, NotImplementedError, torch.OutOfMemoryError)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What came of a case: median times in seconds of a call of it and of its reference, and the
    median of the rounds' ratios (the reference's time over the case's: 1 is as fast as what bounds
    it), which a machine that changes its speed disturbs less; or the reason why it cannot run, or
    how it `failed`.
    """

    case: BenchCase
    seconds: float | None = None
    reference_seconds: float | None = None
    ratio: float | None = None
    rounds: int = 0
    reason: str | None = None
    failed: bool = False

    @property
    def moves(self) -> bool:
        """Whether a plain copy bounds it."""
        return self.case.bound == COPY

    @property
    def rate(self) -> float | None:
        """GiB/s; None where nothing is moved."""
        return self._rate(self.seconds)

    @property
    def reference_rate(self) -> float | None:
        """GiB/s of the reference, where that moves the same bytes."""
        return self._rate(self.reference_seconds)

    def _rate(self, seconds: float | None) -> float | None:
        return self.case.nbytes / seconds / GIB if seconds and self.case.nbytes else None


def measured(case: BenchCase, context: BenchContext, sizes: Sizes) -> Measurement:
    """Times a case; why it cannot run here is part of the row, and so is what went wrong."""
    try:
        with one_thread():
            work = opened(case, context)
            return _timed(case, work, context.device, sizes)
    except UNABLE as error:
        return Measurement(case, reason=str(error))
    except WrongBytes as error:
        return Measurement(case, reason=f"wrong: {error}", failed=True)
    except Exception as error:  # whatever a vendor's device does, the others are timed too
        return Measurement(case, reason=f"{type(error).__name__}: {error}", failed=True)


def opened(case: BenchCase, context: BenchContext) -> Work:
    """A case with its memory, run once and checked."""
    work = case.open(context)
    work.ours()
    context.device.record().synchronize()
    work.check()
    return work


@contextmanager
def one_thread() -> Iterator[None]:
    """As many as all references use; a second one waits for a core on small machines."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def batch(call: Callable[[], object], calls: int, device: Device) -> float:
    """Seconds of a call, of `calls` in a row, until the device has done them all."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    device.record().synchronize()
    return (time.perf_counter() - began) / calls


class Effort(NamedTuple):
    """Calls of ours and of the reference that are timed together, and how many times."""

    calls: int
    reference_calls: int
    rounds: int


def effort(case: BenchCase, work: Work, device: Device, sizes: Sizes) -> Effort:
    """As much as the sizes ask for, by what one call of each takes. The reference takes a tenth of
    a slow case's time at least, to see as much of the machine's noise.
    """
    calls, spent = [], 0.0
    for call in (work.ours, work.reference):
        batch(call, 1, device)
        taken, wanted = batch(call, 1, device), max(sizes.batch_seconds, spent / 10)
        calls.append(case.calls or min(max(1, round(wanted / taken)), MOST_CALLS))
        spent += calls[-1] * taken
    rounds = min(max(sizes.least_rounds, round(sizes.seconds / spent)), sizes.rounds)
    return Effort(calls[0], calls[1], rounds)


def row_of(case: BenchCase, taken: Sequence[tuple[float, float]]) -> Measurement:
    """Medians of rounds of (ours, reference), in seconds of a call."""
    ours, theirs = (median(times) for times in zip(*taken))
    ratio = median(reference / mine for mine, reference in taken)
    return Measurement(case, ours, theirs, ratio, len(taken))


def _timed(case: BenchCase, work: Work, device: Device, sizes: Sizes) -> Measurement:
    made = effort(case, work, device, sizes)
    taken = []
    for _ in range(made.rounds):
        # the reference first: it leaves the caches full of its own
        theirs = batch(work.reference, made.reference_calls, device)
        taken.append((batch(work.ours, made.calls, device), theirs))
    return row_of(case, taken)
