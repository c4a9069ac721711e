"""Findings are reported, and seeds are valid: a search that cannot fail shows nothing."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from disagg.plan.bind import CopyBatch
from disagg.protocol import codec
from tests.fuzz import build, guard, planning, samples
from tests.fuzz.guard import Finding, Tally, guarded
from tests.fuzz.targets import TARGETS

KINDS = build.message_types()
DOCUMENTS = [name for name, target in TARGETS.items() if target.mutate]


@pytest.mark.parametrize("name", KINDS)
def test_every_message_is_fuzzed_from_valid_ones(name):
    for seed in range(20):
        data = build.packed(build.message(KINDS[name], build.Seeded(seed)))
        assert isinstance(codec.decode(data), KINDS[name])
        assert TARGETS["wire"].run(data) == name


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_target_has_seeds_that_are_accepted(name):
    accepted = {"read", "connected", "bound", "digested", *KINDS}
    assert any(TARGETS[name].run(data) in accepted for data in TARGETS[name].seeds())


def test_the_guard_reports_an_allocation_out_of_proportion_only():
    assert guarded(lambda: bytes(guard.BASE_BYTES // 2) and "read", 0) == "read"
    assert guarded(lambda: bytes(guard.BASE_BYTES * 2) and "read", 1 << 20) == "read"
    with pytest.raises(Finding, match="32 MiB for an input of 100 bytes"):
        guarded(lambda: bytes(guard.BASE_BYTES * 2) and "read", 100)


def test_the_guard_counts_processor_time_and_not_waiting(monkeypatch):
    def work():
        began = time.thread_time()
        while time.thread_time() < began + 0.05:
            pass
        return "read"

    tally = Tally()
    monkeypatch.setattr(guard, "BASE_SECONDS", 0.04)
    with pytest.raises(Finding, match="s for an input of 0 bytes"):
        guarded(work, 0, tally)
    assert tally.seconds > 0.04
    assert guarded(lambda: time.sleep(0.05) or "waited", 0) == "waited"


@pytest.mark.parametrize("by", [1 << 30, -(1 << 30)])
@pytest.mark.parametrize(("column", "whose"), [(0, "source"), (1, "destination"), (2, "source")])
def test_a_run_outside_the_requests_items_is_reported(column, by, whose):
    case = samples.CASES[0]
    (peer,) = case.peers[0]
    ends = samples.address(peer), samples.address(case.own)
    batch = planning.plan([peer], case.own).bind(0, *ends)
    planning.check(batch, peer, ends[0], case.own, ends[1])
    columns = [np.array(values) for values in batch]
    columns[column][0] += by
    with pytest.raises(Finding, match=f"bytes of the {whose} that nobody described"):
        planning.check(CopyBatch(*columns), peer, ends[0], case.own, ends[1])
    twice = CopyBatch(*(np.append(values, values[:1]) for values in batch))
    with pytest.raises(Finding, match="written twice"):
        planning.check(twice, peer, ends[0], case.own, ends[1])


def test_edits_are_bounded_and_repeatable():
    data = samples.LAYOUTS[0].to_msgpack()
    for name in DOCUMENTS:
        edited = [TARGETS[name].mutate(data, random.Random(seed), 3000) for seed in range(20)]
        assert edited == [
            TARGETS[name].mutate(data, random.Random(seed), 3000) for seed in range(20)
        ]
        assert max(map(len, edited)) <= 3000
