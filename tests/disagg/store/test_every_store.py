"""A store over every floor: what two ranks have written is read by one of another page size."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool import Shard
from tests import oracle
from tests.disagg.store.stores import CHUNK, got, put, stores
from tests.pools import dsv4, hybrid, mha, swa

ROOM = {"num_pages": 40, "num_window_pages": 40}
TOKENS = 3 * CHUNK


@pytest.mark.parametrize("build", [mha, swa, hybrid, dsv4], ids=["mha", "swa", "hybrid", "dsv4"])
def test_what_ranks_wrote_another_reads(build, floor_url, space):
    """`space` is the tenant: a server is shared by all tests."""
    prompt = np.random.default_rng(4).integers(0, 1000, TOKENS)
    writers = [build.but(**ROOM, shard=Shard(rank, 2))() for rank in range(2)]
    reader = build.but(**ROOM, page_size=24)()
    with stores(floor_url, writers) as writing, stores(floor_url, [reader]) as (reading,):
        for store, holder in zip(writing, writers):
            assert put(store, prompt, oracle.filled(holder, TOKENS, 1), salt=space)
            assert store.stats().counts["not written"] == 0
        assert reading.lookup(prompt, salt=space) == TOKENS
        assert reading.lookup(prompt, salt="another tenant") == 0
        oracle.blank(reader)
        address = oracle.place(reader, TOKENS, 9)
        assert got(reading, prompt, address, salt=space) is None
    oracle.assert_holds(reader, address)
