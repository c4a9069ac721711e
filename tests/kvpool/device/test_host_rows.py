"""Rows that are stored and loaded outside Python: the bytes that the formats say, and those that
plain torch makes, with vectors of every width.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from kvpool.device import host_rows, torch_ops
from kvpool.device.quant import LARGEST_CODE, SCALE_DTYPES
from kvpool.device.torch_ops import ReadRow, WriteRow, bits
from kvpool.testing.values import decode, dequantise, quantise
from tests.kvpool.device.rows import (
    NAN_OF_EITHER_SIGN,
    NUMBERS,
    SEEDS,
    floats_of,
    geometries,
    in_threads,
    name,
    raw,
    same_codes,
    view_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

FLOATS = torch.bfloat16, torch.float16, torch.float32, torch.float64
FORMATS = tuple(product(FLOATS, LARGEST_CODE, SCALE_DTYPES))


@pytest.fixture
def moved(monkeypatch):
    """Whether each call was done outside Python."""
    done, move = [], host_rows._move

    def watched(*given, **more):
        done.append(move(*given, **more))
        return done[-1]

    monkeypatch.setattr(host_rows, "_move", watched)
    return done


@settings(max_examples=100)
@given(geometries(), st.sampled_from(FORMATS), NUMBERS, SEEDS)
@example(([1, 1], 2, 1, [0], 0), NAN_OF_EITHER_SIGN, "with an odd one", 1)
def check_stores(geometry, formats, numbers, seed):
    shape, blocks, block, order, gap = geometry
    floats, code, scale = formats
    random = np.random.default_rng(seed)
    entries = shape[0] * shape[1]
    where = torch.from_numpy(random.permutation(entries)[: random.integers(1, entries + 1)])
    values = floats_of(numbers, (len(where), *shape[2:], blocks * block), random)
    given = torch.from_numpy(values).to(floats)
    made = []
    for store_rows in (host_rows.store_rows, torch_ops.store_rows):
        held = view_of([*shape, blocks * block], code, order, gap)
        factors = view_of([*shape, blocks], scale, order, gap)
        store_rows([WriteRow(held[1], given, factors[1])], where)
        made.append((held[0], factors[0]))
    (ours, our_factors), (plain, plain_factors) = made
    same_codes(ours.numpy(), plain.numpy(), name(code))
    assert torch.equal(our_factors, plain_factors)
    if floats is not torch.float64:  # the oracle takes float32
        exact = decode(raw(given), name(floats)).astype(np.float32)
        codes, factor_bytes = quantise(exact, blocks, name(scale), name(code))
        at = where // shape[1], where % shape[1]
        same_codes(raw(bits(held[1])[at]), codes, name(code))
        same_codes(raw(bits(factors[1])[at]), factor_bytes, name(scale))


def test_any_floats_are_stored_as_the_formats_say_and_as_torch_stores_them(vectors, moved):
    check_stores()
    assert moved and all(moved)


@settings(max_examples=100)
@given(geometries(), st.sampled_from(FORMATS), SEEDS)
def check_loads(geometry, formats, seed):
    shape, blocks, block, order, gap = geometry
    floats, code, scale = formats
    random = np.random.default_rng(seed)
    views = []
    for count, dtype in ((blocks * block, code), (blocks, scale)):
        memory, view = view_of([*shape, count], dtype, order, gap)
        memory.copy_(torch.from_numpy(random.integers(0, 256, len(memory), dtype=np.uint8)))
        if dtype is torch.float32 and seed % 2:  # not all far from 1
            view.copy_(torch.rand(view.shape) * 4 - 2)
        views.append(view)
    where = torch.from_numpy(random.integers(0, shape[0] * shape[1], 5))  # one may repeat
    (found,) = host_rows.load_rows([ReadRow(*views, floats)], where)
    (plain,) = torch_ops.load_rows([ReadRow(*views, floats)], where)
    torch.testing.assert_close(found, plain, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit() & ~found.isnan(), plain.signbit() & ~plain.isnan())
    if floats is not torch.float64:  # the oracle's have no largest number
        at = where // shape[1], where % shape[1]
        stored = [raw(bits(view)[at]) for view in views]
        expected = dequantise(*stored, name(scale), name(floats), name(code))
        same_codes(raw(found), expected, name(floats))


def test_any_bytes_are_loaded_as_the_formats_say_and_as_torch_loads_them(vectors, moved):
    check_loads()
    assert moved and all(moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_float16_and_every_code_is_read_exactly(vectors, dtype):
    halves = torch.arange(1 << 16).to(torch.int16).view(torch.float16)
    view = torch.ones(256, 256, 1).to(torch.float8_e4m3fn)
    scales = halves.view(256, 256, 1)
    (found,) = host_rows.load_rows([ReadRow(view, scales, dtype)], torch.arange(1 << 16))
    expected = halves.float().clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    torch.testing.assert_close(found[:, 0], expected, rtol=0, atol=0, equal_nan=True)


def test_every_float32_scale_near_a_tie_is_stored_as_torch_rounds_it_to_float16(vectors):
    halves = torch.arange(0x7C00).to(torch.int16).view(torch.float16).double()
    ties = ((halves[1:] + halves[:-1]) / 2).float()
    wanted = torch.cat([ties, *(ties.nextafter(torch.tensor(end)) for end in (0.0, 1e9))])
    values = torch.stack([wanted * 127, torch.zeros(len(wanted))], dim=1)
    view, scales = torch.zeros(len(wanted), 1, 2).to(torch.int8), wanted[:, None, None].half()
    scales.zero_()
    host_rows.store_rows([WriteRow(view, values, scales)], torch.arange(len(wanted)))
    assert torch.equal(scales.flatten(), (values[:, 0] / 127).half())


# rows as they are


def _slab(row: int, rows: int) -> torch.Tensor:
    random = np.random.default_rng(row)
    return torch.from_numpy(random.integers(0, 256, (rows, row), dtype=np.uint8))


@pytest.mark.parametrize("rows", [97, 30_000], ids=["few", "more than the caches"])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_side_by_side_keep_what_lies_beside_them(moved, rows, threads):
    """In rows of 333 bytes: cells of 1, 200 and 72 bytes, 30 bytes of nobody, at odd pointers."""
    slab, random = _slab(333, rows), np.random.default_rng(0)
    where = torch.from_numpy(random.permutation(rows)[: rows * 2 // 3])
    views = [slab[:, None, a:b] for a, b in ((0, 1), (1, 201), (231, 303))]
    values = [_slab(view.shape[-1], len(where)) for view in views]
    expected = slab.clone()
    for view, written in zip(views, values):
        start = view.storage_offset()
        expected[where, start : start + view.shape[-1]] = written
    with in_threads(threads):
        host_rows.store_rows([WriteRow(*each) for each in zip(views, values)], where)
        found = host_rows.load_rows([ReadRow(view) for view in views], where)
    assert torch.equal(slab, expected) and all(moved) and len(moved) == 2
    assert all(torch.equal(*both) for both in zip(found, values))


def test_large_quantised_rows_are_the_same_in_threads(moved):
    rows, random = 9_000, torch.Generator().manual_seed(0)
    values, where = torch.randn(rows, 256, generator=random), torch.randperm(rows)
    made = []
    for threads in (1, 4):
        held = torch.zeros(rows, 1, 256, dtype=torch.float8_e4m3fn)
        scales = torch.zeros(rows, 1, 2)
        with in_threads(threads):
            host_rows.store_rows([WriteRow(held, values, scales)], where)
            (found,) = host_rows.load_rows([ReadRow(held, scales)], where)
        made += [raw(held), raw(scales), raw(found)]
    assert all(moved) and len(moved) == 4
    assert all(np.array_equal(*both) for both in zip(made[:3], made[3:]))


# what is left to torch


def _outcome(ops, view, values, where, scales=None):
    """The error, or the bytes."""
    try:
        ops.store_rows([WriteRow(view, values, scales)], where)
    except Exception as error:
        return type(error), str(error)
    return raw(view).tobytes()


@pytest.mark.parametrize(
    ("values", "where"),
    [
        (torch.ones(2, 8), [0, 12]),
        (torch.ones(2, 8), [-1, 3]),
        (torch.ones(2, 8), [1 << 62, 0]),
        (torch.ones(2, 7), [0, 1]),
        (torch.ones(3, 8), [0, 1]),
        (torch.ones(2, 8, dtype=torch.int32), [0, 1]),
        (torch.ones(2, 8, dtype=torch.float64), [0, 1]),
        (torch.ones(0, 8), []),
        (torch.complex(torch.ones(2, 8), torch.ones(2, 8)).conj().imag, [0, 1]),
    ],
    ids=["beyond", "negative", "huge", "narrow", "many", "integers", "wide", "none", "negated"],
)
@pytest.mark.parametrize("gap", [0, 1], ids=["dense", "with gaps"])
def test_what_is_wrong_or_odd_ends_as_in_torch(values, where, gap):
    where = torch.tensor(where, dtype=torch.int64)
    views = [view_of([3, 4, 8], torch.float32, [0], gap, fill=0)[1] for _ in range(2)]
    ours, plain = (
        _outcome(ops, view, values, where) for ops, view in zip((host_rows, torch_ops), views)
    )
    assert ours == plain


def test_scales_of_another_dtype_end_as_in_torch():
    for scales in (torch.zeros(3, 4, 1, dtype=torch.bfloat16), torch.zeros(3, 4, 3)):
        held = torch.zeros(3, 4, 8, dtype=torch.float8_e4m3fn)
        given, where = torch.ones(2, 8), torch.tensor([0, 1])
        outcomes = [_outcome(ops, held, given, where, scales) for ops in (host_rows, torch_ops)]
        assert outcomes[0] == outcomes[1]


def test_values_from_the_memory_that_is_written_end_as_in_torch():
    outcomes = []
    for ops in (host_rows, torch_ops):
        view = torch.arange(12.0).view(3, 1, 4)
        outcomes.append(_outcome(ops, view, view[:2, 0], torch.tensor([1, 2])))
    assert outcomes[0] == outcomes[1]


def test_rows_of_scattered_elements_are_left_to_torch(moved):
    view = torch.zeros(2, 3, 40, 50).transpose(2, 3)
    values = torch.randn(2, 50, 40)
    host_rows.store_rows([WriteRow(view, values)], torch.tensor([4, 1]))
    assert moved == [False]
    assert torch.equal(view.reshape(6, 50, 40)[torch.tensor([4, 1])], values)
