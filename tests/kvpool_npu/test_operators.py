"""Every call of torch_npu by the NPU device, checked against the torch-npu package.

The package's schema is defined in torch under another namespace, with plain torch behind it:
torch's dispatcher then accepts or refuses each call, as on an NPU.
"""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest
import torch

from kvpool.device import get_device
from kvpool.testing.case import Case
from kvpool.testing.checks import access, layout
from kvpool.testing.memory import Trial
from kvpool_npu.device import VIEWED_AS, ReferenceNPU, TorchOperators
from tests.kvpool_npu import wheel
from tests.kvpool_npu.pools import NPU
from tests.pools import CLASSES, PACKED

NAME = "npu_scatter_nd_update_"


@pytest.fixture
def calls(monkeypatch):
    """Calls of the operator; every pool that is built has a device over the package's schema."""
    shapes, library = [], torch.library.Library("kvpool_npu_tests", "FRAGMENT")

    def body(rows, indices, updates):
        """Follows the package's document."""
        shapes.append(updates.shape)
        assert rows.dtype == updates.dtype and rows.dtype in wheel.dtypes(NAME, "input")
        assert indices.dtype in wheel.dtypes(NAME, "indices")
        assert 1 <= indices.shape[-1] <= rows.dim() and indices.dim() == 2
        assert updates.shape == (*indices.shape[:-1], *rows.shape[indices.shape[-1] :])
        assert rows.is_contiguous()  # else a copy of the whole cache would be taken and put back
        TorchOperators.npu_scatter_nd_update_(rows, indices, updates)
        return rows

    library.define(wheel.schema(NAME))
    library.impl(NAME, body, "CPU")
    device = ReferenceNPU("npu:0")
    device.torch_npu = SimpleNamespace(**{NAME: getattr(torch.ops.kvpool_npu_tests, NAME)})
    monkeypatch.setattr("kvpool.pools.base.get_device", lambda name: device)
    yield shapes
    library._destroy()


def test_an_invalid_call_is_detected(calls):
    operator = getattr(torch.ops.kvpool_npu_tests, NAME)
    with pytest.raises(RuntimeError, match="received 4 argument"):
        operator(torch.zeros(3, 4), torch.tensor([[1]]), torch.zeros(1, 4), mode="Norm")
    with pytest.raises(AssertionError):  # a dtype that it does not take
        operator(*(torch.zeros(n, 4).double() for n in (3, 1, 1)))


def test_the_operator_writes_its_first_argument():
    arguments = torch._C.parse_schema(wheel.schema(NAME)).arguments
    written = [a.name for a in arguments if a.alias_info and a.alias_info.is_write]
    assert (len(arguments), written) == (3, ["self"])


def test_dtypes_passed_to_the_operator_are_documented():
    for parameter in ("input", "updates"):
        assert set(VIEWED_AS.values()) <= wheel.dtypes(NAME, parameter)
    assert all(dtype.itemsize == size for size, dtype in VIEWED_AS.items())


def test_events_and_streams_have_the_methods_that_are_called():
    classes = {
        node.name: {f.name: [a.arg for a in f.args.args] for f in node.body if hasattr(f, "args")}
        for node in ast.parse(wheel.text("npu/streams.py")).body
        if isinstance(node, ast.ClassDef)
    }
    assert classes["Stream"]["record_event"] == ["self", "event"]
    assert classes["Stream"]["wait_event"] == ["self", "event"]
    assert {"query", "synchronize"} <= set(classes["Event"])
    utils = ast.parse(wheel.text("npu/utils.py")).body
    (current,) = [f for f in utils if getattr(f, "name", "") == "current_stream"]
    assert [argument.arg for argument in current.args.args] == ["device"]
    exported = wheel.text("npu/__init__.py")
    assert all(f'"{name}"' in exported for name in ("Event", "current_stream", "device_count"))


@pytest.mark.parametrize("placement", ["layer", "page", "stack"])
@pytest.mark.parametrize(
    "build",
    [*NPU.values(), *CLASSES.values(), *(b for name, b in PACKED.items() if "fp8" in name)],
)
def test_pools_are_written_and_copied_through_the_operator(build, placement, calls):
    trial = Trial(Case(get_device("npu-reference"), "a pool", build.but(placement=placement)))
    access.scatter_writes_these_bytes_and_no_others(trial)
    access.write_packs_as_the_formats_say(trial)
    layout.copied_items_arrive_whole(trial)
    trial.check()
    assert calls or placement == "page"
