"""NIXL: making a read by number against by address, and what each transport moves."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from disagg.engines.base import create_engine
from disagg.engines.nixl import link as nixl_link
from disagg.plan import plan
from disagg.plan.bind import CopyBatch
from kvpool import MLAPool, RequestAddress, Span
from kvpool.layout import Slab
from tests.disagg.engines.nixl_peers import Owner

LAYERS, TOKENS, TOTAL = 61, 2048, 16 << 20
OVER = {"cma": {}, "posix": {"transports": "posix"}, "tcp": {"transports": "tcp"}}

memcpy = ctypes.CDLL(None).memcpy
memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@pytest.fixture(scope="module")
def prepared():
    """An engine, its peer, and one request of 61 layers in scattered pages of one token."""
    pools = [
        MLAPool(
            layers=range(LAYERS),
            num_pages=3 * TOKENS,
            page_size=1,
            kv_lora_rank=64,
            qk_rope_head_dim=32,
            dtype="bf16",
        )
        for _ in range(2)
    ]
    engines = [create_engine("nixl") for _ in pools]
    for engine, pool in zip(engines, pools):
        engine.register(pool.layout.slabs())
    made = plan([pools[0].layout], pools[1].layout)
    peer = engines[1].connect(engines[0].metadata())
    engines[1].prepare(peer, made)
    random = np.random.default_rng(0)
    there, here = (
        RequestAddress(TOKENS, {"kv": Span(1 + random.permutation(3 * TOKENS - 1)[:TOKENS])})
        for _ in pools
    )
    yield peer, made.bind(0, there, here)
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("runs", [455, 4096, 8192, 12288, 16384])
def test_make_a_read(paired, prepared, monkeypatch, runs):
    """Ours by number, the reference by address; without the post, which is the same."""
    peer, batch = prepared
    part = next(batch.split(1 << 40, runs))

    def make(worth):
        monkeypatch.setattr(nixl_link, "WORTH", worth)
        reads, by_number = peer.link.make(part, peer.plan)
        for read in reads:
            peer.link.agent.release(read)
        return by_number

    assert make(1) == part.runs == runs and make(1 << 40) == 0
    paired(lambda: make(1), lambda: make(1 << 40), rounds=50)


@pytest.fixture(scope="module", params=OVER)
def peer(request):
    options = OVER[request.param]
    other = Owner(2 * TOTAL, **options)
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
