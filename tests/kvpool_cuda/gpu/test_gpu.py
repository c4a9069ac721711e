"""What `kvpool accept` tries on a GPU, and what is refused there: memory that cannot be shared, and
work that no CUDA graph can capture.
"""

from __future__ import annotations

import msgspec
import pytest
import torch

from kvpool.device import DeviceUnavailable, get_device
from kvpool_cuda import ipc
from tests.disagg.cli.accepting import accepted
from tests.pools import PACKED
from tests.processes import python


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "section", ["conformance", "streams", "graphs", "ipc", "engines", "models"]
)
def test_the_gpu_is_accepted(tmp_path, section):
    status, said, report = accepted(tmp_path, "cuda:0", "--only", section, timeout=900)
    assert status == 0, said
    assert report.sections[0].state == "passed"


def test_a_first_copy_inside_a_capture_is_refused():
    pool = PACKED["mla bf16"](device="cuda:0", num_pages=17)
    ids = torch.tensor([1, 2], device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="once before the capture"), torch.cuda.graph(graph):
        pool.copy_items("kv", ids, ids)


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
    found = python("-c", code, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert "expandable_segments:True" in found
