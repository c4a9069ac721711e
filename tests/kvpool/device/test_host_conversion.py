"""Rows that are stored in another format outside Python: the bytes that plain torch makes, with
vectors of every width.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from kvpool.device import get_device, host_conversion
from kvpool.device.conversion import convert_rows
from kvpool.device.quant import LARGEST_CODE, SCALE_DTYPES
from kvpool.device.rows_at import RowsAt, ScaledRowsAt
from tests.kvpool.device.rows import (
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

PLAIN = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
FORMATS = (*((dtype, None) for dtype in PLAIN), *product(LARGEST_CODE, SCALE_DTYPES))


@pytest.fixture
def converted(monkeypatch):
    """Whether each call was done outside Python."""
    done, convert = [], host_conversion.convert_rows

    def watched(*given):
        done.append(convert(*given))
        return done[-1]

    monkeypatch.setattr(get_device("cpu"), "convert_rows", watched, raising=False)
    return done


def at(view):
    """A tensor's rows."""
    size = view.element_size()
    strides = tuple(stride * size for stride in view.stride())
    return RowsAt(name(view.dtype), view.data_ptr(), tuple(view.shape), strides)


def rows_of(views):
    return ScaledRowsAt(at(views[0]), at(views[1]) if views[1:] else None)


def memory_of(shape, width, blocks, format, order, gap):
    """Views of rows in a format, and of their scales if it has any; and all their memory."""
    dtype, scale = format
    made = [view_of([*shape, width], dtype, order, gap)]
    if scale is not None:
        made.append(view_of([*shape, blocks], scale, order, gap))
    return [view for _, view in made], [memory for memory, _ in made]


@settings(max_examples=150)
@given(
    geometries(),
    st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS)),
    st.integers(1, 3),
    NUMBERS,
    SEEDS,
)
def check_conversions(geometry, formats, finer, numbers, seed):
    shape, blocks, block, order, gap = geometry
    random, entries = np.random.default_rng(seed), shape[0] * shape[1]
    count = int(random.integers(1, entries + 1))
    read, write = random.integers(0, entries, count), random.permutation(entries)[:count]
    width = blocks * block * finer
    source, there = memory_of(shape, width, blocks, formats[0], order, gap)
    for memory in there:
        memory.copy_(torch.from_numpy(random.integers(0, 256, len(memory), dtype=np.uint8)))
    if formats[0][1] is None:
        values = torch.from_numpy(floats_of(numbers, source[0].shape, random))
        source[0].copy_(values.to(formats[0][0]))
    made = []
    for native in ("1", "0"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KVPOOL_NATIVE", native)
            views, held = memory_of(shape, width, blocks * finer, formats[1], order, gap)
            pair = rows_of(source), rows_of(views)
            convert_rows(get_device("cpu"), [pair], read, write)
            made.append((views, held))
    (ours, our_memory), (plain, plain_memory) = made
    for view, expected in zip(ours, plain):
        same_codes(raw(view), raw(expected), name(view.dtype))
        view.copy_(expected)  # NaNs may differ
    assert all(torch.equal(*both) for both in zip(our_memory, plain_memory))


def test_any_rows_are_converted_as_torch_converts_them(vectors, converted):
    check_conversions()
    assert converted and all(converted[::2]) and not any(converted[1::2])


@pytest.mark.parametrize("dtype", PLAIN, ids=name)
@pytest.mark.parametrize("target", PLAIN, ids=name)
def test_every_16_bits_are_converted_as_torch_converts_them(vectors, dtype, target):
    every = torch.arange(1 << 16).to(torch.int16)
    if dtype is torch.float32:  # with ties of bfloat16, and what is near them
        low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])[:, None]
        given = (every.long() << 16 | low).to(torch.int32).view(dtype).view(-1, 1, 64)
    elif dtype is torch.float8_e4m3fn:
        given = torch.arange(256).to(torch.uint8).view(dtype).view(-1, 1, 64)
    else:
        given = every.view(dtype).view(-1, 1, 64)
    stored, numbers = torch.zeros(given.shape).to(target), np.arange(len(given))
    pair = rows_of([given]), rows_of([stored])
    assert host_conversion.convert_rows([pair], numbers, numbers)
    expected = given.float()
    if target is torch.float8_e4m3fn:
        expected = expected.clamp(-448, 448)
    same_codes(raw(stored), raw(expected.to(target)), name(target))


@pytest.mark.parametrize("threads", [1, 3])
def test_large_rows_of_several_pairs_are_converted_in_threads(threads):
    rows, random = 9_000, np.random.default_rng(0)
    read, write = random.permutation(rows), random.permutation(rows)
    given = [torch.randn(rows, 1, 2, 128).to(torch.bfloat16) for _ in range(2)]
    wide = torch.zeros(rows, 1, 2, 128)
    codes, scales = torch.zeros(rows, 1, 2, 128).to(torch.float8_e4m3fn), torch.zeros(rows, 1, 2, 1)
    pairs = [(rows_of(given[:1]), rows_of([wide])), (rows_of(given[1:]), rows_of([codes, scales]))]
    with in_threads(threads):
        assert host_conversion.convert_rows(pairs, read, write)
    assert torch.equal(wide[write], given[0][read].float())
    values = given[1][read].float()
    factors = values.abs().amax(-1, keepdim=True) / 448
    assert torch.equal(scales[write], factors)
    assert torch.equal(codes[write].float(), (values / factors).to(codes.dtype).float())


def test_what_lies_outside_or_is_too_long_is_left_to_torch():
    given, stored = torch.ones(3, 1, 8), torch.zeros(3, 1, 8, dtype=torch.bfloat16)
    pair, numbers = (rows_of([given]), rows_of([stored])), np.array([0, 1])
    for wrong in (np.array([0, 3]), np.array([-1, 0])):
        assert not host_conversion.convert_rows([pair], wrong, numbers)
        assert not host_conversion.convert_rows([pair], numbers, wrong)
    long = torch.ones(1, 1, 1 << 15)
    assert not host_conversion.convert_rows(
        [(rows_of([long]), rows_of([long.to(torch.float16)]))], np.array([0]), np.array([0])
    )
    assert not stored.any()
