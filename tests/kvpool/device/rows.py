"""Memory of rows, and what is stored there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from hypothesis import strategies as st

from kvpool.testing.values import decode


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


@contextmanager
def in_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def view_of(shape, dtype, order, gap, fill=0xA5):
    """Memory full of `fill`, and a view `[item, entry, ..., element]` of it whose axes lie in
    `order`, with `gap` elements after each item and before the first.
    """
    item, *inner = shape
    strides, step = [0] * len(inner), 1
    for axis in reversed([*order, len(inner) - 1]):
        strides[axis] = step
        step *= inner[axis]
    step += gap
    memory = torch.full(((item * step + gap) * dtype.itemsize,), fill, dtype=torch.uint8)
    return memory, memory.view(dtype).as_strided(shape, [step, *strides], gap)


@st.composite
def geometries(draw):
    """Items, entries, further axes, blocks and elements of a block; the axes' order; gaps."""
    axes = draw(st.lists(st.integers(1, 3), max_size=2))
    shape = [draw(st.integers(1, 4)), draw(st.integers(1, 5)), *axes]
    block = draw(st.sampled_from([1, 2, 7, 16, 32, 33, 64, 100, 128]))
    order = draw(st.permutations(range(len(axes) + 1)))
    return shape, draw(st.integers(1, 4)), block, order, draw(st.sampled_from([0, 1, 5, 16]))


NAN_OF_EITHER_SIGN = torch.float16, torch.float8_e4m3fn, torch.float32
"""torch's sign of a NaN depends on where it lies in the tensor."""
SEEDS = st.integers(0, 2**32 - 1)
NUMBERS = st.sampled_from(["any bits", "like magnitudes", "codes and ties", "with an odd one"])
ODD = [0, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F7FFFFF]


def floats_of(kind, shape, random):
    """float32 of all sorts."""
    if kind == "any bits":
        return random.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
    powers = random.integers(-150, 115, (*shape[:-1], 1))
    with np.errstate(all="ignore"):
        if kind == "codes and ties":
            steps = random.integers(-128, 129, shape) * 2.0 ** random.integers(-10, 1, shape)
            return np.float32(steps * 3.5 * 2.0**powers)
        found = np.float32(random.standard_normal(shape) * 2.0**powers)
    if kind == "with an odd one":
        odd = random.choice(np.array(ODD, dtype=np.uint32), shape).view(np.float32)
        np.copyto(found, odd, where=random.random(shape) < 1 / found.shape[-1])
    return found


def same_codes(found, expected, dtype):
    """Bytes of floats, codes or scales; of a NaN only that it is one."""
    nan = np.isnan(decode(found, dtype)) & np.isnan(decode(expected, dtype))
    nan = np.repeat(nan, found.shape[-1] // nan.shape[-1], axis=-1)
    wrong = np.argwhere((found != expected) & ~nan)
    assert not wrong.size, (dtype, wrong[0].tolist())
