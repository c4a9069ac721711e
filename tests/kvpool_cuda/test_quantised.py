"""Quantising kernels write and read the same bytes as kvpool.device.quant."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kvpool.device import quant
from kvpool.device.torch_ops import ReadRow, WriteRow
from tests.kvpool_cuda.devices import MEMORY, as_bits, device, zeros

FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16
SCALES = torch.float32, torch.float8_e8m0fnu, torch.float16
CODES = torch.float8_e4m3fn, torch.int8
ALL_CODES = torch.arange(256, dtype=torch.uint8)


def stored(values, scales, dtype, code=torch.float8_e4m3fn):
    """Values `[N, ..., D]` as the device quantises them, and their scales, one entry an item."""
    codes = zeros((len(values), 1, *values.shape[1:]), code)
    factors = zeros((len(values), 1, *values.shape[1:-1], scales), dtype)
    locations = torch.randperm(len(values))
    device().store_rows([WriteRow(codes, values.to(MEMORY), factors)], locations.to(MEMORY))
    return codes.cpu()[locations, 0], factors.cpu()[locations, 0]


def assert_quantised_alike(values, scales, dtype, code=torch.float8_e4m3fn):
    wanted = quant.quantise(values, scales, dtype, code)
    for ours, theirs in zip(stored(values, scales, dtype, code), wanted):
        differ = (as_bits(ours) != as_bits(theirs)).nonzero()
        assert not len(differ), (values.dtype, differ[:4].tolist())


def from_bits(bits):
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_floats_near_a_tie_are_rounded_to_e4m3_as_torch_does():
    exact = ALL_CODES.view(torch.float8_e4m3fn).float()
    exact = exact[exact.isfinite()].sort().values
    halves = (exact[1:] + exact[:-1]) / 2
    edges = torch.cat([exact, halves])
    near = [edges, edges.nextafter(torch.tensor(500.0)), edges.nextafter(torch.tensor(-500.0))]
    small = from_bits([1, 2, 0x7FFFFF, 0x800000, 0x80000001, 0x807FFFFF, 0x00400000, 0x80000000])
    floats = torch.cat([*near, small])
    floats = floats[floats.abs() <= 448]
    # beside 448 the scale is 1, and what is stored is the conversion itself
    rows = torch.cat([floats, torch.zeros(-len(floats) % 15)]).view(-1, 15)
    rows = torch.cat([torch.full((len(rows), 1), 448.0), rows], dim=1)
    for dtype in SCALES:
        codes, factors = stored(rows, 1, dtype)
        assert (factors.float() == 1).all()
        assert torch.equal(as_bits(codes), as_bits(rows.to(torch.float8_e4m3fn)))


def test_quotients_near_a_tie_are_rounded_to_int8_as_torch_does():
    whole = torch.arange(-127, 128, dtype=torch.float32)
    edges = torch.cat([whole, whole[:-1] + 0.5, -whole[:1] * 0.0])
    far = torch.tensor([200.0, -200.0])
    rows = torch.cat(
        [edges, *(edges.nextafter(each) for each in far), torch.tensor([1e-30, -1e-30])]
    )
    rows = rows[rows.abs() <= 127]
    rows = torch.cat([rows, torch.zeros(-len(rows) % 15)]).view(-1, 15)
    rows = torch.cat([torch.full((len(rows), 1), 127.0), rows], dim=1)
    for dtype in SCALES:
        codes, factors = stored(rows, 1, dtype, torch.int8)
        assert (factors.float() == 1).all()
        assert torch.equal(codes, rows.round().to(torch.int8))


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("dtype", SCALES, ids=str)
def test_blocks_of_any_magnitude_have_the_reference_s_scales_and_values(dtype, code):
    random = torch.Generator().manual_seed(1)
    floats = torch.randn(300, 32, generator=random, dtype=torch.float64)
    powers = torch.arange(300)[:, None] - 160
    for kind in FLOATS:
        assert_quantised_alike((floats * 2.0**powers).to(kind), 2, dtype, code)
    # largest magnitudes that are, or just miss, 448 and 127 times a power of two
    edges = from_bits([0x43E00000, 0x43E00001, 0x43DFFFFF, 0x42FE0000, 0x42FE0001, 0x42FDFFFF])
    ends = from_bits([0x00000001, 0x007FFFFF, 0x7F7FFFFF])
    most = torch.tensor([65504.0, 65519.0, 65520.0, 65536.0])  # around float16's largest
    edges = torch.cat([edges, ends, most * quant.LARGEST_CODE[code]])
    assert_quantised_alike(edges[:, None] * torch.tensor([1.0, -0.5, 0.3, 0.0]), 1, dtype, code)
    assert_quantised_alike(torch.zeros(3, 8), 2, dtype, code)


@settings(max_examples=25)
@given(
    st.sampled_from(FLOATS),
    st.sampled_from(SCALES),
    st.sampled_from(CODES),
    st.sampled_from([(1, 7), (3, 64), (2, 96), (7, 5)]),
    st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=64),
)
def test_any_bits_are_quantised_as_the_reference_does(kind, dtype, code, shape, bits):
    scales, block = shape
    count = 3 * scales * block
    floats = from_bits(bits).repeat(-(-count // len(bits)))[:count].view(3, scales * block)
    if kind is not torch.float32:  # a NaN's sign is not kept in conversions
        floats = floats.nan_to_num(nan=1.0).to(kind)
    assert_quantised_alike(floats, scales, dtype, code)


@pytest.mark.parametrize("kind", FLOATS[1:], ids=str)
@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("dtype", SCALES, ids=str)
def test_all_codes_with_all_scales_are_read_as_the_reference_reads_them(kind, dtype, code):
    factors = ALL_CODES.view(dtype) if dtype is torch.float8_e8m0fnu else None
    if dtype is torch.float16:
        bits = [0, 1, 0x3FF, 0x400, 0x3C00, 0x3C67, 0x7BFF, 0x7C00, 0x7E00, 0xBC00, 0x1234]
        factors = torch.tensor(bits).to(torch.int16).view(dtype)
    if dtype is torch.float32:
        given_bits = [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F8CCCCD, 0x7EFFFFFF, 0x7FC00000]
        factors = from_bits([*given_bits, 0x7F7FFFFF, 0x7B124925, 0xBF800000, 0x3A000000])
    codes = zeros((len(factors), 1, 256), code)
    codes.view(torch.uint8).copy_(ALL_CODES.expand(len(factors), 1, 256))
    scales = zeros((len(factors), 1, 1), dtype)
    scales.copy_(factors[:, None, None])
    locations = torch.randperm(len(factors))
    read = device().load_rows([ReadRow(codes, scales, kind)], locations.to(MEMORY))[0].cpu()
    wanted = quant.dequantise(codes.cpu()[locations, 0], scales.cpu()[locations, 0], kind)
    assert read.dtype is kind
    torch.testing.assert_close(read, wanted, rtol=0, atol=0, equal_nan=True)


def test_reads_as_float64_equal_reads_as_float32():
    codes, scales = zeros((4, 1, 8), torch.float8_e4m3fn), zeros((4, 1, 2), torch.float32)
    codes.view(torch.uint8).copy_(torch.arange(32, dtype=torch.uint8).view(4, 1, 8) * 8)
    scales.copy_(torch.tensor([3e38, 1e-3]).expand(4, 1, 2))
    locations = torch.arange(4, device=MEMORY)
    wide, single = device().load_rows([ReadRow(codes, scales, k) for k in FLOATS[:2]], locations)
    torch.testing.assert_close(wide, single.double(), rtol=0, atol=0, equal_nan=True)


def test_unsupported_dtypes_are_refused():
    codes, locations = zeros((4, 1, 8), torch.float8_e4m3fn), torch.arange(4, device=MEMORY)
    half = zeros((4, 1, 1), torch.bfloat16)
    with pytest.raises(ValueError, match=r"scales of torch\.bfloat16"):
        device().store_rows([WriteRow(codes, torch.zeros(4, 8, device=MEMORY), half)], locations)
    single = zeros((4, 1, 1), torch.float32)
    with pytest.raises(ValueError, match=r"torch\.int32 as torch\.float8_e4m3fn"):
        integers = torch.zeros(4, 8, dtype=torch.int32, device=MEMORY)
        device().store_rows([WriteRow(codes, integers, single)], locations)
    with pytest.raises(ValueError, match=r"values \[4, 1, 8\] on .* with scales \[4, 1, 3\]"):
        three = zeros((4, 1, 3), torch.float32)
        device().store_rows([WriteRow(codes, torch.zeros(4, 8, device=MEMORY), three)], locations)
