"""Engine `local` beside a loop of memcpy over the same runs in this process, in C as its own is."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from contextlib import closing

import numpy as np
import pytest

from disagg.cli.bench.case import noise
from disagg.cli.bench.peer import BenchContext
from disagg.cli.bench.transfers import PeerReader
from disagg.plan.bind import CopyBatch
from kvpool.device import get_device

TOTAL = 32 << 20
LOOP = """
#include <stdint.h>
#include <string.h>
void copy(const int64_t *src, const int64_t *dst, int64_t nbytes, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        memcpy((void *)(uintptr_t)dst[i], (const void *)(uintptr_t)src[i], (size_t)nbytes);
}
"""
COMPILER = shutil.which("cc") or shutil.which("gcc")


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loop")
    (folder / "loop.c").write_text(LOOP)
    command = [COMPILER, "-O3", "-march=native", "-shared", "-fPIC", "-o", "loop.so", "loop.c"]
    subprocess.run(command, cwd=folder, check=True)
    copy = ctypes.CDLL(str(folder / "loop.so")).copy
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    return copy


@pytest.fixture(scope="module")
def reader(timed):
    with closing(BenchContext(get_device("cpu"))) as context:
        yield context.opened(PeerReader, "local", 2 * (TOTAL if timed else 2 << 20))


@pytest.mark.skipif(COMPILER is None, reason="the reference is compiled: no C compiler is here")
@pytest.mark.parametrize("width", [1 << 10, 4 << 10, 36 << 10, 1 << 20])
def test_read(paired, loop, reader, width):
    """From `read` until the caller knows that all is here; memory of both is the CPU device's."""
    memory = reader.memory
    count = memory.numel() // 2 // width
    random = np.random.default_rng(0)
    src, dst = (random.permutation(2 * count)[:count] * width for _ in range(2))
    batch = CopyBatch(reader.base + src, memory.data_ptr() + dst, np.full(count, width))
    own, into = (get_device("cpu").allocate(memory.numel()) for _ in range(2))
    own.copy_(truth := noise(memory.numel()))
    froms, tos = own.data_ptr() + src, into.data_ptr() + dst
    memory.zero_()
    paired(
        lambda: reader.read(batch),
        lambda: loop(froms.ctypes.data, tos.ctypes.data, width, count),
    )
    expected = np.zeros(memory.numel(), dtype=np.uint8)
    for a, b in zip(src, dst):
        expected[b : b + width] = truth.numpy()[a : a + width]
    assert np.array_equal(memory.numpy(), expected) and np.array_equal(into.numpy(), expected)
