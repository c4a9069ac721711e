"""A model decodes over a reused prefix as over one that it computed: every bit of every logit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

transformers = pytest.importorskip("transformers")

from kvpool import Allocator, PrefixCache  # noqa: E402
from kvpool.integrations.transformers import PoolCache  # noqa: E402
from tests.kvpool.integrations.caches import assert_same, model_of, pool_of, run  # noqa: E402
from tests.kvpool.models.tiny import changes, made, own_cache  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ("llama", "gemma3_text", "qwen3_next", "deepseek_v3", "deepseek_v4")
CHECKPOINT, SHARED, STEPS = 16, 32, 5
PAGE_RINGS = {"page_rings": True}


def allocator_of(model, page, **sizes):
    """A pool with pages of `page` tokens, where checkpoints end too, and its allocator."""
    pages = {"page_size": page}
    if model.config.model_type == "deepseek_v4":
        pages = {"page_size": 1, "window_page_size": page}  # other pages are of 16 tokens
    pool = pool_of(model, **pages, **sizes)
    return pool, Allocator(pool, prefix=PrefixCache(checkpoint_tokens=CHECKPOINT))


def ids_of(tail: int, tokens: int) -> torch.Tensor:
    """`[1, SHARED + tokens]`: all begin alike."""
    parts = [
        torch.randint(0, 128, (1, n), generator=torch.Generator().manual_seed(seed))
        for seed, n in ((3, SHARED), (tail, tokens))
    ]
    return torch.cat(parts, dim=1)


def serve(model, pool, allocator, ids):
    """Computes what of a prompt is not there, in chunks, and decodes; stores all of it."""
    request = allocator.new_request(ids[0, :-1])
    found, logits = request.num_tokens, []
    cache = PoolCache(pool, allocator, [request])
    edges = [found, *range(found + CHECKPOINT, ids.shape[1], CHECKPOINT), ids.shape[1]]
    for start, stop in pairwise(edges):
        logits += run(model, cache, ids[:, start:stop], chunks=(stop - start,), steps=0)
        allocator.store(request, ids[0, start:stop])
    for _ in range(STEPS):
        token = logits[-1][:, -1:].argmax(-1)
        logits += run(model, cache, token, chunks=(1,), steps=0)
        allocator.store(request, token[0])
    return found, cache, logits


def alone(model, ids):
    """The same with transformers' own cache, over all tokens: logits of each forward."""
    cache = own_cache(model)
    whole, rest = divmod(ids.shape[1], CHECKPOINT)
    chunks = (CHECKPOINT,) * whole + (rest,)
    return cache, run(model, cache, ids, chunks=chunks, steps=STEPS)


@pytest.mark.parametrize(
    ("family", "more"), [*((family, {}) for family in FAMILIES), ("deepseek_v4", PAGE_RINGS)]
)
def test_a_reused_prefix_changes_no_bit(family, more):
    model = model_of(family)
    pool, allocator = allocator_of(model, page=8, **more)
    found, first, _ = serve(model, pool, allocator, ids_of(4, 21))
    assert found == 0
    allocator.free(first.requests[0])
    live = None
    for tail in (5, 6):  # beside the one before, whose pages it shares
        ids = ids_of(tail, 13)
        found, cache, logits = serve(model, pool, allocator, ids)
        assert found == SHARED
        theirs, expected = alone(model, ids)
        assert_same(model, cache, theirs, logits, expected[SHARED // CHECKPOINT :])
        if live is not None:
            kept, theirs, logits, expected = live
            assert_same(model, kept, theirs, logits, expected)
        live = cache, theirs, logits, expected[SHARED // CHECKPOINT :]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_whose_pages_were_taken_is_computed_anew(family):
    model = model_of(family)
    pool, allocator = allocator_of(model, page=CHECKPOINT, num_pages=5, num_slots=3)
    for seed in range(3):
        ids = torch.randint(0, 128, (1, 45), generator=torch.Generator().manual_seed(seed % 2))
        _, cache, logits = serve(model, pool, allocator, ids)
        theirs, expected = alone(model, ids)
        assert_same(model, cache, theirs, logits, expected[-len(logits) :])
        allocator.free(cache.requests[0])


def test_rings_of_pages_are_reused_at_every_page_of_a_long_chunk():
    """All windows of this model lie in pages: a prefix needs no checkpoint of a state."""
    types = ["sliding_attention", *["compressed_sparse_attention"] * 2]
    fields = {"num_hidden_layers": 3, "layer_types": types}
    model = made("deepseek_v4", changes("deepseek_v4") | fields)
    pool = pool_of(model, page_size=1, window_page_size=8, **PAGE_RINGS)
    assert not any(space.per_request for space in pool.layout.spaces)
    allocator = Allocator(pool, prefix=PrefixCache())
    first, second = ids_of(4, 21), ids_of(5, 13)
    cache = PoolCache(pool, allocator, [allocator.new_request()])
    run(model, cache, first, chunks=(first.shape[1],), steps=0)
    allocator.store(cache.requests[0], first[0])
    request = allocator.new_request(second[0, :-1])
    assert request.num_tokens == SHARED
    cache = PoolCache(pool, allocator, [request])
    logits = run(model, cache, second[:, SHARED:], chunks=(13,), steps=STEPS)
    theirs = own_cache(model)
    expected = run(model, theirs, second, chunks=(SHARED, 13), steps=STEPS)
    # chunks of other lengths round otherwise
    torch.testing.assert_close(logits, expected[1:], rtol=0, atol=1e-5)
