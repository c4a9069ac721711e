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
from kvpool.device.cpu import CPUDevice
from kvpool.device.torch_ops import WriteRow, bits
from kvpool_npu import NPUDevice, missing
from kvpool_npu.device import reference
from kvpool_npu.operators import Operators, TorchNPU
from tests.kvpool_npu.pools import NPU, npu_mha
from tests.kvpool_npu.written import same_bytes, write_everything
from tests.pools import PACKED

TWO_MIB = 2 << 20


@pytest.mark.parametrize("nbytes", [1, 4096, TWO_MIB, TWO_MIB + 1])
@pytest.mark.parametrize("alignment", [None, 64, TWO_MIB, 4 * TWO_MIB])
def test_memory_is_zeroed_and_aligned(nbytes, alignment):
    slab = reference("npu-reference").allocate(nbytes, alignment)
    assert slab.data_ptr() % (alignment or TWO_MIB) == 0
    assert (slab.dtype, slab.numel()) == (torch.uint8, nbytes)
    assert not slab.any()


@pytest.mark.parametrize("name", NPU)
def test_npu_pools_leave_the_same_bytes_as_on_a_cpu(name):
    same_bytes(NPU[name](device="npu-reference"), NPU[name](), write_everything)


@pytest.mark.parametrize("placement", ["layer", "page", "stack"])
@pytest.mark.parametrize("name", [name for name in PACKED if "fp8" in name])
def test_gpu_pools_leave_the_same_bytes_as_on_a_cpu(name, placement):
    build = PACKED[name].but(placement=placement)
    same_bytes(build(device="npu-reference"), build(), write_everything)


def test_the_reference_device_uses_host_memory():
    device = get_device("npu-reference")
    assert (device.name, device.memory_kind) == ("npu-reference", "cpu")
    assert (device.alignment, device.registration_limit) == (TWO_MIB, 256)
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


def test_an_empty_list_of_locations_writes_nothing():
    pool = npu_mha(device="npu-reference")
    none = torch.zeros(0, 4, 8, dtype=torch.bfloat16)
    pool.set_kv_buffer(0, [], none, none)
    assert [part.shape for part in pool.get_kv_buffer(0, [])] == [none.shape] * 2
    pool.copy_items("kv", [], [])
    assert not pool._slab.any()


def test_more_slots_than_int32_use_the_operator_that_takes_int64(monkeypatch):
    monkeypatch.setattr("kvpool_npu.device.INT32_MAX", 9 * 4 - 1)
    pool, calls = npu_mha(device="npu-reference"), []
    operators = pool.device.operators
    for name in ("_npu_reshape_and_cache", "npu_scatter_pa_kv_cache"):
        monkeypatch.setattr(operators, name, lambda *_, name=name, **__: calls.append(name))
    values = torch.zeros(1, 4, 8, dtype=torch.bfloat16)
    pool.set_kv_buffer(0, [35], values, values)
    assert calls == ["npu_scatter_pa_kv_cache"]


@pytest.mark.parametrize(
    ("name", "most", "times"),
    [("MAX_GATHER_ROW", 64, 1), ("INT32_MAX", 9 * 4 * 64, 1), ("INT32_MAX", 99 * 64, 33)],
)
def test_reads_beyond_the_gather_operators_limits_are_indexed(monkeypatch, name, most, times):
    """Each limit is exceeded by one byte: pools of 36 entries of 64 bytes."""
    pool, calls = npu_mha(device="npu-reference"), []
    keys, values = torch.randn(2, 3, 4, 8).to(torch.bfloat16)
    pool.set_kv_buffer(0, [4, 5, 35], keys, values)
    gather = pool.device.operators.npu_gather_pa_kv_cache
    monkeypatch.setattr(
        pool.device.operators,
        "npu_gather_pa_kv_cache",
        lambda *args: (calls.append(args[2].numel()), gather(*args)),
    )
    for limit, expected in ((most, [3 * times]), (most - 1, [])):
        monkeypatch.setattr(f"kvpool_npu.device.{name}", limit)
        found = pool.get_kv_buffer(0, [4, 5, 35] * times)
        assert calls == expected
        for got, given in zip(found, (keys, values)):
            assert torch.equal(got, given.repeat(times, 1, 1))
        calls.clear()


def test_the_reference_gathers_sequences_by_their_pages():
    keys, values = torch.randn(7, 4, 1, 3), torch.randn(7, 4, 2, 5)
    tables = torch.tensor([[6, 0, 2], [1, 1, 1], [3, 5, 4]], dtype=torch.int32)
    lengths = [5, 0, 12]
    found = torch.zeros(17, 1, 3), torch.zeros(17, 2, 5)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    Operators.npu_gather_pa_kv_cache(keys, values, tables, seq_lens, *found)
    for cache, rows in zip((keys, values), found):
        expected = [cache[t].flatten(0, 1)[:n] for t, n in zip(tables.tolist(), lengths)]
        assert torch.equal(rows, torch.cat(expected))


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [torch.float16, torch.float32])
def test_the_quantising_operator_gives_the_bytes_of_a_cpu(given, scale, monkeypatch):
    """Also for rows with infinities or NaN, whatever the operator returns."""
    device, cpu = get_device("npu-reference"), CPUDevice()
    rows = torch.randn(64, 16) * 2.0 ** torch.arange(-32, 32)[:, None].clamp(max=14)
    rows[3], rows[5, 2], rows[7, 0], rows[9, 15] = 0.0, torch.nan, torch.inf, -torch.inf
    rows, where = rows.to(given), torch.randperm(64)
    dynamic = device.operators.npu_dynamic_quant

    def npu_dynamic_quant(values, *, dst_type):
        held, scales = dynamic(values, dst_type=dst_type)
        odd = ~values.isfinite().all(-1)
        return held.masked_fill(odd[:, None], 7), scales.masked_fill(odd, 0.5)

    monkeypatch.setattr(device.operators, "npu_dynamic_quant", npu_dynamic_quant)
    held = [[torch.zeros(16, 4, 16).to(torch.int8), torch.zeros(16, 4, 1).to(scale)] for _ in "ab"]
    for kind, (view, scales) in zip((device, cpu), held):
        kind.store_rows([WriteRow(view, rows, scales)], where)
    for ours, theirs in zip(*held):
        assert torch.equal(bits(ours), bits(theirs))


# TorchNPU's events


def test_the_stream_waits_for_an_npu_event_and_the_host_for_any_other():
    class Event:
        def record(self, stream):
            self.stream = stream

    class OtherEvent:
        waited = False

        def synchronize(self):
            self.waited = True

    class Stream(list):
        wait_event = list.append

    stream = Stream()
    npu = SimpleNamespace(Event=Event, current_stream={2: stream}.get)
    operators = TorchNPU(SimpleNamespace(npu=npu), 2)
    event = operators.record()
    assert event.stream is stream
    operators.wait(event)
    assert stream == [event]
    operators.wait(other := OtherEvent())
    assert other.waited and stream == [event]


# what is missing

PARTS = {
    "_driver": (False, "an NPU with its driver (/dev/davinci_manager)"),
    "_cann": (False, "CANN (ASCEND_HOME_PATH with libascendcl.so: source its set_env.sh)"),
    "_package": (False, "torch_npu (pip install 'kvpool[npu]')"),
    "_version": ("2.1.0", f"the torch-npu for torch {torch.__version__} (2.1.0 is installed)"),
}


@pytest.fixture
def complete(monkeypatch):
    """A machine with everything installed and two NPUs."""
    found = {"_driver": True, "_cann": True, "_package": True, "_version": torch.__version__}
    for name, value in found.items():
        monkeypatch.setattr(f"kvpool_npu.missing.{name}", lambda value=value: value)
    npu = SimpleNamespace(device_count=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu))


@pytest.mark.parametrize("absent", [(name,) for name in PARTS] + [tuple(PARTS)])
def test_one_sentence_names_everything_that_is_missing(complete, monkeypatch, absent):
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # importing it would be an error
    for name in absent:
        monkeypatch.setattr(f"kvpool_npu.missing.{name}", lambda value=PARTS[name][0]: value)
    said = NPUDevice("npu:0").availability()
    assert said == f"missing: {'; '.join(PARTS[name][1] for name in absent)}."


@pytest.mark.parametrize("name", ["npu", "npu:0", "npu:1"])
def test_an_installed_npu_is_available(complete, name):
    assert NPUDevice(name).availability() is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("npu:2", "2 NPUs are visible, numbered from 0."),
        ("npu:9", "2 NPUs are visible, numbered from 0."),
        ("npu:x", "an NPU is named by its number, as npu:0."),
        ("npu:-1", "an NPU is named by its number, as npu:0."),
    ],
)
def test_an_npu_with_too_high_a_number_is_refused(complete, name, says):
    assert NPUDevice(name).availability() == says
    with pytest.raises(DeviceUnavailable, match=f"device '{name}': "):
        get_device(name)


def test_a_package_that_cannot_be_imported_says_why(complete, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert NPUDevice("npu:0").availability().startswith("torch_npu cannot be imported: ")


def test_cann_is_where_its_environment_points(monkeypatch, tmp_path):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert not missing._cann()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert not missing._cann()
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libascendcl.so").touch()
    assert missing._cann()


def test_a_pool_on_a_missing_npu_is_refused(monkeypatch):
    if NPUDevice("npu:0").availability() is None:
        return  # an NPU is here
    with pytest.raises(DeviceUnavailable, match="device 'npu:7': missing: an NPU with its driver"):
        npu_mha(device="npu:7")
    assert isinstance(get_device("cpu"), CPUDevice)
