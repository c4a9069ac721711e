"""fp8 and int8 values and their scales against float64 arithmetic on what the formats say. That all
bits are those of the conformance kit's definition is in `test_host_rows.py`.

The bound. e4m3 has 3 bits behind the point: between powers of two its steps are 2**-3 of the lower
one, and rounding to the nearest is off by at most 2**-4 of the value; below 2**-6, its smallest
normal number, all steps are 2**-9, and rounding is off by at most 2**-10. Both are times the scale.
Dividing and multiplying by the scale in float32 adds 2**-24 of the value each, for which the first
bound has room (its worst case, 17/16 between 1 and 9/8, is off by 1/17) and the second gets SLACK;
what a product below float32's normal numbers loses is TINY. What rounds to more than the largest
number of the dtype is read as that number, which is nearer.
"""

from __future__ import annotations

import math
import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from kvpool.device.quant import dequantise, quantise
from kvpool.layout.formats import scaled

F32, F16, UE8M0 = torch.float32, torch.float16, torch.float8_e8m0fnu
E4M3 = torch.float8_e4m3fn
MOST = torch.finfo(F32).max
SLACK, TINY = 1 + 2.0**-20, 2.0**-149
BYTES = torch.arange(256, dtype=torch.uint8)

both = pytest.mark.parametrize("scale", [F32, UE8M0], ids=["f32", "ue8m0"])


def e4m3(byte: int) -> float:
    """The value of a byte: 4 bits of exponent of bias 7, 3 of mantissa, no infinities (OCP 8-bit
    floating point).
    """
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def scale_values(stored: torch.Tensor) -> np.ndarray:
    """Stored scales as float64."""
    if stored.dtype is UE8M0:
        exponents = stored.view(torch.uint8).numpy().astype(np.float64) - 127
        return np.where(exponents == 128, np.nan, 2.0**exponents)
    assert stored.dtype in (F32, F16)
    return stored.double().numpy()


def check(values: torch.Tensor, scales: int, scale: torch.dtype) -> None:
    """Quantises and compares every element with the bound, and what is stored with the formats."""
    held, stored = quantise(values, scales, scale)
    assert (held.dtype, held.shape) == (E4M3, values.shape)
    assert (stored.dtype, stored.shape) == (scale, (*values.shape[:-1], scales))
    exact = values.double().numpy().reshape(*stored.shape, -1)
    factor = scale_values(stored)
    table = np.array([e4m3(byte) for byte in range(256)])
    meant = table[held.view(torch.uint8).numpy()].reshape(exact.shape) * factor[..., None]
    meant = meant.clip(-MOST, MOST)
    read = dequantise(held, stored, F32).double().numpy().reshape(exact.shape)
    assert (np.abs(read - meant) <= np.abs(meant) * 2.0**-24 + TINY).all()
    bound = np.maximum(2.0**-4 * np.abs(exact), 2.0**-10 * factor[..., None])
    assert (np.abs(read - exact) <= bound * SLACK + TINY).all()


def block(*values: float, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.tensor([values], dtype=dtype)


FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.integers(0, (1 << 31) - 1 - (1 << 23)).map(
        lambda bits: struct.unpack("<f", struct.pack("<I", bits))[0]
    ),
)


LIKE_MAGNITUDES = st.builds(
    lambda exponent, values: [math.ldexp(value, exponent) for value in values],
    st.integers(-130, 118),
    st.lists(st.floats(-1, 1, width=32), min_size=16, max_size=16),
)
TIES = [
    *((low + high) / 2 for low, high in pairwise(sorted({e4m3(byte) for byte in range(0x7F)}))),
    *(448.0, 0.0),
]


@both
@settings(max_examples=200)
@given(st.sampled_from([1, 2, 4]), st.lists(FLOATS, min_size=16, max_size=16) | LIKE_MAGNITUDES)
@example(1, TIES)
@example(2, [MOST, -MOST, MOST / 2, 1.0])
def test_errors_of_any_floats_are_within_the_bound(scale, scales, values):
    check(block(*values), scales, scale)


# scales


def smallest_power(amax: float) -> int:
    """Exponent of the smallest power of two that is amax / 448 or more, in exact arithmetic."""
    numerator, denominator = amax.as_integer_ratio()
    exponent = numerator.bit_length() - denominator.bit_length() - (448).bit_length() - 2
    while numerator * 2 ** max(0, -exponent) > 448 * denominator * 2 ** max(0, exponent):
        exponent += 1
    return exponent


EDGES = st.builds(
    lambda power, end: float(np.nextafter(np.float32(448 * 2.0**power), np.float32(end))),
    st.integers(-110, 110),
    st.sampled_from([0.0, 448 * 2.0**110, math.inf]),
)


@settings(max_examples=300)
@given(FLOATS | EDGES)
def test_a_scale_is_the_largest_magnitude_over_448_or_the_smallest_power_of_two_above_it(amax):
    exact = max(abs(amax) / 448, 2.0**-126)
    _, stored = quantise(block(amax, amax / 2, -amax / 4), 1, F32)
    assert abs(stored.item() - exact) <= exact * 2.0**-24
    _, stored = quantise(block(amax, amax / 2), 1, UE8M0)
    # below 2**-126 a scale has no reciprocal in float32: all such blocks have that scale
    expected = max(-126, smallest_power(abs(amax))) if amax else -126
    assert stored.view(torch.uint8).item() == expected + 127


def test_blocks_have_scales_of_their_own():
    values = block(448.0, 1.0, 0.0, 896.0, 3.0, -1792.0)
    _, stored = quantise(values, 3, F32)
    assert stored.tolist() == [[1.0, 2.0, 4.0]]
    _, stored = quantise(values, 3, UE8M0)
    assert stored.view(torch.uint8).tolist() == [[127, 128, 129]]


# exact round trips


@both
@pytest.mark.parametrize("exponent", [-126, -100, -1, 0, 1, 64, 111])
def test_values_of_the_format_at_a_power_of_two_come_back_exactly(scale, exponent):
    finite = BYTES[(BYTES & 0x7F) != 0x7F]
    values = torch.tensor([[e4m3(byte) * 2.0**exponent for byte in finite.tolist()]])
    held, stored = quantise(values, 1, scale)
    assert (held.view(torch.uint8)[0] == finite).all()
    assert scale_values(stored).item() == 2.0**exponent
    assert torch.equal(dequantise(held, stored, F32), values)


@both
def test_zeros_come_back_as_zeros_with_their_sign(scale):
    held, stored = quantise(block(0.0, -0.0, 0.0, -0.0), 2, scale)
    assert held.view(torch.uint8).tolist() == [[0, 0x80, 0, 0x80]]
    assert (scale_values(stored) == 2.0**-126).all()
    assert (dequantise(held, stored, F32) == 0).all()


@both
def test_quantising_again_changes_nothing(scale):
    values = torch.randn(60, 32, generator=torch.Generator().manual_seed(3))
    once = dequantise(*quantise(values, 2, scale), F32)
    twice = dequantise(*quantise(once, 2, scale), F32)
    allowed = 0 if scale is UE8M0 else once.abs() * 2.0**-22
    assert ((twice - once).abs() <= allowed).all()


# what is no number


@pytest.mark.parametrize("code", [E4M3, torch.int8])
@pytest.mark.parametrize("scale", [F32, UE8M0, F16])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_with_an_infinity_or_a_nan_is_nan_as_a_whole_and_no_other_is(code, scale, bad):
    most = 448.0 if code is E4M3 else 127.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = block(1.0, bad, 0.0, most, 2.0, 0.0, dtype=dtype)
        held, stored = quantise(values, 3, scale, code)
        read = dequantise(held, stored, F32)
        assert read.isnan().tolist() == [[True, True, False, False, False, False]]
        assert read[0, 2:4].tolist() == [0.0, most]
        assert np.isnan(scale_values(stored)).tolist() == [[True, False, False]]
        lost = held.view(torch.uint8)[0, :2]
        assert (lost & 0x7F == 0x7F).all() if code is E4M3 else not lost.any()


def test_every_ue8m0_byte_is_read_as_its_power_of_two():
    ones = torch.ones(256, 1).to(E4M3)
    read = dequantise(ones, BYTES[:, None].view(UE8M0), F32)[:, 0]
    assert read[255].isnan()
    assert read[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]


def test_every_e4m3_byte_is_read_as_its_value():
    read = dequantise(BYTES[:, None].view(E4M3), torch.full((256, 1), 2.0), F32)[:, 0].tolist()
    for byte, value in enumerate(read):
        exact = e4m3(byte)
        assert math.isnan(value) if math.isnan(exact) else value == 2 * exact


# int8, and float16 scales


def test_int8_rounds_ties_to_even_and_keeps_zeros():
    held, stored = quantise(block(127.0, -0.5, 0.5, 1.5, -2.5, 126.5), 1, F16, torch.int8)
    assert held.tolist() == [[127, 0, 0, 2, -2, 126]] and stored.tolist() == [[1.0]]
    held, stored = quantise(torch.zeros(1, 4), 2, F16, torch.int8)
    assert held.tolist() == [[0] * 4] and stored.tolist() == [[0.0, 0.0]]
    assert dequantise(held, stored, F32).tolist() == [[0.0] * 4]


@pytest.mark.parametrize(("kind", "most"), [(torch.int8, 127.0), (E4M3, 448.0)])
def test_a_scale_beyond_float16_is_nan_and_the_largest_before_is_not(kind, most):
    held, stored = quantise(block(65504.0 * most, 1.0, 65520.0 * most, 0.0), 2, F16, kind)
    assert stored[0, 0] == 65504.0 and stored[0, 1].isnan()
    assert dequantise(held, stored, F32)[0].isnan().tolist() == [False, False, True, True]


def test_every_int8_with_every_float16_scale_is_read_as_their_product():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(F16)
    stored = bits[bits.isfinite()][::37, None]
    held = torch.arange(-128, 128).to(torch.int8).expand(len(stored), 256)
    read = dequantise(held, stored, F32).double().numpy()
    assert (read == held.double().numpy() * scale_values(stored)).all()


# shapes


@both
@pytest.mark.parametrize("shape", [(0, 16), (0, 3, 16), (3, 0, 16), (1, 16), (2, 3, 4, 16)])
def test_any_leading_shape_even_an_empty_one(scale, shape):
    values = torch.ones(shape)
    held, stored = quantise(values, 4, scale)
    assert (held.shape, stored.shape) == (shape, (*shape[:-1], 4))
    for dtype in (torch.bfloat16, torch.float32):
        read = dequantise(held, stored, dtype)
        assert (read.shape, read.dtype) == (shape, dtype)
        assert torch.allclose(read.float(), values)


def test_gradients_are_not_kept():
    held, stored = quantise(torch.ones(1, 4, requires_grad=True), 1, F32)
    assert not held.requires_grad and not stored.requires_grad


@pytest.mark.parametrize(
    ("count", "block_size", "blocks"), [(512, 128, 4), (448, 64, 7), (64, 32, 2), (16, 128, 1)]
)
def test_cells_of_values_and_scales(count, block_size, blocks):
    values, scales = scaled("latent", count, block=block_size)
    assert (values.role, values.count, values.dtype) == ("latent", count, "float8_e4m3fn")
    assert (scales.role, scales.count, scales.dtype) == ("latent.scale", blocks, "float32")
    assert scaled("latent", count, block=block_size, scale="ue8m0")[1].dtype == "float8_e8m0fnu"


def test_elements_that_are_not_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="latent: 200 elements are not a multiple of"):
        scaled("latent", 200, block=128)
