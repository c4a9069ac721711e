"""Engines between two processes, against a memcpy of the same runs in this one."""

from __future__ import annotations

import ctypes
import multiprocessing

import numpy as np
import pytest

from disagg.bind import CopyBatch
from disagg.engines.base import create_engine
from kvpool.host import CPUDevice
from kvpool.layout import Slab
from tests.disagg.peers import ENGINES

TOTAL = 64 << 20
SIZES = {"1KiB": 1 << 10, "4KiB": 4 << 10, "36KiB": 36 << 10, "1MiB": 1 << 20}

memcpy = ctypes.CDLL(None).memcpy
memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def owner(pipe, name):
    """The other process: memory of the CPU device, with a value in every byte."""
    memory = CPUDevice().allocate(2 * TOTAL)
    memory.numpy()[:] = np.arange(2 * TOTAL, dtype=np.uint32).astype(np.uint8) ^ 0x5A
    engine = create_engine(name)
    engine.register([Slab(memory.data_ptr(), memory.numel())])
    pipe.send((engine.metadata(), memory.data_ptr()))
    while not pipe.poll(0.001):
        engine.progress()
    engine.close()


@pytest.fixture(scope="module", params=ENGINES)
def peer(request):
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=owner, args=(there, request.param), daemon=True)
    process.start()
    metadata, base = here.recv()
    engine = create_engine(request.param)
    memory = CPUDevice().allocate(2 * TOTAL)
    engine.register([Slab(memory.data_ptr(), memory.numel())])
    yield engine, engine.connect(metadata), base, memory
    engine.close()
    here.send(None)
    process.join(10)


@pytest.mark.parametrize("size", [*SIZES, "whole"])
def test_read(paired, peer, size):
    engine, other, base, memory = peer
    width = SIZES.get(size, TOTAL)
    count = TOTAL // width
    random = np.random.default_rng(0)
    src, dst = (random.permutation(2 * count)[:count] * width for _ in range(2))
    own = CPUDevice().allocate(2 * TOTAL)
    nbytes = np.full(count, width, dtype=np.int64)
    batch = CopyBatch(base + src, memory.data_ptr() + dst, nbytes)
    runs = list(zip(batch.dst.tolist(), (own.data_ptr() + src).tolist(), nbytes.tolist()))

    def reference():
        for run in runs:
            memcpy(*run)

    def ours():
        for part in batch.split(engine.max_bytes, engine.max_runs):
            transfer = engine.read(other, part)
            while not engine.poll(transfer):
                pass

    memory.numpy()[:] = 0
    paired(ours, reference, rounds=10)
    for start, stop in ((src[0], dst[0]), (src[-1], dst[-1])):
        expected = np.arange(start, start + width).astype(np.uint8) ^ 0x5A
        assert np.array_equal(memory.numpy()[stop : stop + width], expected)
