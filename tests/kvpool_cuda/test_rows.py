"""store_rows and load_rows of any geometry, against the reference in plain torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kvpool.device import torch_ops
from kvpool.device.torch_ops import ReadRow, WriteRow
from kvpool.layout.dtypes import ITEMSIZE
from tests.kvpool_cuda.devices import MEMORY, as_bits, device, zeros
from tests.kvpool_cuda.geometries import entries, grids

DTYPES = [getattr(torch, n) for n in ITEMSIZE if n not in ("bool", "float4_e2m1fn_x2")]


def noise(count, dtype, seed=0):
    random = torch.Generator().manual_seed(seed)
    nbytes = count * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=random).view(dtype)


def both(memory):
    """The same bytes on the host and on the device."""
    held = zeros(memory.shape, memory.dtype)
    held.view(torch.uint8).copy_(memory.view(torch.uint8))
    return memory.clone(), held


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), entries()), min_size=1, max_size=1))
def test_any_strides_and_dtypes_are_stored_and_loaded(given_rows):
    for dtype, (numbers, view, grid) in given_rows:
        locations = torch.tensor(numbers)
        memory, held = both(noise(view.room(), dtype))
        source, values = both(noise(grid.room(), dtype, seed=1))
        torch_ops.store_rows([WriteRow(view.of(memory), grid.of(source))], locations)
        device().store_rows([WriteRow(view.of(held), grid.of(values))], locations.to(MEMORY))
        assert torch.equal(as_bits(held), as_bits(memory))
        (read,) = device().load_rows([ReadRow(view.of(held))], locations.to(MEMORY))
        assert read.is_contiguous() and read.dtype is dtype
        assert torch.equal(as_bits(read), as_bits(grid.of(source)))


@st.composite
def quantised(draw):
    numbers, view, values = draw(entries())
    scales = draw(st.sampled_from([n for n in (1, 2, 3, 8) if view.shape[-1] % n == 0]))
    return numbers, view, values, draw(grids((*view.shape[:-1], scales)))


@settings(max_examples=30)
@given(
    quantised(),
    st.sampled_from([torch.float8_e4m3fn, torch.int8]),
    st.sampled_from([torch.float32, torch.float16, torch.float8_e8m0fnu]),
    st.booleans(),
)
def test_any_strides_are_quantised_and_read_back(geometry, code, factor, wide):
    numbers, view, grid, scales = geometry
    locations, dtype = torch.tensor(numbers), torch.float32 if wide else torch.bfloat16
    memory, held = both(noise(view.room(), code))
    sizes, factors = both(noise(scales.room(), factor, seed=2))
    source = torch.randn(grid.room(), generator=torch.Generator().manual_seed(3)).to(dtype)
    source, values = both(source)
    expected = WriteRow(view.of(memory), grid.of(source), scales.of(sizes))
    torch_ops.store_rows([expected], locations)
    there = locations.to(MEMORY)
    row = WriteRow(view.of(held), grid.of(values), scales.of(factors))
    device().store_rows([row], there)
    assert torch.equal(as_bits(held), as_bits(memory))
    assert torch.equal(as_bits(factors), as_bits(sizes))
    (read,) = device().load_rows([ReadRow(view.of(held), scales.of(factors), dtype)], there)
    (wanted,) = torch_ops.load_rows([ReadRow(view.of(memory), scales.of(sizes), dtype)], locations)
    assert torch.equal(read.cpu(), wanted)


@settings(max_examples=20)
@given(st.data())
def test_rows_of_one_call_are_written_and_read_together(data):
    items, per_item, count = 3, 4, data.draw(st.integers(1, 12))
    locations = torch.randperm(items * per_item)[:count]
    rows, wanted, checked = [], [], []
    for seed in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
        axes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
        view = data.draw(grids((items, per_item, *axes)))
        memory, held = both(noise(view.room(), dtype))
        source, values = both(noise(len(locations) * torch.Size(axes).numel(), dtype, seed))
        shape = (len(locations), *axes)
        rows.append(WriteRow(view.of(held), values.view(shape)))
        wanted.append(WriteRow(view.of(memory), source.view(shape)))
        checked.append((held, memory))
    device().store_rows(rows, locations.to(MEMORY))
    torch_ops.store_rows(wanted, locations)
    for held, memory in checked:
        assert torch.equal(as_bits(held), as_bits(memory))
    outputs = device().load_rows([ReadRow(row.view) for row in rows], locations.to(MEMORY))
    for got, row in zip(outputs, wanted):
        assert torch.equal(as_bits(got), as_bits(row.values))


def test_values_expanded_over_an_axis_are_stored():
    held, values = (
        zeros((3, 2, 4, 8), torch.float32),
        torch.arange(16.0, device=MEMORY).view(2, 1, 8),
    )
    row = WriteRow(held, values.expand(2, 4, 8))
    device().store_rows([row], torch.tensor([5, 0], device=MEMORY))
    assert torch.equal(held[2, 1].cpu(), values[0].cpu().expand(4, 8))
    assert torch.equal(held[0, 0].cpu(), values[1].cpu().expand(4, 8))


def test_an_entry_may_be_one_element():
    held, numbers = zeros((3, 4), torch.float16), torch.tensor([11, 2], device=MEMORY)
    values = torch.tensor([2.5, -1.0], dtype=torch.float16, device=MEMORY)
    device().store_rows([WriteRow(held, values)], numbers)
    assert held.flatten()[[11, 2]].tolist() == [2.5, -1.0] and held.count_nonzero() == 2
    assert device().load_rows([ReadRow(held)], numbers)[0].tolist() == [2.5, -1.0]


def test_rows_longer_than_a_tile_are_stored_whole():
    held = zeros((3, 1, 3, 7001), torch.float32)
    values = torch.randn(2, 3, 7001)
    numbers = torch.tensor([2, 1], device=MEMORY)
    device().store_rows([WriteRow(held, values.to(MEMORY))], numbers)
    assert torch.equal(held[[2, 1], 0].cpu(), values) and not held[0].any()
    assert torch.equal(device().load_rows([ReadRow(held)], numbers)[0].cpu(), values)


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("values: [2, 4]", {"values": torch.zeros(2, 4)}),
        ("values: [2, 8] torch.float64", {"values": torch.zeros(2, 8, dtype=torch.float64)}),
        ("values: [3, 8]", {"values": torch.zeros(3, 8)}),
        ("locations: [2] torch.int32", {"locations": torch.zeros(2, dtype=torch.int32)}),
        ("on meta", {"values": torch.zeros(2, 8, device="meta")}),
    ],
)
def test_mismatched_tensors_are_refused_before_anything_is_written(what, arguments):
    fitting = {"values": torch.zeros(2, 8), "locations": torch.tensor([1, 2])}
    every = {
        name: each if each.is_meta else each.to(MEMORY)
        for name, each in {**fitting, **arguments}.items()
    }
    held = zeros((3, 2, 8), torch.float32)
    with pytest.raises(ValueError) as refused:
        device().store_rows([WriteRow(held, every["values"])], every["locations"])
    assert what in str(refused.value) and "expected" in str(refused.value)
    assert not held.any()


def test_threads_write_concurrently():
    held = zeros((8, 4, 16), torch.bfloat16)
    values = torch.randn(8, 4, 16).bfloat16()

    def store(item):
        numbers = torch.arange(4, device=MEMORY) + 4 * item
        device().store_rows([WriteRow(held, values[item].to(MEMORY))], numbers)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(store, range(8)))
    assert torch.equal(held.cpu(), values)
