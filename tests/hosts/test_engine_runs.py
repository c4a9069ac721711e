"""Seeded runs of the engine that is installed; `python -m tests.hosts --kind` makes more."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.hosts.engine_runs import Runs

SEEDS = 3, 6, 23, 26
"""Two over each transfer engine."""


@pytest.fixture(scope="module")
def runs():
    these = Runs("vllm" if find_spec("vllm") else "sglang")
    yield these
    these.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_link_that_fails_costs_requests_but_no_wrong_token_and_no_page(runs, seed):
    runs.run(seed)
