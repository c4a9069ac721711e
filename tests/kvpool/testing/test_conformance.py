"""The conformance kit: correct devices and pools pass, each kind of fault fails a named check, and
other projects do not notice the kit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvpool.device.quant
from kvpool import DeviceUnavailable, MHAPool
from kvpool.device import get_device, torch_ops
from kvpool.device.cpu import CompletedEvent, CPUDevice
from kvpool.device.torch_ops import WriteRow
from kvpool.testing import POOLS, ConformanceError, check_device, check_pool
from kvpool.testing.run import device_checks
from tests.kvpool.cli.plugins import package
from tests.pools import CONFORMING

DOCUMENT = Path(__file__).parents[3] / "docs" / "add-a-device.md"
CODE = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.S | re.M)


@pytest.mark.parametrize("pool", CONFORMING)
def test_every_pool_conforms_on_the_cpu(pool):
    assert check_pool(POOLS[pool], "cpu", others=POOLS[pool].others) == []


@pytest.mark.parametrize("check", device_checks(get_device("cpu")), ids=lambda check: check.name)
def test_the_cpu_conforms(check, copies):
    check()


# devices with a fault each


def dense(tensor):
    """A tensor's memory, as if it were contiguous."""
    strides = torch.empty(tensor.shape).stride()
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


class Shifted(CPUDevice):  # stores one entry too far
    def store_rows(self, rows, locations):
        entries = rows[0].view.shape[0] * rows[0].view.shape[1]
        torch_ops.store_rows(rows, (locations + 1) % entries)


class Padder(CPUDevice):  # rounds rows of 7 bytes up to 8
    def store_rows(self, rows, locations):
        torch_ops.store_rows(rows, locations)
        parts = [part for row in rows for part in (row.view, row.scales) if part is not None]
        for part in (part for part in parts if part.shape[-1] == 7):
            wide = part.view(torch.uint8).unsqueeze(-1).expand(*part.shape, 2)
            sizes, strides = [*part.shape[:2], 8], [*part.stride()[:2], 1]
            wide = wide.as_strided(sizes, strides, part.storage_offset())
            wide[locations // part.shape[1], locations % part.shape[1], 7] = 0


class Dense(CPUDevice):  # reads as if there were no gaps between the entries
    def load_rows(self, rows, locations):
        rows = [row._replace(view=dense(row.view)) for row in rows]
        return torch_ops.load_rows(rows, locations)


class Repeating(CPUDevice):  # reads the first role of each dtype for all of that dtype
    def load_rows(self, rows, locations):
        first = {}
        rows = [first.setdefault(row.view.dtype, row) for row in rows]
        return torch_ops.load_rows(rows, locations)


class Straight(CPUDevice):  # ignores the strides of values
    def store_rows(self, rows, locations):
        torch_ops.store_rows([row._replace(values=dense(row.values)) for row in rows], locations)


class Truncating(CPUDevice):  # quantises towards zero
    def store_rows(self, rows, locations):
        for view, values, scales in rows:
            if scales is None:
                torch_ops.store_rows([WriteRow(view, values)], locations)
                continue
            codes, factors = kvpool.device.quant.quantise(values, scales.shape[-1], scales.dtype)
            blocks = values.float().unflatten(-1, (factors.shape[-1], -1))
            exact = (blocks / factors.float()[..., None]).reshape(codes.shape)
            away = codes.float().abs() > exact.abs()
            codes = (codes.view(torch.uint8) - away.to(torch.uint8)).view(codes.dtype)
            torch_ops.store_rows([WriteRow(view, codes), WriteRow(scales, factors)], locations)


class Blind(CPUDevice):  # quantises an infinity as a large number
    def store_rows(self, rows, locations):
        rows = [
            row._replace(values=row.values.nan_to_num()) if row.scales is not None else row
            for row in rows
        ]
        torch_ops.store_rows(rows, locations)


class Eager(CPUDevice):  # writes an item before it has read the next
    def copy_items(self, views, src, dst, disjoint=False):
        for source, dest in zip(src.split(1), dst.split(1)):
            torch_ops.copy_items(views, source, dest)


class Short(CPUDevice):  # copies items without their last byte
    def copy_items(self, views, src, dst, disjoint=False):
        torch_ops.copy_items([view[:, :-1] for view in views], src, dst)


class Runaway(CPUDevice):  # copies a byte more than a run has
    def copy_runs(self, src, dst, nbytes):
        CPUDevice.copy_runs(src, dst, nbytes + (nbytes > 0))


class Dirty(CPUDevice):  # does not zero memory
    def allocate(self, nbytes, alignment=None):
        return super().allocate(nbytes, alignment).fill_(0x55)


class Askew(CPUDevice):  # aligns to 64 bytes, whatever is requested
    def allocate(self, nbytes, alignment=None):
        return super().allocate(nbytes + 64)[64:]


class Twice(CPUDevice):  # gives the same memory to all
    memory = CPUDevice().allocate(8 << 20, 2 << 20)

    def allocate(self, nbytes, alignment=None):
        return self.memory[:nbytes].zero_()


class Nameless(CPUDevice):  # has no second device, but fails only in allocate
    def allocate(self, nbytes, alignment=None):
        if ":" in self.name:
            raise RuntimeError("no such device")
        return super().allocate(nbytes, alignment)


class Late(CPUDevice):  # works asynchronously, in order, which is correct
    pause = 2e-4

    def __init__(self, name):
        super().__init__(name)
        self.worker = ThreadPoolExecutor(1)

    def queue(self, work, *arguments) -> Future:
        return self.worker.submit(lambda: (time.sleep(self.pause), work(*arguments)))

    def store_rows(self, *arguments):
        self.queue(torch_ops.store_rows, *arguments)

    def copy_items(self, views, src, dst, disjoint=False):
        self.queue(torch_ops.copy_items, views, src, dst)

    def copy_runs(self, *arguments):
        self.queue(CPUDevice.copy_runs, *(column.copy() for column in arguments))

    def load_rows(self, rows, locations):
        found = []
        for row in rows:
            dtype = row.view.dtype if row.scales is None else row.dtype
            found.append(torch.empty(len(locations), *row.view.shape[2:], dtype=dtype))
            self.queue(self.read, row, locations, found[-1])
        return found

    @staticmethod
    def read(row, locations, out):
        (read,) = torch_ops.load_rows([row], locations)
        torch_ops.bits(out).copy_(torch_ops.bits(read))

    def record(self):
        return Ended(self.queue(lambda: None))

    def wait(self, event):
        self.queue(event.synchronize)


class Ended:
    def __init__(self, future):
        self.query, self.synchronize = future.done, future.result


class Hasty(Late):  # the same, but its events end before the work does
    pause = 0.01

    def record(self):
        return CompletedEvent()


ONE_POOL = "mha hnd bf16"
# (the fault, the pool if the check is of one, the check, words of the message)
FAULTS = [
    (Shifted, None, "work_waits_for_an_event", "store_rows after an event: byte"),
    (Padder, None, "entries_of_any_dtype_are_stored_and_loaded", "rows of 7"),
    (Dense, None, "entries_of_any_dtype_are_stored_and_loaded", "load_rows of uint8 rows"),
    (Repeating, None, "rows_of_all_kinds_are_loaded_in_one_call", "entries, row 3"),
    (Truncating, None, "floats_are_quantised_into_every_format", "as float8_e4m3fn with 1"),
    (Blind, None, "floats_are_quantised_into_every_format", "0x7f expected"),
    (Eager, None, "items_are_copied_in_all_views", "copy_items of 40 items: byte"),
    (Short, None, "an_event_tells_when_work_has_ended", "copy_items, one item after another"),
    (Runaway, None, "runs_are_copied_to_the_byte", "copy_runs of"),
    (Dirty, None, "memory_is_zero_aligned_and_its_own", "byte 0: 0x55 found"),
    (Askew, None, "memory_is_zero_aligned_and_its_own", "past a multiple of"),
    (Twice, None, "memory_is_zero_aligned_and_its_own", "overlaps memory in use"),
    (Nameless, None, "a_device_that_is_not_there_is_refused_by_name", "RuntimeError (no"),
    (Hasty, None, "an_event_tells_when_work_has_ended", "an event had ended before"),
    (Shifted, "mla bf16", "scatter_writes_these_bytes_and_no_others", "target layer 0 latent"),
    (Padder, "dsv4 fp8, rows of 584", "scatter_writes_these_bytes_and_no_others", "padding, byte"),
    (Straight, "mla bf16", "values_may_have_any_strides", "target layer 0 latent"),
    (Truncating, "mla fp8", "write_packs_as_the_formats_say", "target layer 0 latent: item"),
    (Blind, "mha mxfp8", "write_packs_extremes", "0x7f expected"),
    (Eager, ONE_POOL, "chained_copies_read_before_they_write", "target layer"),
    (Short, ONE_POOL, "copied_items_arrive_whole", "target layer"),
    (Dense, ONE_POOL, "gather_reads_these_bytes", "target layer"),
    (Runaway, ONE_POOL, "the_device_copies_the_runs_of_a_plan", "target layer"),
    (Dirty, ONE_POOL, "a_new_pool_is_zero_and_aligned", "0x55 found"),
    (Twice, ONE_POOL, "two_pools_share_no_byte", "target layer"),
]
DEVICES = [*{kind: None for kind, *_ in FAULTS}, Late]


@pytest.fixture(scope="module", autouse=True)
def vendors(tmp_path_factory):
    """The devices above, installed like a vendor's."""
    root = tmp_path_factory.mktemp("vendors")
    lines = [f"{kind.__name__.lower()} = {__name__}:{kind.__name__}" for kind in DEVICES]
    joined = ["[kvpool.testing]", f"vendors = {__name__}"]
    package(root, "vendors", "\n".join(["[kvpool.devices]", *lines, *joined]))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        yield


@pytest.mark.parametrize(("kind", "pool", "check", "words"), FAULTS)
def test_a_fault_fails_a_check_by_name(kind, pool, check, words):
    name = kind.__name__.lower()
    with pytest.raises(ConformanceError, match=re.escape(words)) as failure:
        if pool is None:
            check_device(name, ["mla bf16"])
        else:
            check_pool(POOLS[pool], name)
    assert (failure.value.device, failure.value.check) == (name, check)
    assert failure.value.pool == ("" if pool is None else "Example")
    assert str(failure.value).startswith(f"device {name}")


def test_a_device_that_works_asynchronously_conforms():
    assert check_device("late", ["mla fp8, rows of 656"]) == []


def test_a_device_that_is_unavailable_or_has_no_memory_cannot_be_checked():
    with pytest.raises(DeviceUnavailable, match="no installed package offers 'tpu'"):
        check_device("tpu")
    with pytest.raises(ValueError, match="device meta: it has no memory"):
        check_device("meta")


# pools of third parties


class Flags(MHAPool):  # a third party's pool, small unless it is told otherwise
    def __init__(self, **more):
        shape = {"num_kv_heads": 2, "head_dim": 8, "layers": (0, 2), "total_kv_layers": 3}
        super().__init__(**{**shape, "num_pages": 5, "page_size": 4, "dtype": "bf16", **more})


class Swapped(Flags):  # lists its buffers wrongly
    def get_contiguous_buf_infos(self):
        infos = super().get_contiguous_buf_infos()
        return infos._replace(layer_ids=infos.layer_ids[::-1])


class Elsewhere(Flags):  # its views are misplaced
    def view(self, role, layer):
        return super().view("k" if role == "v" else role, layer)


class Other(Flags):  # depends on its device
    def __init__(self, **more):
        self.on_meta = more.get("device") == "meta"
        super().__init__(**more)

    def declare(self):
        for part in super().declare():
            yield replace(part, layers=part.layers[: 1 if self.on_meta else None])


SEEN = []


def a_vendors_check(case):
    SEEN.append(case.pool)


POOL_CHECKS = (a_vendors_check,)


def test_a_pool_class_of_ones_own_passes_also_the_checks_that_packages_add_by_entry_point():
    assert check_pool(Flags) == []
    assert "Flags" in SEEN


@pytest.mark.parametrize(
    ("pool", "check", "words"),
    [
        (Swapped, "contiguous_lists", "is listed for layer 2, but has no such region"),
        (Elsewhere, "views_described_back_are_the_layout", ""),
        (Other, "sizes_without_memory_are_the_same", ""),
    ],
)
def test_a_pool_that_is_described_wrongly_is_found(pool, check, words):
    with pytest.raises(ConformanceError, match=f"pool {pool.__name__}, check {check}") as failure:
        check_pool(pool)
    assert words in str(failure.value)


# the command


def kit(where: Path, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=where,
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_documents_device_conforms_by_the_documents_command(tmp_path):
    (tmp_path / "huge_pages.py").write_text(CODE[0])
    toml = re.search(r"^```toml\n(.*?)^```", DOCUMENT.read_text(), re.S | re.M)[1]
    package(tmp_path, "huge_pages", re.sub(r'project.entry-points.|"', "", toml))
    done = kit(
        tmp_path,
        *("--pyargs", "kvpool.testing", "--device", "huge"),
        *("--pool", "mla fp8, *", "--pool", "mha hnd bf16"),
        "-v",
        PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[mha hnd bf16-chained_copies_read_before_they_write] PASSED" in done.stdout
    assert "[mla fp8, rows of 656-write_packs_extremes] PASSED" in done.stdout
    assert "[huge-an_event_tells_when_work_has_ended] PASSED" in done.stdout
    assert "nsa" not in done.stdout


def test_the_command_refuses_an_unavailable_device(tmp_path):
    done = kit(tmp_path, "--pyargs", "kvpool.testing", "--device", "tpu:1")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "device 'tpu:1': no installed package offers 'tpu'" in done.stderr


CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--device", type=int, default=7)
    parser.addoption("--pool", type=int, default=8)
"""


def test_a_project_may_have_options_of_the_same_names(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(
        "def test_it(pytestconfig):\n"
        "    assert pytestconfig.getoption('device') == 3\n"
        "    assert pytestconfig.getoption('pool') == 8\n"
    )
    done = kit(tmp_path, "--device", "3", "test_it.py")
    assert done.returncode == 0, done.stdout + done.stderr
    # and the kit runs inside a project that has its own
    (tmp_path / "conftest.py").write_text(CONFTEST.replace("type=int, default=7", ""))
    only = "-k", "its_properties_are_valid"
    done = kit(tmp_path, "--pyargs", "kvpool.testing", "--device", "cpu", *only)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_a_project_without_such_options_gets_none(tmp_path):
    done = kit(tmp_path, "--device", "cpu")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unrecognized arguments: --device" in done.stderr


def test_the_plugin_imports_neither_torch_nor_numpy():
    code = "import sys, kvpool.testing.plugin; sys.exit(bool({'torch', 'numpy'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
