"""The protocol and the registry of devices: names, refusals, lazy imports; and what the devices of
the host do beyond the conformance kit.
"""

from __future__ import annotations

import inspect
import os
import resource
import sys
import textwrap

import pytest

from kvpool import DeviceUnavailable, MLAPool
from kvpool.device import Device, device_entries, get_device
from kvpool.device.cpu import CPUDevice
from kvpool.device.host import CompletedEvent, MetaDevice
from tests.kvpool.cli.plugins import package
from tests.processes import python

SHAPE = {"layers": (0,), "num_pages": 3, "page_size": 4, "dtype": "bf16"}
OPERATIONS = ("store_rows", "load_rows", "copy_items", "copy_runs")


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
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    yield
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
    code = """
        import sys
        import kvpool, kvpool.device, kvpool_cuda, kvpool_npu
        from kvpool.device import device_entries, get_device
        assert {"abacus", "broken", "cpu"} <= set(device_entries())
        get_device("cpu")
        assert not {"abacus", "triton", "torch_npu"} & set(sys.modules)
        get_device("abacus:0")
        assert "abacus" in sys.modules
        """
    python("-c", textwrap.dedent(code))


def test_a_vendors_broken_package_breaks_no_other_device(vendor):
    assert get_device("cpu").name == "cpu"
    with pytest.raises(DeviceUnavailable, match=r"package cannot be loaded: .*no_such_module"):
        get_device("broken")


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_take_the_protocols_arguments(name):
    taken = list(inspect.signature(getattr(CPUDevice(), name)).parameters)
    assert taken == list(inspect.signature(getattr(Device, name)).parameters)[1:]


def test_host_memory_is_there_before_it_is_written():
    memory = CPUDevice().allocate(64 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory[::4096] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 2048  # of 16,384 pages


def test_a_device_without_memory_allocates_sizes():
    memory = MetaDevice().allocate(1 << 50, 2 << 20)
    assert memory.is_meta and memory.numel() == 1 << 50


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_device_without_memory_refuses_to_work(name):
    with pytest.raises(DeviceUnavailable, match="Build it with device='cpu'"):
        getattr(MetaDevice(), name)()


def test_the_host_waits_for_an_event_of_another_device():
    class Later(CompletedEvent):
        waited = 0

        def synchronize(self):
            self.waited += 1

    event = Later()
    CPUDevice().wait(event)
    assert event.waited == 1
