"""The conformance kit on the NPU's code, over reference operators."""

from __future__ import annotations

import pytest

from kvpool.testing import POOLS, check_device, check_pool
from tests.kvpool_npu.pools import NPU
from tests.pools import CONFORMING

DEVICE = "npu-reference"


def test_the_device_conforms():
    assert check_device(DEVICE, []) == []


@pytest.mark.parametrize("pool", CONFORMING)
def test_every_pool_conforms_on_the_device(pool):
    assert check_pool(POOLS[pool], DEVICE, others=POOLS[pool].others) == []


@pytest.mark.parametrize("name", NPU)
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_the_pools_conform(name, device):
    assert check_pool(NPU[name], device) == []
