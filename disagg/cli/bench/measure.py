"""All cases, and their times: a case and its reference in alternating rounds, since ratios vary
less than times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from disagg.cli.bench.case import BenchCase, Measurement, Sizes, Work
from disagg.cli.bench.memory import memory_cases
from disagg.cli.bench.peer import BenchContext
from disagg.cli.bench.transfers import handoff_cases, transfer_cases
from kvpool.device import Device, DeviceUnavailable
from kvpool.testing.case import CheckFailure, Inapplicable

GROUPS = ("store", "load", "move", "gather", "scatter", "transfer", "handoff")
HANDOFF_ENGINES = ("local",)
"""Whose hand-offs are timed where no engine is named: those of the others take minutes."""
MOST_CALLS = 1000
UNABLE = (Inapplicable, DeviceUnavailable, MemoryError, NotImplementedError, torch.OutOfMemoryError)


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
