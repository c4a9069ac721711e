"""What ranks agree on of the requests that wait for a store, without an engine."""

from __future__ import annotations

import itertools
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from disagg.connectors.sglang_store.flows import Flows
from disagg.connectors.sglang_store.salts import salt_of
from kvpool import Shard
from tests import oracle
from tests.disagg.store.stores import CHUNK, fresh, put, stores
from tests.pools import mha

PROMPT = np.random.default_rng(7).integers(0, 900, 3 * CHUNK + 5)
SHARDS = {"num_pages": 40}


class Ranks:
    """Flows of an engine's ranks over stores, that are stepped in turn."""

    def __init__(self, opened, pools):
        self.pools = pools
        self.flows = [Flows(store=store, leads=rank == 0) for rank, store in enumerate(opened)]

    def begin(self, name, tokens):
        for flows in self.flows:
            flows.begin(name, flows.store.keys(tokens), None)

    def step(self, ranks=None):
        """A step of all; of `ranks` only, what the others know is as it was. Returns what has
        ended, the same on all.
        """
        for number, flows in enumerate(self.flows):
            if ranks is None or number in ranks:
                flows.turn()
        least = np.min([flows.says() for flows in self.flows], axis=0).tolist()
        ended = [[(f.name, f.landed) for f in flows.agreed(least)] for flows in self.flows]
        assert all(each == ended[0] for each in ended)
        return ended[0]

    def place(self, name, ranks=(0, 1)):
        """Begins to read a flow on ranks."""
        for pool, flows in ((self.pools[rank], self.flows[rank]) for rank in ranks):
            flow = flows.get(name)
            address = oracle.place(pool, flow.tokens, 3)
            positions = range(flow.tokens)
            flows.read(flow, SimpleNamespace(address=address, positions=positions))

    def until(self, done, seconds=20):
        until = time.monotonic() + seconds
        while not (found := done()):
            assert time.monotonic() < until
            time.sleep(0.001)
        return found

    def tokens(self, name):
        """What is agreed of a flow."""
        return {flows.get(name).tokens for flows in self.flows}


@pytest.fixture
def url():
    url, pool = fresh(), mha(**SHARDS)
    with stores(url, [pool]) as (writes,):
        address = oracle.place(pool, 3 * CHUNK, 1)
        oracle.fill(pool, address)
        put(writes, PROMPT[: 3 * CHUNK], address)
        yield url  # what is in memory is there as long as somebody has it open


@pytest.fixture
def ranks(url):
    pools = [mha(shard=Shard(rank, 2), **SHARDS) for rank in range(2)]
    with stores(url, pools, timeout=2.0) as opened:
        for pool in pools:
            oracle.blank(pool)
        yield Ranks(opened, pools)


def test_the_first_rank_says_how_much_there_is_and_all_read_it(ranks):
    ranks.begin("a", PROMPT)
    assert ranks.flows[1].says() != ranks.flows[0].says() == [-1]
    ranks.until(lambda: ranks.step() or ranks.tokens("a") == {3 * CHUNK})
    ranks.place("a")
    assert ranks.until(ranks.step) == [("a", 3 * CHUNK)]
    for pool in ranks.pools:
        oracle.assert_holds(pool, oracle.place(pool, 3 * CHUNK, 3))


def test_one_rank_that_has_not_ended_holds_up_its_request_only(ranks):
    ranks.begin("a", PROMPT)
    ranks.begin("b", PROMPT[: 2 * CHUNK])
    ranks.until(lambda: ranks.step() or ranks.tokens("a") == {3 * CHUNK})
    ranks.until(lambda: ranks.step() or ranks.tokens("b") == {2 * CHUNK})
    ranks.place("a")
    first = ranks.flows[0].get("a")
    ranks.until(lambda: ranks.step([0]) or first.landed)
    assert ranks.step([0]) == []  # the second rank has not looked
    assert ranks.until(ranks.step) == [("a", 3 * CHUNK)]
    assert ranks.tokens("b") == {2 * CHUNK}


def test_what_one_rank_could_not_read_no_rank_has(ranks):
    ranks.begin("a", PROMPT)
    ranks.until(lambda: ranks.step() or ranks.tokens("a") == {3 * CHUNK})
    ranks.place("a", [0])
    assert ranks.until(lambda: ranks.step() or ranks.flows[0].get("a").landed) == 3 * CHUNK
    floor = ranks.flows[1].store._floor
    floor.delete([one.name for one in floor.list("") if one.name.endswith(".full")])
    ranks.place("a", [1])
    assert ranks.until(ranks.step) == [("a", 0)]


def test_a_fence_holds_a_read_back(ranks):
    ranks.begin("a", PROMPT)
    ranks.until(lambda: ranks.step() or ranks.tokens("a") == {3 * CHUNK})
    over = []
    for pool, flows in zip(ranks.pools, ranks.flows):
        flow = flows.get("a")
        place = SimpleNamespace(
            address=oracle.place(pool, 3 * CHUNK, 3), positions=range(3 * CHUNK)
        )
        flows.read(flow, place, SimpleNamespace(query=lambda: bool(over)))
    for _ in range(20):
        assert ranks.step() == []
        assert all(flows.get("a").job is None for flows in ranks.flows)
    over.append(True)
    assert ranks.until(ranks.step) == [("a", 3 * CHUNK)]


def test_a_flow_that_is_dropped_is_not_heard_of_again(ranks):
    ranks.begin("a", PROMPT)
    ranks.begin("b", PROMPT)
    for flows in ranks.flows:
        flows.drop(flows.get("a"))
    assert [len(flows) for flows in ranks.flows] == [1, 1]
    ranks.until(lambda: ranks.step() or ranks.tokens("b") == {3 * CHUNK})
    assert ranks.flows[0].get("a") is None


@given(st.lists(st.tuples(st.text(), st.text()), max_size=6, unique=True))
def test_no_two_tenants_have_one_salt(pairs):
    pairs += [("", ""), ('["a","",""]', ""), ("a", ""), (json.dumps(["", "", "a"]), ""), ("", "a")]
    for one, other in itertools.combinations(set(pairs), 2):
        assert salt_of(*one) != salt_of(*other)
        salt_of(*one).encode()


def test_a_tenant_alone_is_the_salt_as_of_other_engines():
    assert salt_of("tenant", None) == "tenant"
    assert salt_of(None, None) == ""
