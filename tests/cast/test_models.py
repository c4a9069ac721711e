"""A model goes on over what decode has converted as over what its own pool would have stored: the
same logits, bit for bit.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest

pytest.importorskip("transformers")

import numpy as np
import torch

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from kvpool import Allocator
from kvpool.integrations.transformers import PoolCache
from kvpool.testing.memory import same_as_pool
from tests.kvpool.integrations.caches import pool_of, prompt, run
from tests.kvpool.models.tiny import smooth

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = (
    *("llama", "qwen3_moe", "deepseek_v3", "deepseek_v32"),
    *("gpt_oss", "qwen3_next", "kimi_linear", "deepseek_v4"),
)
CHUNKS, TOKENS, STEPS = (11, 18), 29, 8
MOST = 0.06
"""Error of a logit, relative to the largest."""


def in_chunks(pool, *chunks, received=False):
    """A request in a pool, with tokens that nobody has computed there."""
    allocator = Allocator(pool)
    request = allocator.new_request()
    for tokens in chunks:
        allocator.extend(request, tokens, received=received)
    return PoolCache(pool, allocator, [request]), request.address()


def tee(pool, also):
    """Whatever is stored in a pool is stored in another of equal geometry too."""
    own = pool.write

    def write(layer, locations, values):
        own(layer, locations, values)
        also.write(layer, locations, values)

    return patch.object(pool, "write", write)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_goes_on_as_over_rows_of_its_own(family):
    model, ids = smooth(family).to(torch.bfloat16), prompt(1, TOKENS + 1)
    own, alone, dest = pool_of(model), *(pool_of(model, packing="fp8") for _ in range(2))
    prefilled = PoolCache.new(own, Allocator(own))
    with tee(own, alone):
        run(model, prefilled, ids[:, :TOKENS], chunks=CHUNKS, steps=0)
    table = prefilled.requests[0].address()
    reference, same = in_chunks(alone, *CHUNKS)
    assert all(np.array_equal(same.spans[n].ids, table.spans[n].ids) for n in table.spans)
    cache, address = in_chunks(dest, TOKENS, received=True)
    with (
        PrefillEndpoint(own.layout, create_engine("local")) as prefill,
        DecodeEndpoint(dest.layout, create_engine("local"), cast=True) as decode,
    ):
        decode.connect([prefill.address], timeout=30)
        decode.receive("r", address)
        prefill.send("r", table, last=True)
        assert decode.wait("r", 60) is KVPoll.Success, decode.failure("r")
    bytes_of = same_as_pool(dest, address, alone, same)
    assert bytes_of.checked and not bytes_of.wrong, bytes_of
    rest, steps = ids[:, TOKENS:], {"chunks": (1,), "steps": STEPS}
    found, expected = (run(model, each, rest, **steps) for each in (cache, reference))
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    (exact,) = run(model, prefilled, rest, chunks=(1,), steps=0)
    error = float((found[0] - exact).abs().max() / exact.abs().max())
    assert 0 < error < MOST, f"{error:.1%}"
