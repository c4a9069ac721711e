"""A request bound before and after its number of tokens is known: everything once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from disagg.plan import Count, plan
from kvpool import RequestAddress
from tests.disagg.plan.test_packed import cache
from tests.oracle import apply, assert_holds, blank, fill, place
from tests.pools import CLASSES

TOKENS, ROOM = 21, 30
MANY = {"num_pages": 14, "num_window_pages": 24}
HOLDERS = {
    **{name: CLASSES[name].but(**MANY) for name in ("mha", "swa", "hybrid", "dsv4")},
    "packed": cache,
    "packed window": lambda: cache(window=5),
}


@pytest.mark.parametrize("cuts", [(0, 21), (0, 8, 21), (0, 7, 16, 20, 21)], ids=str)
@pytest.mark.parametrize("name", HOLDERS)
def test_what_the_number_decides_is_bound_after_all_else_and_nothing_twice(name, cuts):
    source, dest = HOLDERS[name](), HOLDERS[name]()
    theirs, ours = place(source, TOKENS, 1), place(dest, ROOM, 2)
    fill(source, theirs)
    blank(dest)
    made = plan([source.layout], dest.layout)
    real = RequestAddress(TOKENS, ours.spans)
    parts = []
    for start, stop in pairwise(cuts):
        now = RequestAddress(stop, theirs.spans)
        parts.append((now, ours, range(start, stop), Count.UNKNOWN))
    parts.append((theirs, real, range(TOKENS), Count.LEARNED))
    written = []
    for here, there, tokens, count in parts:
        batch = made.bind(0, here, there, tokens=tokens, count=count)
        apply(batch, [source], dest)
        written += [np.arange(at, at + size) for at, size in zip(batch.dst, batch.nbytes)]
        assert batch.runs == 0 or made.needs_count(0) or count is Count.UNKNOWN
    assert_holds(dest, real)
    bytes_written = np.concatenate(written)
    assert np.unique(bytes_written).size == bytes_written.size
