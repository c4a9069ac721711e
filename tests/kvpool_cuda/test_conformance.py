"""The conformance kit on the kernels."""

from __future__ import annotations

import pytest

from kvpool.testing import POOLS, check_device, check_pool
from tests.kvpool_cuda.devices import NAME
from tests.pools import CONFORMING


def test_the_kernels_conform():
    assert check_device(NAME, []) == []


@pytest.mark.parametrize("pool", CONFORMING)
def test_every_pool_conforms_on_the_kernels(pool):
    assert check_pool(POOLS[pool], NAME, others=POOLS[pool].others) == []
