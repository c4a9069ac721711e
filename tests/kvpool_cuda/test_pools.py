"""Every pool in every packing gives the same bytes with the kernels as on the CPU device."""

from __future__ import annotations

import pytest

from tests.kvpool_cuda.devices import NAME
from tests.kvpool_npu.written import same_bytes, write_everything
from tests.pools import PACKED

BUILDS = {
    **PACKED,
    **{
        f"{name} by page": PACKED[name].but(placement="page")
        for name in ("mha hnd bf16", "nsa fp8", "hybrid bf16", "dsv4 fp8")
    },
}


@pytest.mark.parametrize("name", BUILDS)
def test_writes_reads_and_copies_equal_those_of_a_cpu_pool(name):
    same_bytes(BUILDS[name](device=NAME), BUILDS[name](device="cpu"), write_everything)
