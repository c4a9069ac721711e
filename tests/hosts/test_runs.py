"""Seeded runs between hosts: `pytest tests/hosts -k seed-17`, with `--long` from 4 on, or `python
-m tests.hosts --seed 17 --runs 1`.
"""

from __future__ import annotations

import pytest

from tests.hosts.runs import Runs

SHORT, LONG = (0, 1, 10, 11), 300


@pytest.fixture(scope="module")
def runs():
    these = Runs()
    yield these
    these.close()


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, id=f"seed-{seed}", marks=[] if seed in SHORT else pytest.mark.long)
        for seed in range(LONG)
    ],
)
def test_a_link_that_fails_affects_only_its_own_rooms(runs, seed):
    runs.run(seed)
