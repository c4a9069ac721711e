"""Values that are scaled by what no page has are not converted."""

from __future__ import annotations

import numpy as np
import pytest

from disagg import DecodeEndpoint, PeerError, PrefillEndpoint, create_engine
from disagg.snapshot import SnapshotRefused, load, save
from disagg.store import Store
from tests import oracle
from tests.cast.test_pools import built
from tests.disagg.store.stores import CHUNK, fresh, put
from tests.pools import mha

SCALED = {"v_scale of layer 2": 0.5, "k_scale of layer 1": 1.0}
SAYS = "v_scale of layer 2: 0.5 on prefill, and rows are converted as if it were 1"
PROMPT = np.arange(2 * CHUNK)


@pytest.fixture
def pools():
    return [built(mha, packing, num_pages=40) for packing in ("e4m3", "bf16")]


def test_a_handshake_is_refused(pools):
    given, wanted = (pool.layout for pool in pools)
    with (
        PrefillEndpoint(given, create_engine("local"), conventions=SCALED) as prefill,
        DecodeEndpoint(wanted, create_engine("local"), cast=True) as decode,
    ):
        with pytest.raises(PeerError, match=SAYS):
            decode.connect([prefill.address], timeout=30)
        others = {"v_scale of layer 2": 1.0}
        with PrefillEndpoint(given, create_engine("local"), conventions=others) as plain:
            assert decode.connect([plain.address], timeout=30).plan.cast


def test_a_file_and_a_store_are_refused(pools, tmp_path):
    given, wanted = pools
    table, dest = oracle.filled(given, PROMPT.size), oracle.place(wanted, PROMPT.size, 1)
    save(tmp_path / "a", given.layout, table, conventions=SCALED)
    with pytest.raises(SnapshotRefused, match=SAYS):
        load(tmp_path / "a", wanted.layout, dest, cast=True)
    url = fresh()
    with Store(url, given.layout, conventions=SCALED, chunk_tokens=CHUNK) as store:
        put(store, PROMPT, table)
    with Store(url, wanted.layout, chunk_tokens=CHUNK, cast=True) as store:
        assert store.lookup(PROMPT) == 0
        assert SAYS in " ".join(store.stats().reasons.values())
