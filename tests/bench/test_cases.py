"""The cases of `kvpool bench` and of host work: each is checked, and timed if benchmarks are on."""

from __future__ import annotations

import pytest

from disagg.cli.bench.measure import (
    UNABLE,
    Measurement,
    batch,
    effort,
    measurement_of,
    one_thread,
    opened,
)
from tests.bench.conftest import ROWS, sizes_of


def test_case(case, context, benchmark, pytestconfig):
    with one_thread():
        try:
            work = opened(case, context)
        except UNABLE as reason:
            ROWS.append(Measurement(case=case, reason=str(reason)))
            pytest.skip(str(reason))
        if benchmark.disabled:
            benchmark.pedantic(work.ours)
            return
        made, mine, theirs = effort(case, work, context.device, sizes_of(pytestconfig)), [], []

        def before():
            theirs.append(batch(work.reference, made.reference_calls, context.device, work.clock))

        def ours():
            mine.append(batch(work.ours, made.calls, context.device, work.clock))

        benchmark.pedantic(ours, setup=before, rounds=made.rounds)
    row = measurement_of(case, list(zip(mine, theirs)))
    benchmark.extra_info.update(bytes=case.nbytes, calls=made.calls, ratio=row.ratio)
    ROWS.append(row)
