"""What any ranks read from a store is what any others have written, byte by byte, and nothing else
is written.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests import oracle
from tests.disagg import test_matrix
from tests.disagg.store.stores import CHUNK, fresh, got, put, stores
from tests.disagg.test_matrix import SHAPES
from tests.pools import CLASSES, PACKED

MANY = {"num_pages": 40, "num_window_pages": 40}
TOKENS = 3 * CHUNK
EVERY = {**CLASSES, **PACKED}
USUAL = {*CLASSES, "mha mxfp8", "hybrid nsa fp8", "dsv4 fp8"}
PROMPT = np.random.default_rng(7).integers(0, 1000, TOKENS)
CASES = [
    pytest.param(name, shape, marks=() if name in USUAL else pytest.mark.long)
    for name in EVERY
    for shape in SHAPES
]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_every_pool_and_every_shape(name, shape, monkeypatch):
    monkeypatch.setattr(test_matrix, "MANY", MANY)
    sources, dests = SHAPES[shape](EVERY[name].but(**MANY))
    writers = [oracle.merged(*(build() for build in builds)) for builds in sources]
    readers = [oracle.merged(*(build() for build in builds)) for builds in dests]
    url = fresh()
    with stores(url, writers) as writing, stores(url, readers) as reading:
        for seed, (store, holder) in enumerate(zip(writing, writers)):
            put(store, PROMPT, oracle.filled(holder, TOKENS, seed))
        for seed, (store, holder) in enumerate(zip(reading, readers), 90):
            assert store.lookup([*PROMPT, 5]) == TOKENS
            oracle.blank(holder)
            address = oracle.place(holder, TOKENS, seed)
            assert got(store, PROMPT, address) is None
            oracle.assert_holds(holder, address)
