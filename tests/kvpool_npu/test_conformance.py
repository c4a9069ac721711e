"""The conformance kit on the NPU's code, over reference operators."""

from __future__ import annotations

import pytest

from kvpool.testing import check_device, check_pool
from tests.kvpool_npu.pools import NPU


def test_the_device_conforms():
    assert check_device("npu-reference", ["mha bf16", "mla fp8", "hybrid nsa bf16"]) == []


@pytest.mark.parametrize("name", NPU)
@pytest.mark.parametrize("device", ["cpu", "npu-reference"])
def test_the_pools_conform(name, device):
    assert check_pool(NPU[name], device) == []
