"""`kvpool conform` with real servers of SGLang, and of both engines: bytes are compared between
their own tensors.
"""

from __future__ import annotations

import os
import sys

import pytest

from disagg.testing.judge import judge_run
from tests.engines import conforming
from tests.engines.conforming import pair, side

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    pythons = {"vllm": os.environ["KVPOOL_VLLM_PYTHON"], "sglang": sys.executable}
    with conforming.arena(tmp_path_factory.mktemp("conform"), **pythons) as arena:
        yield arena


VLLM, SGLANG = side(32), side(16, "sglang")
ROWS = {
    "vllm to sglang": pair(VLLM, SGLANG),
    "sglang to vllm": pair(SGLANG, VLLM),
    "sglang's own": pair(SGLANG, SGLANG, connector="sglang-nixl"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_pair_serves_by_bytes(name, arena):
    shown = arena.observe(ROWS[name])
    assert shown.differences == "" and not shown.errors, shown
    assert [len(tokens) for tokens in shown.tokens] == [16, 16]
    assert judge_run(shown).result == "serves"
