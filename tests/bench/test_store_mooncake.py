"""A store over Mooncake beside Mooncake itself: hits into pages of 16, beside reading the same
objects as they are into memory that Mooncake knows, from the same process that offers memory.
"""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

pytest.importorskip("mooncake")

from disagg.store.floors import open_floor
from disagg.store.floors.mooncake_client import store_module
from tests.bench.conftest import shuffled
from tests.bench.test_store import PAGE, filled, prompt
from tests.disagg.store.servers import MIB, Master, memory_of


class Bare:
    """Mooncake's client, and memory for objects of these names and sizes."""

    def __init__(self, master, sizes):
        self._client = store_module().MooncakeDistributedStore()
        assert not self._client.setup(
            local_hostname="127.0.0.1",
            metadata_server="P2PHANDSHAKE",
            global_segment_size=0,
            local_buffer_size=0,
            protocol="tcp",
            rdma_devices="",
            master_server_addr=f"127.0.0.1:{master.port}",
        )
        self._names, self._sizes = [*sizes], [*sizes.values()]
        self.memory = np.zeros(sum(self._sizes), np.uint8)
        starts = np.cumsum([0, *self._sizes[:-1]]) + self.memory.ctypes.data
        self._addresses = starts.tolist()
        assert not self._client.register_buffer(self.memory.ctypes.data, self.memory.nbytes)

    def read(self):
        found = self._client.batch_get_into(self._names, self._addresses, self._sizes)
        assert found == self._sizes

    def close(self):
        self._client.unregister_buffer(self.memory.ctypes.data)
        self._client.close()


@pytest.fixture(scope="module")
def master():
    master = Master()
    with master.running(), memory_of(master, 2048 * MIB):
        yield master


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_hits_beside_bare_reads_of_the_objects(tokens, master, paired, timed):
    tokens = tokens if timed else 512
    _pool, store = filled(master.url(), tokens)
    asked, address = store.keys(prompt(tokens)), shuffled(tokens // PAGE, 1, PAGE)

    def ours():
        assert store.wait(store.read(asked, address)).failure is None

    with closing(open_floor(master.url())) as floor:
        sizes = {one.name: one.size for one in floor.list(store.namespace)}
        objects = {name: size for name, size in sizes.items() if name.endswith(".full")}
        assert len(objects) == tokens // 256
        with closing(Bare(master, objects)) as bare:
            paired(ours, bare.read, rounds=20)
        store.close()
        floor.delete([*sizes])
