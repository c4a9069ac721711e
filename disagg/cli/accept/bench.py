"""`kvpool bench`: every case is checked and timed, and compared with its target on that GPU."""

from __future__ import annotations

import time
from functools import partial

from disagg.cli.accept.report import FAILED, NOT_HERE, PASSED, Row, State
from disagg.cli.accept.scope import Scope
from disagg.cli.bench.case import TINY, BenchCase, BenchContext, sizes_for
from disagg.cli.bench.cases import HANDOFF_ENGINES, all_cases, context_on
from disagg.cli.bench.machine import machine
from disagg.cli.bench.measure import UNABLE, Measurement, measured, one_thread, opened
from disagg.cli.bench.report import as_dict, sentence_of
from disagg.cli.bench.targets import TARGET_GPU, target_of
from disagg.cli.bench.work import WrongBytes
from disagg.engines.base import engine_names
from kvpool.testing.case import CheckFailure, Inapplicable

OTHER_PROCESSES = ("transfer", "handoff")
"""Groups that `quick` leaves to the sections that compare their bytes."""


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
                rows.append(scope.tried(case.title, partial(_checked, case, context)))
            else:
                scope.tell(f"{number} of {len(cases)}: {case.title}")
                began = time.monotonic()
                measurement = measured(case, context, sizes)
                rows.append(bench_row(measurement, gpu, time.monotonic() - began))
    return rows


def _checked(case: BenchCase, context: BenchContext) -> str:
    try:
        with one_thread():
            opened(case, context)
    except UNABLE as reason:
        raise Inapplicable(str(reason)) from None
    except WrongBytes as error:
        raise CheckFailure(f"wrong: {error}") from None
    return "right, and not timed"


def bench_row(row: Measurement, gpu: str, seconds: float) -> Row:
    """The row of a measurement that took so many seconds, on a device of that name. Only the GPU
    that a target is for can miss it.
    """
    case, target = row.case, target_of(row.case)
    figures = {**as_dict(row), "target": target}
    state: State = FAILED if row.failed else NOT_HERE
    sentence = " ".join((row.reason or "not timed").split())
    if row.ratio is not None:
        state, sentence = PASSED, sentence_of(row)
        if target is not None and TARGET_GPU in gpu:
            state = PASSED if row.ratio >= target else FAILED
            sentence += f"; target {target:.2f}: {'met' if state == PASSED else 'not met'}"
    return Row(case.title, state, sentence, seconds, figures)
