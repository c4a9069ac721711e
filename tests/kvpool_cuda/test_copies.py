"""Copies of items in all buffers at once, which read all sources before they write; and of runs
between pointers.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from kvpool_cuda import copies
from tests.kvpool_cuda.devices import MEMORY, device

ITEMS = 6


def buffers(memory, shapes):
    """Consecutive buffers of (item bytes, bytes between items)."""
    at, views = 0, []
    for width, gap in shapes:
        views.append(memory.as_strided([ITEMS, width], [width + gap, 1], at))
        at += ITEMS * (width + gap) + gap % 4
    return views


def moved(shapes, src, dst, disjoint):
    room = sum(ITEMS * (width + gap) + 4 for width, gap in shapes)
    held = device().allocate(room)
    random = torch.Generator().manual_seed(0)
    held.copy_(torch.randint(0, 256, (room,), dtype=torch.uint8, generator=random))
    wanted = held.cpu().clone()
    for view in buffers(wanted, shapes):
        view[dst] = view[src]
    ids = (torch.tensor(each, device=MEMORY) for each in (src, dst))
    device().copy_items(buffers(held, shapes), *ids, disjoint=disjoint)
    assert torch.equal(held.cpu(), wanted)


SHAPES = st.lists(
    st.tuples(st.sampled_from([1, 4, 7, 48, 132, 576, 700]), st.sampled_from([0, 1, 4, 16])),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25)
@given(SHAPES, st.permutations(range(ITEMS)), st.integers(1, 5), st.booleans())
def test_items_are_copied_in_buffers_of_any_size_and_alignment(shapes, order, count, staged):
    count = min(count, ITEMS // 2)
    moved(shapes, order[:count], order[count : 2 * count], disjoint=not staged)


@settings(max_examples=25)
@given(SHAPES, st.lists(st.integers(0, 5), min_size=1, max_size=5), st.permutations(range(ITEMS)))
def test_a_chain_of_items_is_read_before_it_is_written(shapes, src, order):
    moved(shapes, src, order[: len(src)], disjoint=False)


def test_items_longer_than_a_piece_and_a_small_stage(monkeypatch):
    shapes = [(3 * copies.PIECE + 52, 12), (40, 8), (2 * copies.PIECE, 0)]
    for room in (1, 3 * copies.PIECE, copies.STAGE_BYTES):
        monkeypatch.setattr(copies, "STAGE_BYTES", room)
        moved(shapes, [1, 2], [2, 1], disjoint=False)
    moved(shapes, [1], [2], disjoint=True)


def test_views_that_are_not_bytes_of_items_are_refused():
    ids = torch.tensor([1], device=MEMORY)
    for wrong in (torch.zeros(4, 8), torch.zeros(8, 4, dtype=torch.uint8).T):
        with pytest.raises(ValueError, match="expected bytes"):
            device().copy_items([wrong.to(MEMORY)], ids, ids)
    with pytest.raises(ValueError, match=r"ids to copy to: \[1\] torch\.int32"):
        held = torch.zeros(4, 8, dtype=torch.uint8, device=MEMORY)
        device().copy_items([held], ids, ids.int())


@st.composite
def runs_of_bytes(draw):
    """Lengths, and the starts of runs in a source and a destination, in different orders and with
    gaps.
    """
    unit = draw(st.sampled_from([1, 2, 4, 16, 16]))
    lengths = st.sampled_from([0, 1, 2, 3, 32, 33, 40, 500, 1500])
    if draw(st.booleans()):
        lengths = st.just(draw(lengths))
    nbytes = np.array(draw(st.lists(lengths, min_size=1, max_size=30)), dtype=np.int64) * unit
    if draw(st.booleans()):
        nbytes += np.array([draw(st.sampled_from([0, 0, 0, 1, 4])) for _ in nbytes]) * (nbytes > 0)
    places = []
    for _ in range(2):
        order = np.array(draw(st.permutations(range(nbytes.size))), dtype=np.int64)
        gap = draw(st.sampled_from([0, unit, 3 * unit]))
        starts = np.empty_like(nbytes)
        starts[order] = np.cumsum(nbytes[order] + gap) - nbytes[order]
        places.append(starts)
    return nbytes, *places


@settings(max_examples=60)
@given(runs_of_bytes())
def test_any_runs_are_copied_to_the_byte(given_runs):
    nbytes, src, dst = given_runs
    room = int(max((src + nbytes).max(), (dst + nbytes).max(), 1))
    source, copied = (device().allocate(room) for _ in range(2))
    random = torch.Generator().manual_seed(0)
    source.copy_(torch.randint(0, 256, (room,), dtype=torch.uint8, generator=random))
    held, wanted = source.cpu(), torch.zeros(room, dtype=torch.uint8)
    for start, at, size in zip(src, dst, nbytes):
        wanted[at : at + size] = held[start : start + size]

    device().copy_runs(source.data_ptr() + src, copied.data_ptr() + dst, nbytes)
    assert torch.equal(copied.cpu(), wanted)
