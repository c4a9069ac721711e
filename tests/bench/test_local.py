"""Engine `local` between two processes, against a memcpy of the same runs in this one."""

from __future__ import annotations

import ctypes
import multiprocessing

import numpy as np
import pytest

from disagg.bind import CopyBatch
from disagg.engines.local import LocalEngine
from kvpool.device import CPUDevice
from kvpool.layout import Slab

TOTAL = 64 << 20
SIZES = {"1 KiB": 1 << 10, "4 KiB": 4 << 10, "36 KiB": 36 << 10, "1 MiB": 1 << 20}

memcpy = ctypes.CDLL(None).memcpy
memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def owner(pipe):
    """The other process: memory of the CPU device, with a value in every byte."""
    memory = CPUDevice().allocate(2 * TOTAL)
    memory.numpy()[:] = np.arange(2 * TOTAL, dtype=np.uint64).astype(np.uint8) ^ 0x5A
    engine = LocalEngine()
    engine.register([Slab(memory.data_ptr(), memory.numel())])
    pipe.send((engine.metadata(), memory.data_ptr()))
    pipe.recv()


@pytest.fixture(scope="module")
def peer():
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=owner, args=(there,), daemon=True)
    process.start()
    metadata, base = here.recv()
    engine = LocalEngine()
    yield engine, engine.connect(metadata), base
    here.send(None)
    process.join(10)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("order", ["random", "contiguous"])
def test_local_read(paired, peer, size, order):
    engine, other, base = peer
    width = SIZES[size]
    count = TOTAL // width
    if order == "random":
        random = np.random.default_rng(0)
        rows = [random.permutation(2 * count)[:count] for _ in range(2)]
    else:
        width, rows = count * width, [np.zeros(1, dtype=np.int64)] * 2
    dest, own = (CPUDevice().allocate(2 * TOTAL) for _ in range(2))
    nbytes = np.full(len(rows[0]), width, dtype=np.int64)
    batch = CopyBatch(base + rows[0] * width, dest.data_ptr() + rows[1] * width, nbytes)
    runs = list(
        zip(batch.dst.tolist(), (own.data_ptr() + rows[0] * width).tolist(), nbytes.tolist())
    )

    def reference():
        for run in runs:
            memcpy(*run)

    paired(lambda: engine.read(other, batch), reference)
    held, where = dest.numpy(), rows[1][0] * width
    expected = np.arange(rows[0][0] * width, (rows[0][0] + 1) * width).astype(np.uint8) ^ 0x5A
    assert np.array_equal(held[where : where + width], expected)
