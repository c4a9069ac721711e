"""Ranges of registered memory, against a byte-by-byte model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from disagg.engines.base import TransferError
from disagg.engines.ranges import Ranges
from disagg.plan.bind import CopyBatch

# gaps of 0 make ranges that touch
RANGES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=8)
RUNS = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), max_size=12)


@given(RANGES, RUNS)
def test_runs_are_cut_at_edges_and_no_byte_is_lost_or_added(given_ranges, runs):
    end, placed = 5, []
    for gap, nbytes in given_ranges:
        placed.append((end + gap, nbytes))
        end += gap + nbytes
    owner = {
        byte: number for number, (base, n) in enumerate(placed) for byte in range(base, base + n)
    }
    src = np.array([start for start, _ in runs], dtype=np.int64)
    nbytes = np.array([length for _, length in runs], dtype=np.int64)
    batch = CopyBatch(src, src + 1000, nbytes)
    bytes_of = [range(start, start + length) for start, length in runs]
    ranges = Ranges.of(placed[::-1])
    if not all(byte in owner for run in bytes_of for byte in run):
        with pytest.raises(TransferError, match="the peer has registered"):
            ranges.cut(batch, batch.src, "the peer")
        return
    cut = ranges.cut(batch, batch.src, "the peer")
    pieces = [range(start, start + n) for start, n in zip(cut.src.tolist(), cut.nbytes.tolist())]
    assert [byte for piece in pieces for byte in piece] == [b for run in bytes_of for b in run]
    assert all(len({owner[byte] for byte in piece}) == 1 for piece in pieces)
    assert np.array_equal(cut.dst, cut.src + 1000)


def test_without_registered_memory_every_run_is_refused():
    ones = np.ones(1, dtype=np.int64)
    with pytest.raises(TransferError, match="this engine has registered no memory"):
        Ranges.of([]).cut(CopyBatch(ones, ones, ones), ones, "this engine")


@pytest.mark.parametrize(
    "given_ranges", [[(0, 0)], [(5, -1)], [(-1, 9)], [(0, 9), (8, 2)], [((1 << 63) - 1, 1)]]
)
def test_ranges_that_overlap_or_overflow_are_refused(given_ranges):
    with pytest.raises(ValueError, match="overlap another range or are invalid"):
        Ranges.of(given_ranges)
