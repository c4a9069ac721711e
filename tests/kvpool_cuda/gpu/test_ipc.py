"""Memory that is refused. What another process reads is in `kvpool.testing.checks.hardware`."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
import torch

from kvpool.device import DeviceUnavailable, get_device
from kvpool_cuda import ipc


def test_bytes_beyond_an_allocation_are_not_shared():
    memory = get_device("cuda:0").allocate(4096)
    with pytest.raises(DeviceUnavailable, match="Share each allocation separately"):
        ipc.share(memory.data_ptr(), 1 << 40)


def test_host_memory_is_refused_with_the_drivers_error():
    host = torch.zeros(64)
    with pytest.raises(ipc.DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        ipc.share(host.data_ptr(), 64)


def test_own_freed_and_invisible_memory_is_refused():
    memory = get_device("cuda:0").allocate(4096)
    shared = ipc.share(memory.data_ptr(), 4096)
    with pytest.raises(ipc.DriverError):
        ipc.attach(shared, 0)
    given = ipc.decode(shared)
    gone = ipc.CUDAIpcHandle(bytes(64), given.offset, given.nbytes, given.uuid)
    with pytest.raises(ipc.DriverError):
        ipc.attach(msgspec.msgpack.encode(gone), 0)
    unseen = ipc.CUDAIpcHandle(bytes(64), given.offset, given.nbytes, bytes(16))
    with pytest.raises(DeviceUnavailable, match="CUDA_VISIBLE_DEVICES"):
        ipc.attach(msgspec.msgpack.encode(unseen), 0)


def test_expandable_segments_are_refused():
    code = """
from kvpool.device import DeviceUnavailable, get_device
device = get_device("cuda:0")
try:
    device.share(device.allocate(4 << 20).data_ptr(), 4096)
except DeviceUnavailable as error:
    print(error)
"""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment
    )
    assert "expandable_segments:True" in done.stdout, done.stderr
