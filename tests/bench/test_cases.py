"""The cases of host work: each is checked, and timed if benchmarks are on."""

from __future__ import annotations

from contextlib import closing

from disagg.cli.bench.case import HOST_SIZES
from disagg.cli.bench.measure import measured, opened
from disagg.cli.bench.peer import BenchContext
from kvpool.device import get_device
from tests.bench.conftest import ROWS


def test_case(case, timed):
    with closing(BenchContext(get_device("cpu"))) as context:
        if not timed:
            opened(case, context)
            return
        ROWS.append(measured(case, context, HOST_SIZES))
    assert not ROWS[-1].reason
