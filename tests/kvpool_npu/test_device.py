"""The NPU device over plain torch: memory, copies, refusals, and what is missing."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvpool import DeviceUnavailable
from kvpool.device import get_device
from kvpool.device.cpu import CompletedEvent
from kvpool.extras import ascend_parts
from kvpool_npu import NPUDevice
from kvpool_npu.device import reference
from tests.kvpool_npu.pools import npu_mha


def test_the_reference_device_uses_host_memory():
    device = get_device("npu-reference")
    assert (device.name, device.memory_kind) == ("npu-reference", "cpu")
    assert (device.alignment, device.registration_limit) == (2 << 20, 256)
    assert NPUDevice("npu:3").memory_kind == "npu"
    event = device.record()
    device.wait(event)
    assert event.query()


def test_runs_are_copied_only_within_memory_of_the_device():
    device = reference("npu-reference")
    one, other = device.allocate(4096), device.allocate(4096)
    one.copy_(torch.arange(4096) % 251)
    src = np.array([one.data_ptr() + 3, one.data_ptr() + 4000, other.data_ptr() + 8])
    dst = np.array([other.data_ptr() + 100, other.data_ptr(), one.data_ptr()])
    other[8:13] = 255
    device.copy_runs(src[:2], dst[:2], np.array([1000, 8]))
    assert torch.equal(other[100:1100], one[3:1003]) and torch.equal(other[:8], one[4000:4008])
    device.copy_runs(src[2:], dst[2:], np.array([5]))
    assert one[:6].tolist() == [255] * 5 + [5]
    with pytest.raises(ValueError, match=r"97 bytes at .* are not in memory"):
        device.copy_runs(src[1:2], dst[:1], np.array([97]))
    del other
    gc.collect()
    with pytest.raises(ValueError, match="not in memory that this device allocated"):
        device.copy_runs(src[2:], dst[2:], np.array([5]))


def test_the_stream_waits_for_an_npu_event_and_the_host_for_any_other():
    class Event(CompletedEvent):
        pass

    class OtherEvent:
        waited = False

        def synchronize(self):
            self.waited = True

    class Stream(list):
        wait_event = record_event = list.append

    stream, device = Stream(), NPUDevice("npu:2")
    device.torch_npu = SimpleNamespace(
        npu=SimpleNamespace(Event=Event, current_stream={2: stream}.get)
    )
    event = device.record()
    device.wait(event)
    assert stream == [event, event]
    device.wait(other := OtherEvent())
    assert other.waited and len(stream) == 2


# what is missing

OTHER_RELEASE = f"the torch-npu for torch {torch.__version__} (2.1.0 is installed)"


@pytest.fixture
def machine(monkeypatch):
    """Parts of a machine with everything installed and two NPUs, by their sentences."""
    parts = dict.fromkeys(ascend_parts(), True)
    parts["release"] = torch.__version__
    monkeypatch.setattr("kvpool_npu.device.ascend_parts", lambda: dict(list(parts.items())[:3]))
    monkeypatch.setattr("kvpool_npu.device.version", lambda name: parts["release"])
    npu = SimpleNamespace(device_count=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu))
    return parts


def test_one_sentence_names_everything_that_is_missing(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # importing it would be an error
    device, sentences = NPUDevice("npu:0"), list(machine)[:3]
    for sentence in sentences:
        machine[sentence] = False
        assert device.availability() == f"missing: {sentence}."
        machine[sentence] = True
    machine["release"] = "2.1.0"
    assert device.availability() == f"missing: {OTHER_RELEASE}."
    machine |= dict.fromkeys(sentences, False)
    assert device.availability() == f"missing: {'; '.join([*sentences, OTHER_RELEASE])}."


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("npu", None),
        ("npu:1", None),
        ("npu:2", "2 NPUs are visible, numbered from 0."),
        ("npu:x", "an NPU is named by its number, as npu:0."),
        ("npu:-1", "an NPU is named by its number, as npu:0."),
    ],
)
def test_only_an_npu_that_is_there_is_available(machine, name, reason):
    assert NPUDevice(name).availability() == reason
    if reason:
        with pytest.raises(DeviceUnavailable, match=f"device '{name}': {reason}"):
            get_device(name)


def test_a_package_that_cannot_be_imported_says_why(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert NPUDevice("npu:0").availability().startswith("torch_npu cannot be imported: ")


def test_cann_is_where_its_environment_points(monkeypatch, tmp_path):
    def present():
        return next(there for part, there in ascend_parts().items() if part.startswith("CANN"))

    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert not present()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert not present()
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libascendcl.so").touch()
    assert present()


def test_memory_at_a_pointer_is_that_of_a_slab():
    """The NPU's own code, over host memory."""

    class Device(reference):
        memory_at = NPUDevice.memory_at

    device = Device("npu:0")
    slab = device.allocate(4096)
    slab.copy_(torch.arange(4096) % 251)
    found = device.memory_at(slab.data_ptr() + 100, 200)
    assert torch.equal(found, slab[100:300]) and found.data_ptr() == slab.data_ptr() + 100
    for pointer, nbytes in ((slab.data_ptr() + 4000, 97), (slab.data_ptr() - 1, 1)):
        with pytest.raises(DeviceUnavailable, match="not in memory that this device allocated"):
            device.memory_at(pointer, nbytes)


def test_a_pool_on_a_missing_npu_is_refused():
    if NPUDevice("npu:0").availability() is None:
        return  # an NPU is here
    with pytest.raises(DeviceUnavailable, match="device 'npu:7': missing: an NPU with its driver"):
        npu_mha(device="npu:7")
