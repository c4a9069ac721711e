"""How much may wait to be written is set, or a part of the host's memory."""

from __future__ import annotations

import pytest

from disagg.connectors.settings import Settings
from disagg.connectors.store.steps import Opening
from disagg.store.transfer import writing
from kvpool import MHAPool
from tests import oracle
from tests.disagg.store.stores import fresh, put

CHUNK_BYTES = 2 << 20
POOL = {"layers": range(4), "num_kv_heads": 4, "head_dim": 128, "num_pages": 8, "page_size": 128}


@pytest.mark.parametrize(("room", "dropped"), [("1MiB", 2), (CHUNK_BYTES - 1, 2), ("8MiB", 0)])
def test_an_engine_drops_what_its_setting_leaves_no_room_for(room, dropped):
    pool = MHAPool(**POOL, dtype="bf16")
    settings = Settings.read({"store": fresh(), "store_room": room}, "test")
    opening = Opening.of([(pool.layout.to_msgpack(), {"weights": "w"})])
    with opening.store(settings, 0, pool.layout) as store:
        put(store, range(512), oracle.filled(pool, 512))
        stats = store.stats()
        assert stats.counts["dropped"] == dropped and stats.counts["written"] == 2 - dropped
        assert stats.nbytes["dropped"] == dropped * CHUNK_BYTES
        if dropped:
            assert f" of {settings.room:,} bytes in memory" in stats.reasons["dropped"]


@pytest.mark.parametrize(
    ("gib", "ranks", "mib"),
    [(1024, 1, 8192), (1024, 8, 8192), (1024, 16, 4096), (64, 1, 4096), (64, 8, 512), (4, 4, 256)],
)
def test_without_a_setting_ranks_share_a_sixteenth_of_the_host(gib, ranks, mib, monkeypatch):
    monkeypatch.setattr(writing, "host_memory", lambda: gib << 30)
    assert writing.default_room(ranks) == mib << 20
