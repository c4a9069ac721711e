"""Every call of torch_npu by the NPU device, checked against the torch-npu package.

The package's schemas are defined in torch under another namespace, with `Operators` behind them:
torch's dispatcher then accepts or refuses each call, as on an NPU.
"""

from __future__ import annotations

import ast
from contextlib import nullcontext
from inspect import Parameter, signature
from types import SimpleNamespace

import pytest
import torch

from kvpool_npu.device import (
    PA_SCATTER_DTYPES,
    RESHAPE_DTYPES,
    SCATTER_DTYPES,
    VIEWED_AS,
    NPUDevice,
)
from kvpool_npu.operators import Operators, Reference, TorchNPU
from tests.kvpool_npu import wheel
from tests.kvpool_npu.pools import NPU, npu_mha, npu_mla, npu_nsa
from tests.kvpool_npu.written import same_bytes, write_everything
from tests.pools import CLASSES, PACKED

NAMES = [
    "npu_scatter_nd_update_",
    "_npu_reshape_and_cache",
    "npu_scatter_pa_kv_cache",
    "npu_gather_pa_kv_cache",
    "npu_dynamic_quant",
]
# of "Norm" caches on A2 and A3: CANN's document of aclnnGatherPaKvCache
GATHERED = {torch.int8, torch.float16, torch.bfloat16}
CONTIGUOUS = {"_npu_reshape_and_cache", "npu_scatter_pa_kv_cache"}


class Wired(TorchNPU):
    """TorchNPU with the package's schemas over operators in plain torch."""

    memory_kind = "cpu"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._host = Reference()
        self._library = torch.library.Library("kvpool_npu_tests", "FRAGMENT")
        module = SimpleNamespace(npu=SimpleNamespace(device=nullcontext))
        for name in NAMES:
            self._library.define(wheel.schemas()[name])
            self._library.impl(name, self._body(name), "CPU")
            setattr(module, name, getattr(torch.ops.kvpool_npu_tests, name))
        super().__init__(module, 0)
        self.zeros, self.record = self._host.zeros, self._host.record

    def _body(self, name):
        def body(*args, **kwargs):
            self.calls.append(name)
            check(name, args, kwargs)
            if name == "npu_dynamic_quant":
                assert kwargs == {"dst_type": 1}  # torch's number of int8
                return Operators.npu_dynamic_quant(*args, dst_type=torch.int8)
            if name == "_npu_reshape_and_cache":  # keywords in Operators
                words = "key", "value", "key_cache", "value_cache", "slot_indices"
                args, kwargs = (), dict(zip(words, args))
            getattr(Operators, name)(*args, **kwargs)
            return args[0] if name.endswith("_") else None

        return body

    def end(self):
        self._library._destroy()


def check(name, args, kwargs):
    """The rules of the package's documents; for ATB, of the calls in released engines."""
    if name in CONTIGUOUS:
        assert all(tensor.is_contiguous() for tensor in args)
        key, value, key_cache, value_cache, slots = args
        assert key.shape[1:] == key_cache.shape[2:] and value.shape[1:] == value_cache.shape[2:]
        assert key_cache.shape[:3] == value_cache.shape[:3] and slots.shape == key.shape[:1]
        assert len({tensor.dtype for tensor in args[:4]}) == 1
    if name == "npu_scatter_nd_update_":
        rows, indices, updates = args
        assert rows.dtype == updates.dtype and rows.dtype in wheel.dtypes(name, "input")
        assert indices.dtype in wheel.dtypes(name, "indices")
        assert 1 <= indices.shape[-1] <= rows.dim() and indices.dim() == 2
        assert updates.shape == (*indices.shape[:-1], *rows.shape[indices.shape[-1] :])
        assert rows.is_contiguous()  # else a copy of the whole cache would be taken and put back
    elif name == "_npu_reshape_and_cache":
        assert key_cache.shape == value_cache.shape and slots.dtype is torch.int32
        assert key_cache[0, 0].nbytes % 32 == 0 and key_cache.dtype in RESHAPE_DTYPES
    elif name == "npu_scatter_pa_kv_cache":
        assert key.dtype in wheel.dtypes(name, "key") and kwargs == {"cache_mode": "Norm"}
        assert slots.dtype in wheel.dtypes(name, "slot_mapping")
    elif name == "npu_gather_pa_kv_cache":
        assert all(tensor.is_contiguous() for tensor in args) and not kwargs
        key_cache, value_cache, tables, lengths, key, value = args
        assert {tables.dtype, lengths.dtype} == {torch.int32}
        assert tables.shape[:1] == lengths.shape and tables.dim() == 2 and lengths.sum() == len(key)
        assert key_cache.shape[:2] == value_cache.shape[:2]
        for cache, rows in ((key_cache, key), (value_cache, value)):
            assert cache.dtype == key.dtype == value.dtype and cache.dtype in GATHERED
            assert cache.dim() == 4 and rows.shape[1:] == cache.shape[2:]
            assert rows[0].nbytes % 32 == 0 and 0 < rows[0].nbytes <= 148 << 10
            assert max(cache.numel(), rows.numel()) < 1 << 31
    elif name == "npu_dynamic_quant":
        assert args[0].dim() > 1 and args[0].dtype in wheel.dtypes(name, "x")


@pytest.fixture
def wired(monkeypatch):
    """A device over the package's schemas, for every pool that is built."""
    operators = Wired()
    device = NPUDevice("npu:0", operators)
    monkeypatch.setattr("kvpool.pools.base.get_device", lambda name: device)
    yield operators
    operators.end()


@pytest.mark.parametrize("name", NAMES)
def test_the_package_has_every_operator_with_the_same_parameters(name):
    theirs = torch._C.parse_schema(wheel.schemas()[name]).arguments
    ours = list(signature(getattr(Operators, name)).parameters.values())
    if name == "npu_scatter_nd_update_":  # documented as input; given by position
        ours[0] = ours[0].replace(name="self")
    places = [each.name for each in ours if each.kind is not Parameter.KEYWORD_ONLY]
    assert places == [argument.name for argument in theirs[: len(places)]]
    named = {each.name for each in ours}
    assert named <= {argument.name for argument in theirs}
    assert all(each.name in named or each.has_default_value() for each in theirs)


def test_an_invalid_call_is_detected(wired):
    cache, rows = torch.zeros(3, 4, 2, 8), torch.zeros(1, 2, 8)
    slots = torch.tensor([5], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cache_modes"):
        torch.ops.kvpool_npu_tests.npu_scatter_pa_kv_cache(
            rows, rows, cache, cache, slots, cache_modes="Norm"
        )
    with pytest.raises(AssertionError):  # float32, which ATB does not take
        wired.operators._npu_reshape_and_cache(
            key=rows, value=rows, key_cache=cache, value_cache=cache, slot_indices=slots
        )


def test_operators_write_the_arguments_that_their_schemas_name():
    written = {
        "npu_scatter_nd_update_": ["self"],
        "_npu_reshape_and_cache": ["key_cache", "value_cache"],
        "npu_scatter_pa_kv_cache": ["key_cache", "value_cache"],
        "npu_gather_pa_kv_cache": ["key", "value"],
        "npu_dynamic_quant": [],
    }
    for name in NAMES:
        schema = torch._C.parse_schema(wheel.schemas()[name])
        changed = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        assert changed == written[name]


def test_dtypes_passed_to_operators_are_documented():
    name = "npu_scatter_nd_update_"
    assert set(SCATTER_DTYPES) == wheel.dtypes(name, "input") == wheel.dtypes(name, "updates")
    assert set(VIEWED_AS.values()) <= set(SCATTER_DTYPES)
    assert all(dtype.itemsize == size for size, dtype in VIEWED_AS.items())
    assert set(PA_SCATTER_DTYPES) <= wheel.dtypes("npu_scatter_pa_kv_cache", "key")


def test_the_package_holds_the_operator_of_atb_under_the_declared_signature():
    library = (wheel.folder() / "lib" / "libop_plugin_atb.so").read_bytes()
    assert b"_ZN3atb22_npu_reshape_and_cacheERKN2at6TensorES3_RS1_S4_S3_\0" in library


def test_events_and_streams_have_the_methods_that_are_called():
    classes = {
        node.name: {f.name: [a.arg for a in f.args.args] for f in node.body if hasattr(f, "args")}
        for node in ast.parse(wheel.text("npu/streams.py")).body
        if isinstance(node, ast.ClassDef)
    }
    assert classes["Event"]["record"] == ["self", "stream"]
    assert classes["Stream"]["wait_event"] == ["self", "event"]
    assert {"query", "synchronize"} <= set(classes["Event"])
    utils = ast.parse(wheel.text("npu/utils.py")).body
    (current,) = [f for f in utils if getattr(f, "name", "") == "current_stream"]
    assert [argument.arg for argument in current.args.args] == ["device"]
    exported = wheel.text("npu/__init__.py")
    used = "Event", "current_stream", "device", "device_count"
    assert all(f'"{name}"' in exported for name in used)


@pytest.mark.parametrize("name", NPU)
def test_npu_pools_write_the_same_bytes_through_operators(name, wired, monkeypatch):
    through = NPU[name]()
    monkeypatch.undo()
    same_bytes(through, NPU[name](device="cpu"), write_everything)
    assert "npu_scatter_nd_update_" in wired.calls


@pytest.mark.parametrize("placement", ["layer", "page", "stack"])
@pytest.mark.parametrize("name", [*CLASSES, *(n for n in PACKED if "fp8" in n)])
def test_gpu_pools_write_the_same_bytes_on_an_npu(name, placement, wired, monkeypatch):
    through = PACKED.get(name, CLASSES.get(name))(placement=placement)
    monkeypatch.undo()
    plain = PACKED.get(name, CLASSES.get(name))(placement=placement, device="cpu")
    same_bytes(through, plain, write_everything)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (npu_mha, ["_npu_reshape_and_cache"]),
        (npu_mha.but(packing="f32"), ["npu_scatter_pa_kv_cache"]),
        (npu_mha.but(v_head_dim=16), ["npu_scatter_pa_kv_cache"]),
        (npu_mha.but(packing="e4m3"), ["_npu_reshape_and_cache"]),  # as int8
        (npu_mha.but(packing="e4m3", head_dim=6), ["npu_scatter_pa_kv_cache"]),  # rows of 24 bytes
        (npu_mha.but(packing="f64"), ["npu_scatter_nd_update_"] * 2),  # as int64
        (npu_mha.but(packing="fp8"), ["_npu_reshape_and_cache", "npu_scatter_pa_kv_cache"]),
        (npu_nsa, ["npu_scatter_nd_update_"] * 2),
    ],
)
def test_k_and_v_are_one_launch_where_an_operator_takes_both(build, expected, wired):
    pool = build()
    first, second = (
        torch.zeros(3, *pool.view(role, 1).shape[2:], dtype=getattr(torch, pool.dtype))
        for role in pool.kinds[0][0].inputs
    )
    pool.set_kv_buffer(1, [4, 9, 6], first, second)
    assert wired.calls == expected


@pytest.mark.parametrize(
    ("build", "launches"),
    [
        (npu_mha, 1),
        (npu_mha.but(packing="f32"), 1),  # as float16
        (npu_mha.but(v_head_dim=16), 1),
        (npu_mha.but(packing="e4m3"), 1),  # as int8
        (npu_mha.but(packing="e4m3", v_head_dim=16), 1),
        (npu_mha.but(packing="e4m3", head_dim=6), 0),  # rows of 24 bytes
        (npu_mha.but(packing="fp8"), 1),  # the scales of a token are 16 bytes
        (npu_mha.but(packing="fp8", num_kv_heads=8), 2),
        (npu_mla.but(qk_rope_head_dim=16), 1),
        (npu_mla, 0),  # a rope key has 16 bytes
        (npu_mha.but(placement="page"), 0),  # apart
    ],
)
def test_k_and_v_are_read_in_one_launch_where_the_operator_takes_both(build, launches, wired):
    pool = build()
    roles = pool.kinds[0][0].inputs
    rows = [torch.randn(3, *pool.view(role, 1).shape[2:]).to(torch.bfloat16) for role in roles]
    rows = [given.to(getattr(torch, pool.dtype)) for given in rows]
    pool.set_kv_buffer(1, [4, 9, 6], *rows)
    wired.calls.clear()
    found = pool.get_kv_buffer(1, [6, 4, 6])
    assert wired.calls == ["npu_gather_pa_kv_cache"] * launches
    for got, given in zip(found, rows):
        expected, step = given.float()[[2, 0, 2]], 0.07 if pool.packing == "fp8" else 0
        assert ((got.float() - expected).abs() <= step * expected.abs().max()).all()


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (npu_mha.but(layers=(0,)), ["npu_gather_pa_kv_cache", *["npu_scatter_nd_update_"] * 2]),
        (
            npu_mha.but(packing="e4m3", page_size=1, layers=(0,), head_dim=6),
            ["npu_scatter_nd_update_"] * 2,
        ),
        (npu_mha.but(placement="page"), []),
    ],
)
def test_contiguous_items_are_copied_by_operators(build, expected, wired):
    pool = build()
    pool.scatter(0, [pool.page_size], {"k": torch.ones_like(pool.view("k", 0)[:1, 0])})
    wired.calls.clear()
    pool.copy_items("kv", [1], [3])
    assert wired.calls == expected and (pool.view("k", 0)[3, 0].float() == 1).all()


@pytest.mark.parametrize(
    ("packing", "expected"),
    [
        (None, ["npu_scatter_nd_update_"]),
        ("fp8", ["npu_scatter_nd_update_"] * 2),
        ("int8", ["npu_dynamic_quant", *["npu_scatter_nd_update_"] * 2]),
    ],
)
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16])
def test_index_keys_are_quantised_by_the_operator(packing, expected, given, wired):
    pool = npu_nsa(index_packing=packing, packing=given)
    pool.set_index_key(3, [4, 9, 6], torch.randn(3, 16, dtype=given))
    assert wired.calls == expected
