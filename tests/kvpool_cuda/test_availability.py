"""A device that cannot be used says what is missing."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

from kvpool.device import DeviceUnavailable, get_device
from kvpool_cuda import device as cuda
from kvpool_cuda.device import CUDADevice
from kvpool_cuda.interpret import InterpretedDevice
from tests.processes import python

answer = partial(python, "-c", drop="TRITON_INTERPRET")


@pytest.fixture
def two_gpus(monkeypatch):
    """torch says that it is built for CUDA and sees two GPUs."""
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_torch_without_cuda_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    reason = CUDADevice("cuda:0").availability()
    assert f"torch {torch.__version__} is built without CUDA" in reason


@pytest.mark.parametrize(("available", "count"), [(False, 0), (True, 0), (False, 2)])
def test_a_missing_driver_or_gpu_is_named(monkeypatch, two_gpus, available, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    reason = CUDADevice("cuda:0").availability()
    assert "no usable GPU" in reason and "CUDA 12.9" in reason


def test_a_number_beyond_the_gpus_is_named(two_gpus):
    assert CUDADevice("cuda:7").availability() == "there are 2 CUDA devices: cuda:0 to cuda:1."


@pytest.mark.parametrize("name", ["cuda:", "cuda:x", "cuda:-1", "cuda:1.5"])
def test_a_name_without_a_number_is_refused(two_gpus, name):
    assert "is not a device number" in CUDADevice(name).availability()


def test_a_missing_triton_says_what_to_install(monkeypatch, two_gpus):
    monkeypatch.setitem(sys.modules, "triton", None)
    for device in (CUDADevice("cuda:0"), InterpretedDevice("interpret")):
        assert device.availability().endswith("pip install 'kvpool[cuda]'")


def test_a_triton_that_is_too_old_is_named(monkeypatch, two_gpus):
    import triton

    monkeypatch.setattr(triton, "__version__", "3.5.1")
    for device in (CUDADevice("cuda:0"), InterpretedDevice("interpret")):
        assert "triton 3.5.1 is too old, the kernels need 3.6" in device.availability()


def test_interpreted_kernels_are_refused_gpu_memory(monkeypatch, two_gpus):
    monkeypatch.setattr(cuda, "interpreted", lambda: True)
    assert "TRITON_INTERPRET=1 was set" in CUDADevice("cuda:1").availability()
    monkeypatch.setattr(cuda, "interpreted", lambda: False)
    assert CUDADevice("cuda:1").availability() is None


def test_the_interpreter_must_be_requested_before_triton_is_imported():
    code = "from kvpool.device import get_device; print(get_device('interpret').name)"
    assert answer(code, TRITON_INTERPRET="1") == "interpret\n"
    late = """
import triton, os
os.environ["TRITON_INTERPRET"] = "1"
from kvpool.device import DeviceUnavailable, get_device
try:
    get_device("interpret")
except DeviceUnavailable as error:
    print(error)
"""
    assert "Set TRITON_INTERPRET=1 before the process starts." in answer(late)


def test_devices_are_found_by_name_without_importing_triton():
    code = """
import sys
import kvpool_cuda, kvpool_cuda.device, kvpool_cuda.interpret, kvpool_cuda.ipc
assert "triton" not in sys.modules
from kvpool.device import DeviceUnavailable, get_device
try:
    print(get_device("cuda:0").name)
except DeviceUnavailable as error:
    print(error)
"""
    found = answer(code)
    assert found == "cuda:0\n" or found.startswith("device 'cuda:0': ")


def test_a_pool_on_a_missing_gpu_is_refused_by_name():
    from tests.pools import mla

    with pytest.raises(DeviceUnavailable, match="device 'cuda:99': "):
        mla(device="cuda:99")
    with pytest.raises(DeviceUnavailable, match="device 'cuda:99': "):
        get_device("cuda:99")
