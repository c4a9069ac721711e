"""`kvpool bench`: every case is checked and timed, and compared with its target on that GPU."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from disagg.cli.accept.report import FAILED, NOT_HERE, PASSED, Row, State
from disagg.cli.accept.scope import NotHere, Scope, Wrong
from disagg.cli.accept.targets import TARGET_GPU, target_of
from disagg.cli.bench.case import COPY, MIB, QUICK, BenchCase, BenchContext, sizes_for
from disagg.cli.bench.cases import HANDOFF_ENGINES, all_cases, context_on
from disagg.cli.bench.machine import machine
from disagg.cli.bench.measure import UNABLE, Measurement, measured, one_thread, opened
from disagg.cli.bench.report import as_dict, time_of
from disagg.cli.bench.work import WrongBytes
from disagg.engines.base import engine_names

OTHER_PROCESSES = ("transfer", "handoff")
"""Groups that `quick` leaves to the sections that compare their bytes."""
TINY = replace(
    QUICK,
    entry_bytes=MIB // 32,
    pages=1,
    run_bytes=MIB // 4,
    handoff_tokens=(1, 128),
    handoff_chunk=64,
)


def bench_rows(scope: Scope) -> list[Row]:
    """A row for each case; if `small`, each is checked and none is timed."""
    sizes = TINY if scope.small else sizes_for(scope.device, False)
    cases = all_cases(sizes, engine_names(), HANDOFF_ENGINES)
    if scope.quick:
        cases = [case for case in cases if case.group not in OTHER_PROCESSES]
    gpu, rows = machine(scope.device)["name"], []
    with context_on(scope.device, sizes) as context:
        for number, case in enumerate(cases, 1):
            if scope.small:
                rows.append(scope.tried(_name(case), partial(_checked, case, context)))
            else:
                scope.tell(f"{number} of {len(cases)}: {_name(case)}")
                began = time.monotonic()
                found = measured(case, context, sizes)
                rows.append(bench_row(found, gpu, time.monotonic() - began))
    return rows


def _checked(case: BenchCase, context: BenchContext) -> str:
    try:
        with one_thread():
            opened(case, context)
    except UNABLE as reason:
        raise NotHere(str(reason)) from None
    except WrongBytes as error:
        raise Wrong(f"wrong: {error}") from None
    return "right, and not timed"


def _name(case: BenchCase) -> str:
    return f"{case.group}: {case.name}"


def bench_row(found: Measurement, gpu: str, seconds: float) -> Row:
    """The row of a measurement that took so many seconds, on a device of that name."""
    case, target = found.case, target_of(found.case)
    name, figures = _name(case), {**as_dict(found), "target": target}
    if found.reason is not None or found.seconds is None or found.ratio is None:
        state = FAILED if found.failed else NOT_HERE
        return Row(name, state, " ".join((found.reason or "not timed").split()), seconds, figures)
    state, verdict = _verdict(found.ratio, target, gpu)
    rate = f", {found.rate:.2f} GiB/s" if found.rate else ""
    bound = "a plain copy" if case.bound == COPY else case.bound
    times = f"{found.ratio:,.0f}" if found.ratio >= 10 else f"{found.ratio:.2g}"
    sentence = f"{time_of(found.seconds)}{rate}, {times} times as fast as {bound}{verdict}"
    return Row(name, state, sentence, seconds, figures)


def _verdict(ratio: float, target: float | None, gpu: str) -> tuple[State, str]:
    """Only the GPU that a target is for can miss it."""
    if target is None or TARGET_GPU not in gpu:
        return PASSED, ""
    met = ratio >= target
    return (PASSED if met else FAILED), f"; target {target:.2f}: {'met' if met else 'not met'}"
