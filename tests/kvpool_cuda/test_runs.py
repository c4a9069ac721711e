"""Runs of bytes between pointers."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from tests.kvpool_cuda.devices import device


@st.composite
def runs_of_bytes(draw):
    """Lengths, and the starts of runs in a source and a destination, in different orders and with
    gaps.
    """
    unit = draw(st.sampled_from([1, 2, 4, 16, 16]))
    lengths = st.sampled_from([0, 1, 2, 3, 32, 33, 40, 500])
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
