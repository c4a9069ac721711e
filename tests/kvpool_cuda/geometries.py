"""Tensors with axes in any memory order and gaps between their steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st


class Grid(NamedTuple):
    """Axes of `shape` in memory in the order `order` (outermost first), each `before` steps into
    its room and with `after` steps of room behind.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    def room(self):
        return torch.Size(b + s + a for b, s, a in zip(self.before, self.shape, self.after)).numel()

    def of(self, memory):
        widths = [b + s + a for b, s, a in zip(self.before, self.shape, self.after)]
        whole = memory.view([widths[axis] for axis in self.order])
        whole = whole.permute([self.order.index(axis) for axis in range(len(self.shape))])
        for axis, (start, size) in enumerate(zip(self.before, self.shape)):
            whole = whole.narrow(axis, start, size)
        return whole


@st.composite
def grids(draw, shape, inner=False):
    """`inner`: elements of the last axis are adjacent."""
    axes = range(len(shape))
    order = tuple(draw(st.permutations(axes[:-1] if inner else axes)))
    steps = st.tuples(*(st.sampled_from([0, 0, 0, 1, 2, 8]) for _ in shape))
    return Grid(tuple(shape), (*order, axes[-1]) if inner else order, draw(steps), draw(steps))


@st.composite
def entries(draw, inner=False):
    """Axes after the entries, locations, and grids of a view and of as many values."""
    items, per_item = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    axes = draw(st.lists(st.integers(1, 4), max_size=2 if inner else 3))
    cell = draw(st.sampled_from([1, 2, 3, 8, 16, 24]))
    all_of_them = range(items * per_item)
    where = draw(st.lists(st.sampled_from(all_of_them), unique=True, min_size=1, max_size=9))
    view = draw(grids((items, per_item, *axes, cell), inner))
    return where, view, draw(grids((len(where), *axes, cell)))
