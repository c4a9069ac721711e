"""A model goes on where another process has written, in pages of another size, and computes what it
would have computed alone: every bit of every logit, the conversation's second turn included.
"""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from disagg.connectors.conventions import conventions  # noqa: E402
from disagg.store import Store  # noqa: E402
from kvpool import Allocator, PrefixCache  # noqa: E402
from tests.disagg.store.stores import fresh  # noqa: E402
from tests.kvpool.integrations.caches import assert_same, model_of, pool_of  # noqa: E402
from tests.kvpool.integrations.test_prefix_reuse import (  # noqa: E402
    CHECKPOINT,
    FAMILIES,
    SHARED,
    STEPS,
    alone,
    ids_of,
    serve,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def runner(model, url, page, **sizes):
    """A pool, its store and its allocator, as another process would have them."""
    pages = {"page_size": page, **sizes}
    if model.config.model_type == "deepseek_v4":
        pages = {"page_size": 1, "window_page_size": page}  # other pages are of 16 tokens
    pool = pool_of(model, **pages)
    said = conventions(model.config)
    store = Store(url, pool.layout, conventions=said, chunk_tokens=CHECKPOINT)
    cache = PrefixCache(checkpoint_tokens=CHECKPOINT, store=store)
    return pool, store, Allocator(pool, prefix=cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_pool_goes_on_without_a_changed_bit(family):
    model, url = model_of(family), fresh()
    pool, store, allocator = runner(model, url, page=8)
    found, cache, _ = serve(model, pool, allocator, ids_of(4, 21))
    assert found == 0
    assert cache.requests[0].num_tokens == SHARED + 21 + STEPS
    store.close()
    pool, store, allocator = runner(model, url, page=CHECKPOINT)
    ids = ids_of(5, 13)
    found, cache, logits = serve(model, pool, allocator, ids)
    assert found == SHARED
    theirs, expected = alone(model, ids)
    assert_same(model, cache, theirs, logits, expected[SHARED // CHECKPOINT :])
    store.close()


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_second_turn_begins_with_what_was_generated(family):
    model, url = model_of(family), fresh()
    pool, store, allocator = runner(model, url, page=8)
    ids = ids_of(4, CHECKPOINT - 2)
    found, _, logits = serve(model, pool, allocator, ids)
    store.close()
    answer = torch.stack([one[0, -1].argmax() for one in logits[-STEPS - 1 : -1]])
    turn = torch.cat([ids, answer[None], ids_of(9, 3)], dim=1)
    pool, store, allocator = runner(model, url, page=CHECKPOINT)
    found, _, logits = serve(model, pool, allocator, turn)
    assert found == SHARED + CHECKPOINT  # the last of it was generated
    store.close()
    _, theirs = alone(model, turn)
    # the first engine computed what it generated token by token, which rounds otherwise
    torch.testing.assert_close(logits, theirs[found // CHECKPOINT :], rtol=0, atol=1e-4)
