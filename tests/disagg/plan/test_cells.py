"""A side that has an axis where the other has a cell: each element arrives where it means the same,
and the digests of both sides are equal. The oracle is plain indexing.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from disagg.digest.digest import digests, pieces
from disagg.plan import IncompatibleLayouts, plan
from disagg.plan.cache import PlanCache
from kvpool.describe import describe
from kvpool.layout import PoolLayout, RequestAddress, Space, Span
from kvpool.layout.types import MAX_AXES
from tests import oracle

TOKENS = 21
SIZES = {"item": 9, "head": 3, "dim": 8, "key": 4, "value": 6}
PAGES = {  # dims of a tensor, and the one whose elements stay together
    "cells of dim": (("item", "entry", "head", "dim"), "dim"),
    "tokens innermost": (("item", "head", "dim", "entry"), None),
    "dim outermost": (("item", "dim", "entry", "head"), None),
}
STATES = {
    "cells of value": (("item", "head", "key", "value"), "value"),
    "cells of key": (("item", "head", "value", "key"), "key"),
    "elements": (("item", "value", "head", "key"), None),
}


class Side:
    """One tensor, its layout, and the block table of a request."""

    def __init__(self, dims, cell, page, ids):
        sizes = {**SIZES, "entry": page}
        self.dims, self.ids = dims, torch.tensor(ids)
        self.view = torch.zeros([sizes[name] for name in dims])
        space = Space("kv", "paged", page) if "entry" in dims else Space("kv", "slot")
        seen = describe(self.view, dims, role="k", layer=0, cell=cell)
        self.layout = PoolLayout(seen.buffers, seen.regions, (space,), 1)
        self.table = RequestAddress(TOKENS, {"kv": Span(ids)})

    @property
    def state(self):
        return oracle.over(self.layout, self.view.view(-1).view(torch.uint8).numpy())

    def elements(self, *order):
        """What the request holds, dims in this order."""
        held = self.view.permute([self.dims.index(name) for name in ("item", *order)])[self.ids]
        return held.flatten(0, 1)[:TOKENS] if "entry" in order else held

    def digest(self, moved):
        return np.concatenate([*digests(self.layout, self.table, moved)])


def paged(order, page, ids):
    return Side(*PAGES[order], page, ids)


def slots(order, page, ids):
    return Side(*STATES[order], page, ids[:1])


CASES = [
    *((paged, a, b, ("entry", "head", "dim")) for a in PAGES for b in PAGES),
    *((slots, a, b, ("head", "key", "value")) for a in STATES for b in STATES),
]


@pytest.mark.parametrize(("side", "there", "here", "order"), CASES)
def test_elements_arrive_where_they_mean_the_same(side, there, here, order):
    source, dest = side(there, 8, [4, 2, 7]), side(here, 5, [1, 8, 2, 6, 3])
    source.view.copy_(torch.arange(1.0, source.view.numel() + 1).reshape(source.view.shape))
    cache = PlanCache()
    for made in (plan([source.layout], dest.layout), *(2 * [None])):
        made = made or cache.plan([source.layout], dest.layout)
        dest.view.zero_()
        oracle.apply(made.bind(0, source.table, dest.table), [source.state], dest.state)
        assert dest.elements(*order).equal(source.elements(*order))
        moved = pieces(made, 0, range(TOKENS), TOKENS)
        assert np.array_equal(source.digest(moved), dest.digest(moved))
        dest.view.view(-1)[:] += 1
        assert not np.array_equal(source.digest(moved), dest.digest(moved))


def test_cells_of_which_the_order_is_not_known_are_refused():
    """A cell of keys and values together, and one that says which rows it has."""
    rows = Side(*STATES["cells of key"], 1, [4])
    flat = torch.zeros(9, 3, 24)
    seen = describe(flat, ("item", "head", "dim"), role="k", layer=0)
    cells = PoolLayout(seen.buffers, seen.regions, (Space("kv", "slot"),), 1)
    for source, dest in ((rows.layout, cells), (cells, rows.layout)):
        with pytest.raises(IncompatibleLayouts, match=r"target layer 0 k: .*'value'.* axes"):
            plan([source], dest)


def test_a_peer_with_as_many_axes_as_there_can_be_is_refused_like_any_other():
    names = [f"x{n}" for n in range(MAX_AXES)]
    seen = describe(torch.zeros(9, *[1] * MAX_AXES, 4), ("item", *names, "dim"), role="k", layer=0)
    peer = PoolLayout(seen.buffers, seen.regions, (Space("kv", "slot"),), 1)
    with pytest.raises(IncompatibleLayouts, match=r"target layer 0 k: .* axes on prefill"):
        plan([peer], Side(*STATES["elements"], 1, [4]).layout)
