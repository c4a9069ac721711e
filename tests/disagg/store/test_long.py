"""A store that is always full: what it holds stays bounded, every byte of a hit is right, and the
counts add up. The checks are tested too.
"""

from __future__ import annotations

from queue import SimpleQueue

import numpy as np
import pytest

from kvpool import MHAPool
from tests.disagg.store.engines import CHUNK, HEADS, MODEL, AskedStore
from tests.disagg.store.growth import entries
from tests.disagg.store.long_run import LIMITS, Plan, Report, child, grown
from tests.disagg.store.stores import fresh
from tests.disagg.store.traffic import Planes, Traffic, state_of
from tests.processes import Child

MIB = 1 << 20
SHORT = Plan(
    requests=3_000,
    keep=MIB // 2,
    pause=0.1,
    meanwhile=400,
    names=16,
    samples=48,
    memory=32 * MIB,
)
LONG = Plan(requests=1_000_000, keep=8 * MIB, pause=10.0, memory=8 * MIB)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(SHORT, id="short"),
        pytest.param(LONG, id="long", marks=[pytest.mark.long, pytest.mark.timeout(5400)]),
    ],
)
def test_a_full_store_stays_bounded_and_right(plan, tmp_path):
    with Child(child, tmp_path, plan) as run:
        while not isinstance(report := run.pipe.recv(), Report):
            print(report)
        assert run.close() == 0
    print(report)
    assert report.problems == []
    counts, requests = report.outcomes, plan.requests
    assert report.served["requests"] == requests
    assert report.served["reused requests"] > 0.7 * requests
    assert counts["written"] > 2 * report.objects, "it was not full for most of the time"
    assert report.collections > 2 and report.removed
    assert report.least_bytes > 0.9 * plan.keep
    # what the collection took while it was read is computed; nothing else goes wrong
    assert counts["read"] > 0.99 * (counts["read"] + counts["vanished"])
    expected = {"hit", "miss", "read", "aborted", "vanished", "written", "already there"}
    assert {name for name, count in counts.items() if count} <= expected
    assert set(report.reasons) <= {"vanished", "miss"}


class Keeping:
    """Keeps what it is given."""

    __slots__ = ("_kept", "_queue")

    def __init__(self):
        self._kept, self._queue = {}, SimpleQueue()

    def take(self, number):
        self._kept[number] = [b"x"] * 2
        self._queue.put(number)


def test_what_a_container_keeps_is_found():
    keeping, report = Keeping(), Report()
    for number in range(200):
        keeping.take(number)
        if number % 10 == 0:
            flat = dict.fromkeys(("memory", *LIMITS), 9)
            report.note({**flat, **entries("engine", [keeping])})
    assert {sentence.partition(" grew ")[0] for sentence in grown(report.samples, 0)} == {
        "engine[]._kept",
        "engine[]._kept[]",
        "engine[]._queue",
    }
    last = report.samples[-1]
    assert last["engine[]._kept[]"] == 2 * last["engine[]._queue"] == 382


def test_what_a_store_does_not_count_is_found():
    pool = MHAPool(**MODEL, num_pages=8, page_size=16)
    with AskedStore(fresh(), pool.layout, chunk_tokens=CHUNK) as store:
        assert store.lookup(range(CHUNK)) == 0
        assert store.miscounts() == []
        store.asked += 1
        assert store.miscounts() == ["hit, miss, away: 1, and 2 were asked for"]


def test_state_says_of_which_token_it_is():
    pool = MHAPool(**MODEL, num_pages=8, page_size=16)
    planes, places = Planes(pool, range(HEADS)), np.arange(20, 60)
    tokens = Traffic(7).turn().tokens[:40]
    state = state_of(3, tokens)
    planes.put(places, state)
    rows = 2 * HEADS * len(places)
    assert planes.wrong(places, state) == 0
    assert planes.wrong(places[::-1], state) == rows
    assert planes.wrong(places, state_of(4, tokens)) == rows
    other = tokens.copy()
    other[10] += 1
    assert planes.wrong(places, state_of(3, other)) == 2 * HEADS * 30


def test_traffic_is_the_same_again_and_grows():
    turns = [[traffic.turn() for _ in range(2_000)] for traffic in (Traffic(5), Traffic(5))]
    for first, second in zip(*turns):
        assert first.tenant == second.tenant and np.array_equal(first.tokens, second.tokens)
    prefixes = {(turn.tenant, turn.tokens.tobytes()) for turn in turns[0]}
    grown_ones = sum(
        any((turn.tenant, turn.prompt[:n].tobytes()) in prefixes for n in range(len(turn.prompt)))
        for turn in turns[0]
    )
    assert grown_ones > 1_000
