"""Rows whose elements lie along an axis: keys channel by channel, the tokens of each side by side,
as vLLM's CPU kernels keep them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from disagg.portable.pool_converter import PoolConverter
from kvpool import RequestAddress, Span
from kvpool.describe import describe
from kvpool.layout import PoolLayout, Space
from tests.cast.formats import decode, encode

HEADS, DIM, ITEMS, TOKENS = 2, 16, 12, 27
DTYPES = "float32", "bfloat16", "float16", "float8_e4m3fn"
ORDERS = {
    "rows": ("item", "entry", "head", "dim"),
    "channels": ("item", "head", "dim", "entry"),
    "channels of all heads": ("item", "dim", "head", "entry"),
}
NATURAL = ORDERS["rows"]


class Side:
    """Keys `[item, entry, head, dim]`, in pages of `size`, whose bytes lie in another order."""

    def __init__(self, order, dtype, size, values=None):
        self.dtype, self.size, names = dtype, size, ORDERS[order]
        kind = getattr(torch, dtype)
        if values is None:
            values = np.zeros((ITEMS, size, HEADS, DIM), dtype=np.float32)
        stored, _ = encode(values, dtype)
        width = kind.itemsize
        turned = stored.transpose(*[NATURAL.index(name) for name in names], 4)
        memory = torch.from_numpy(np.ascontiguousarray(turned).reshape(-1)).view(kind)
        self.memory = memory.view(*turned.shape[:-1])
        assert width == stored.shape[-1]
        space, cell = Space("kv", "paged", size), "dim" if names[-1] == "dim" else None
        self.layout = PoolLayout.of(
            describe(self.memory, names, cell=cell, role="k", layer=0, space="kv"), spaces=[space]
        )
        self.names = names

    def values(self):
        """float32 `[item, entry, head, dim]`."""
        width = self.memory.element_size()
        raw = self.memory.view(-1).view(torch.uint8).numpy().reshape(*self.memory.shape, width)
        return decode(raw.transpose(*[self.names.index(name) for name in NATURAL], 4), self.dtype)

    def table(self, seed):
        ids = 1 + np.random.default_rng(seed).permutation(ITEMS - 1)[: -(-TOKENS // self.size)]
        return RequestAddress(TOKENS, {"kv": Span(ids)})

    def rows(self, table):
        """Of a request, `[token, head, dim]`."""
        return self.values()[table.spans["kv"].ids].reshape(-1, HEADS, DIM)[:TOKENS]


@pytest.mark.parametrize("there", ORDERS)
@pytest.mark.parametrize("here", ORDERS)
def test_any_two_orders_and_floats(there, here):
    rng = np.random.default_rng(3)
    for given in DTYPES:
        for wanted in DTYPES:
            if given == wanted:
                continue
            held = rng.standard_normal((ITEMS, 4, HEADS, DIM)).astype(np.float32) * 100
            source, dest = Side(there, given, 4, held), Side(here, wanted, 3)
            first, second = source.table(1), dest.table(2)
            PoolConverter(source.layout, dest.layout).convert(first, second)
            expected, _ = encode(source.rows(first), wanted)
            assert np.array_equal(dest.rows(second), decode(expected, wanted)), (given, wanted)


@pytest.mark.parametrize("there", ORDERS)
def test_elements_along_an_axis_become_quantised_rows(there):
    held = np.random.default_rng(3).standard_normal((ITEMS, 4, HEADS, DIM)).astype(np.float32)
    source = Side(there, "bfloat16", 4, held)
    codes = torch.zeros(ITEMS, 3, HEADS, DIM, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(ITEMS, 3, HEADS, 1)
    layout = PoolLayout.of(
        describe(codes, NATURAL, role="k", layer=0, space="kv"),
        describe(scales, NATURAL, role="k.scale", layer=0, space="kv"),
        spaces=[Space("kv", "paged", 3)],
    )
    first, ids = source.table(1), np.arange(9, 0, -1)
    PoolConverter(source.layout, layout).convert(first, RequestAddress(TOKENS, {"kv": Span(ids)}))
    values, factors = encode(source.rows(first), "float8_e4m3fn", "float32", 1)
    found = codes.view(torch.uint8).numpy()[ids].reshape(-1, HEADS, DIM, 1)[:TOKENS]
    assert np.array_equal(found, values)
    found = scales.view(torch.uint8).numpy()[ids].reshape(-1, HEADS, 1, 4)[:TOKENS]
    assert np.array_equal(found, factors)
