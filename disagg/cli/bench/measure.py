"""All cases, and their times: a case and its reference in alternating rounds, since ratios vary
less than times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from disagg.cli.bench.case import COPY, GIB, BenchCase, CannotRun, Sizes, Work, WrongBytes
from disagg.cli.bench.memory import memory_cases
from disagg.cli.bench.peer import BenchContext
from disagg.cli.bench.transfers import handoff_cases, transfer_cases
from kvpool.device import Device, DeviceUnavailable

GROUPS = ("store", "load", "move", "gather", "scatter", "transfer", "handoff")
HANDOFF_ENGINES = ("local",)
"""Whose hand-offs are timed where no engine is named: those of the others take minutes."""
MOST_CALLS = 1000
UNABLE = (CannotRun, DeviceUnavailable, MemoryError, NotImplementedError, torch.OutOfMemoryError)


def all_cases(
    sizes: Sizes, engines: Sequence[str], handoff_engines: Sequence[str] = HANDOFF_ENGINES
) -> list[BenchCase]:
    """Every case, whether it can run here or not; transfers for each of `engines`, hand-offs for
    each of `handoff_engines`.
    """
    return [
        *memory_cases(sizes),
        *transfer_cases(sizes, engines),
        *handoff_cases(sizes, handoff_engines),
    ]


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


def measured(
    case: BenchCase, context: BenchContext, sizes: Sizes, *, timed: bool = True
) -> Measurement:
    """Checks a case and times it, or records why it cannot run or has failed."""
    try:
        with one_thread():
            work = case.open(context)
            work.ours()
            context.device.record().synchronize()
            work.check()
            return _timed(case, work, context.device, sizes) if timed else Measurement(case=case)
    except UNABLE as error:
        return Measurement(case=case, reason=str(error))
    except WrongBytes as error:
        return Measurement(case=case, reason=f"wrong: {error}", failed=True)
    except Exception as error:  # a failure of one case must not end the others
        return Measurement(case=case, reason=f"{type(error).__name__}: {error}", failed=True)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread, as the references use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measurement_of(case: BenchCase, taken: Sequence[tuple[float, float]]) -> Measurement:
    """Medians over rounds of (case, reference), in seconds per call."""
    ours, theirs = (median(times) for times in zip(*taken))
    return Measurement(
        case=case,
        seconds=ours,
        reference_seconds=theirs,
        ratio=median(reference / mine for mine, reference in taken),
        beyond=median(mine - reference for mine, reference in taken),
        rounds=len(taken),
    )


def _timed(case: BenchCase, work: Work, device: Device, sizes: Sizes) -> Measurement:
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
    return measurement_of(case, rounds)


def _batch(
    call: Callable[[], object], calls: int, device: Device, clock: Callable[[], float]
) -> float:
    """Seconds per call of `calls` in a row, until the device has finished."""
    began = clock()
    for _ in range(calls):
        call()
    device.record().synchronize()
    return (clock() - began) / calls
