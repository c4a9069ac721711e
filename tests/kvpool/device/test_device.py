"""The protocol and the registry of devices: names, refusals, lazy imports; and what the devices of
the host do beyond the conformance kit.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from kvpool import DeviceUnavailable, MLAPool
from kvpool.device import Device, device_entries, get_device
from kvpool.device.cpu import CompletedEvent, CPUDevice, MetaDevice
from tests.kvpool.cli.plugins import package

SHAPE = {"layers": (0,), "num_pages": 3, "page_size": 4, "dtype": "bf16"}
OPERATIONS = ("store_rows", "load_rows", "copy_items", "copy_runs")


def python(code, *path, **environment):
    """Runs code in a new process, with more import paths."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *sys.path])}
        | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def vendor(tmp_path, monkeypatch):
    """A vendor's package: `abacus` has only number 0, `broken` cannot be imported."""
    (tmp_path / "abacus.py").write_text(
        textwrap.dedent(
            """
            from kvpool.device.cpu import CPUDevice

            class Abacus(CPUDevice):
                def availability(self):
                    return None if self.name == "abacus:0" else "one abacus, number 0. Count beads."
            """
        )
    )
    lines = ["[kvpool.devices]", "abacus = abacus:Abacus", "broken = no_such_module:Device"]
    package(tmp_path, "abacus", "\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    get_device.cache_clear()
    sys.modules.pop("abacus", None)


def test_devices_of_the_host_are_known_by_name():
    assert {"cpu", "meta"} <= set(device_entries())
    assert isinstance(get_device("cpu"), CPUDevice)
    assert isinstance(get_device("meta"), MetaDevice)
    assert get_device("cpu") is get_device("cpu")


def test_a_device_has_the_requested_name(vendor):
    device = get_device("abacus:0")
    assert device.name == "abacus:0" and type(device).__module__ == "abacus"
    assert MLAPool(**SHAPE, device="abacus:0").device is device


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("gpu", "cuda"),
        ("gpu:1", "cuda:1"),
        ("GPU", "cuda"),
        ("CUDA:0", "cuda:0"),
        ("nvidia", "cuda"),
        ("cdua", "cuda"),
        ("ascend:3", "npu:3"),
        ("host", "cpu"),
        ("tpu", None),
        ("mps", None),
    ],
)
def test_another_name_of_a_kind_leads_to_it_and_other_hardware_to_none(name, suggested):
    with pytest.raises(DeviceUnavailable) as refusal:
        get_device(name)
    said = str(refusal.value)
    assert f"Did you mean {suggested!r}?" in said if suggested else "Did you mean" not in said


def test_a_refusal_has_the_devices_own_reason(vendor):
    for ask in (get_device, lambda name: MLAPool(**SHAPE, device=name)):
        with pytest.raises(DeviceUnavailable) as refusal:
            ask("abacus:1")
        assert str(refusal.value) == "device 'abacus:1': one abacus, number 0. Count beads."


def test_a_refusal_is_not_remembered(vendor, monkeypatch):
    with pytest.raises(DeviceUnavailable):
        get_device("abacus:7")
    monkeypatch.setattr("abacus.Abacus.availability", lambda self: None)
    assert get_device("abacus:7").name == "abacus:7"


def test_the_error_for_an_unknown_device_lists_the_installed_ones(vendor):
    with pytest.raises(DeviceUnavailable, match=r"\(installed: abacus, broken, cpu, .*meta"):
        get_device("tpu")


def test_devices_are_imported_on_first_use(vendor):
    done = python(
        """
        import sys
        import kvpool, kvpool.device, kvpool_cuda, kvpool_npu
        from kvpool.device import device_entries, get_device
        assert {"abacus", "broken", "cpu"} <= set(device_entries())
        get_device("cpu")
        assert not {"abacus", "triton", "torch_npu"} & set(sys.modules)
        get_device("abacus:0")
        assert "abacus" in sys.modules
        """,
        vendor,
    )
    assert done.returncode == 0, done.stderr


def test_a_vendors_broken_package_breaks_no_other_device(vendor):
    assert get_device("cpu").name == "cpu"
    with pytest.raises(DeviceUnavailable, match=r"package cannot be loaded: .*no_such_module"):
        get_device("broken")


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_take_the_protocols_arguments(name):
    taken = list(inspect.signature(getattr(CPUDevice(), name)).parameters)
    assert taken == list(inspect.signature(getattr(Device, name)).parameters)[1:]


@pytest.mark.parametrize("alignment", [None, 1, 64, 4096, 1 << 16, 2 << 20])
@pytest.mark.parametrize("nbytes", [1, 4097])
def test_host_memory_is_aligned_as_requested(alignment, nbytes):
    memory = CPUDevice().allocate(nbytes, alignment)
    assert memory.data_ptr() % (alignment or CPUDevice.alignment) == 0
    assert memory.numel() == nbytes and not memory.any()


def test_a_device_without_memory_allocates_sizes():
    memory = MetaDevice().allocate(1 << 50, 2 << 20)
    assert memory.is_meta and memory.numel() == 1 << 50


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_device_without_memory_refuses_to_work(name):
    with pytest.raises(DeviceUnavailable, match="Build it with device='cpu'"):
        getattr(MetaDevice(), name)()


@pytest.mark.parametrize("device", [CPUDevice(), MetaDevice()], ids=["cpu", "meta"])
def test_an_event_of_the_host_has_ended(device):
    event = device.record()
    assert event.query()
    event.synchronize()
    device.wait(event)


def test_the_host_waits_for_an_event_of_another_device():
    class Later(CompletedEvent):
        waited = 0

        def synchronize(self):
            self.waited += 1

    event = Later()
    CPUDevice().wait(event)
    assert event.waited == 1


@pytest.mark.usefixtures("copies")
def test_runs_of_all_lengths_are_copied_in_one_call_and_nothing_else_changes():
    random = np.random.default_rng(0)
    lengths = random.permutation(np.repeat([0, 1, 3, 64, 656, 50_001], 5))
    starts = np.cumsum(lengths) - lengths
    source = random.integers(0, 256, int(lengths.sum()), dtype=np.uint8)
    order, places = random.permutation(lengths.size), np.empty_like(starts)
    places[order] = np.cumsum(lengths[order] + 1) - lengths[order]  # a byte before each
    into = np.full(source.size + lengths.size, 77, dtype=np.uint8)
    expected = into.copy()
    for start, place, length in zip(starts, places, lengths):
        expected[place : place + length] = source[start : start + length]
    CPUDevice().copy_runs(source.ctypes.data + starts, into.ctypes.data + places, lengths)
    assert np.array_equal(into, expected)


def test_copies_within_memory_read_before_they_write():
    memory = CPUDevice().allocate(8 * 16)
    memory.copy_(torch.arange(8).repeat_interleave(16).to(torch.uint8))
    rows, ring = memory.view(8, 16), torch.arange(8)
    CPUDevice().copy_items([rows], ring, ring.roll(1))
    assert rows[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
