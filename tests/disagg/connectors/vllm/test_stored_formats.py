"""State that one kernel of vLLM's has written reaches another through a store, whichever of them
lays its keys out channel by channel.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from disagg.store.geometry import Geometry, readable
from tests.disagg.connectors.vllm.engines import D
from tests.disagg.connectors.vllm.test_formats import FORMATS, Engine
from tests.disagg.store.stores import fresh, got, put, stores

CHUNK, TOKENS = 32, 96
PROMPT = np.arange(TOKENS)
FORMS = "transposed", "keys_and_values"


def engine(name, **more):
    return Engine(FORMATS[name], block=16, **more)


def cells(rank):
    """Each cell of a kernel, and what is to be in it: the same channels in whichever cells."""
    for kernel in rank.kernels:
        for token in range(TOKENS):
            for role, (head, *channel), cell in kernel.cells(*kernel.at(token)):
                source = np.random.default_rng([kernel.layer, role == "v", token, head])
                channels = torch.from_numpy(source.normal(size=D)).to(cell.dtype)
                yield cell, channels[channel] if channel else channels


@pytest.mark.parametrize(("there", "here"), [*product(FORMS, repeat=2)])
@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1)])
def test_kernels_read_what_others_have_written(there, here, ranks):
    writers, readers = (
        [engine(name, heads=4, tp=tp, rank=rank, seed=rank) for rank in range(tp)]
        for name, tp in zip((there, here), ranks)
    )
    url = fresh()
    with (
        stores(url, writers, chunk_tokens=CHUNK) as writing,
        stores(url, readers, chunk_tokens=CHUNK) as reading,
    ):
        for store, rank in zip(writing, writers):
            for cell, channels in cells(rank):
                cell.copy_(channels)
            assert put(store, PROMPT, rank.table(TOKENS)) == TOKENS // CHUNK
        for store, rank in zip(reading, readers):
            assert got(store, PROMPT, rank.table(TOKENS)) is None
            assert all(cell.equal(channels) for cell, channels in cells(rank))


def test_keys_that_lie_channel_by_channel_stay_so():
    """Elements alone would be runs: 32 tokens of two layers of two heads of 16 channels."""
    rank = engine("transposed")
    geometry = Geometry.of([rank.layout], {}, CHUNK)
    assert Geometry.decode(geometry.encoded).digest == geometry.digest
    (part,) = geometry.parts
    plan = readable(geometry, rank.layout, {}).plans["full"]
    batch = plan.bind(0, part["full"].address(0), rank.table(CHUNK), tokens=range(CHUNK))
    blocks_of_keys, blocks_of_values = 2 * 2 * 16 * CHUNK // 16, 2 * 2 * CHUNK // 16
    assert batch.runs <= blocks_of_keys + blocks_of_values
    assert batch.total == part["full"].nbytes
