"""Real processes are killed, stopped, restarted and told to abort during transfers.

One seeded run is repeated by `pytest tests/faults -k seed-17` (with `--long` from 30 on) or
`python -m tests.faults --seed 17 --runs 1`.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest

from disagg.protocol.status import KVPoll
from tests import oracle
from tests.disagg.engines.peers import ENGINES
from tests.faults.orders import SHAPES, Course
from tests.faults.stock import MOST_TOKENS, Stock
from tests.faults.world import PATIENCE, Violation, World
from tests.faults.worlds import Worlds

SHORT, LONG = 30, 500
WHOLE = Course(tokens=MOST_TOKENS - 1, salt=7, stops=(100,))
BESIDE = Course(tokens=100, salt=8)


@pytest.fixture(scope="module")
def worlds():
    with Worlds() as created:
        yield created
        created.close()


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, id=f"seed-{seed}", marks=[] if seed < SHORT else pytest.mark.long)
        for seed in range(LONG)
    ],
)
def test_a_fault_affects_only_its_own_rooms(worlds, seed):
    worlds.run(seed)


@contextmanager
def world(engine, **options):
    """Two prefills and two decodes with equal pools. Limits that are not given are so long that
    nothing runs into them.
    """
    limits = {"peer_timeout": PATIENCE, "lease": PATIENCE, "read_timeout": PATIENCE}
    created = World(SHAPES[f"{engine} pair"], **{**limits, **options})
    try:
        created.ensure()
        yield created
        created.close()
    finally:
        created.kill()


def assert_good(world):
    """Every prefill serves every decode, and no freed page was written to."""
    assert not world.failed([*product(("p0", "p1"), ("d0", "d1"))], BESIDE)
    world.check_pages()


@pytest.mark.parametrize(
    ("engine", "why"),
    [("local", "it was given up for dead"), *((e, "the lease ran out") for e in ENGINES)],
)
def test_a_decode_that_was_stopped_until_its_source_pages_were_reused_fails(engine, why):
    limits = {"lease": 2.0} if "lease" in why else {"peer_timeout": 3.0, "lease": 6.0}
    with world(engine, **limits) as these:
        these.trip("d1", "read", 5, "d1", signal.SIGSTOP)
        room = these.order("p0", ["d1"], WHOLE)
        assert these.until(lambda: these.tripped is not None and "p0" in room.back, PATIENCE)
        # its source pages belong to a filler request now, and are overwritten
        assert "d1" not in room.ended
        these.signal("d1", signal.SIGCONT)
        ends = these.ends(room)
        assert ends["p0"][0] is ends["d1"][0] is KVPoll.Failed
        if "lease" in why:
            assert "its lease ended: not every reader was done" in ends["p0"][1]
            assert "its lease ended" in ends["d1"][1]
        else:
            assert "decode was silent" in ends["p0"][1]
            assert "it no longer knows this decode" in ends["d1"][1]
            # p1 heard nothing of d1 either, and may say so later
            for prefill in ("p0", "p1"):
                pairs = [(prefill, "d1")]
                assert these.until(lambda pairs=pairs: not these.failed(pairs, BESIDE), PATIENCE)
        assert_good(these)


def test_bytes_of_another_request_are_detected():
    with world("local") as these:
        these.order("p0", [], WHOLE, "r")
        room = these.order("p0", ["d1"], replace(WHOLE, salt=9), "r", offered=False)
        with pytest.raises(Violation, match=r"succeeded with \d+ wrong bytes"):
            these.ends(room)


def test_a_byte_that_is_written_to_a_freed_page_is_found():
    stock = Stock(SHAPES["local pair"].decode[0](), range(3))
    stock.audit()
    assert not stock.problems
    oracle.state(stock.pool).memory[0][-1] += 1
    stock.audit()
    assert "1 bytes of freed pages were overwritten by another request" in stock.problems[0]
