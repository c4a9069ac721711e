"""NIXL: rates by transport and run length, against memcpy."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from disagg.engines.base import create_engine
from disagg.plan.bind import CopyBatch
from kvpool.layout import Slab
from tests.disagg.engines.owners import Owner

TOTAL = 16 << 20
OVER = {"cma": {}, "posix": {"transports": "posix"}, "tcp": {"transports": "tcp"}}

memcpy = ctypes.CDLL(None).memcpy
memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@pytest.fixture(scope="module", params=OVER)
def peer(request):
    options = OVER[request.param]
    other = Owner("nixl", 2 * TOTAL, **options)
    engine, memory = create_engine("nixl", **options), np.zeros(2 * TOTAL, dtype=np.uint8)
    engine.register([Slab(memory.ctypes.data, memory.size)])
    yield engine, engine.connect(other.metadata), other.base, memory
    engine.close()
    assert other.close() == 0


@pytest.mark.parametrize("width", [1 << 10, 36 << 10, 1 << 20])
def test_read_over(paired, peer, width):
    """16 MiB in runs in random order, against memcpy of the same runs in this process."""
    engine, other, base, memory = peer
    own, count = np.zeros_like(memory), TOTAL // width
    random = np.random.default_rng(0)
    src, dst = (random.permutation(2 * count)[:count] * width for _ in range(2))
    batch = CopyBatch(base + src, memory.ctypes.data + dst, np.full(count, width))
    runs = [(int(b), own.ctypes.data + int(a), width) for a, b in zip(src, batch.dst)]

    def reference():
        for run in runs:
            memcpy(*run)

    def ours():
        for part in batch.split(engine.max_bytes, engine.max_runs):
            transfer = engine.read(other, part)
            while not engine.poll(transfer):
                pass

    memory[:] = 0xEE
    paired(ours, reference, rounds=5)
    assert not (memory[dst[0] : dst[0] + width] == 0xEE).any()
