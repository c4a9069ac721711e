"""Batches of requests of different lengths: the logits are those of transformers' own cache over
the same padded batch, and the pool holds tokens only.
"""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from kvpool import Allocator, OutOfPages  # noqa: E402
from kvpool.integrations.transformers import PoolCache, pool_for  # noqa: E402
from tests.kvpool.integrations.caches import (  # noqa: E402
    CHUNKS,
    PROMPT,
    argument_of,
    assert_same,
    assert_same_run,
    cache_of,
    filled_with_nan,
    model_of,
    pool_of,
    prompt,
    run,
)
from tests.kvpool.models.tiny import own_cache, tiny  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ("llama", "gemma3_text", "deepseek_v3", "qwen3_next")
OTHERS = ("gpt_oss", "deepseek_v32", "kimi_linear")
STEPS = 3


def joined(caches, lengths):
    """transformers' own caches of single rows as one of a batch, padded with zeros on the left."""
    batch = copy.deepcopy(caches[lengths.index(max(lengths))])
    for layer, *rows in zip(batch.layers, *(cache.layers for cache in caches)):
        for name in ("keys", "values", "indexer_keys"):
            if getattr(layer, name, None) is None:
                continue
            like = getattr(layer, name)
            found = torch.zeros(len(rows), *like.shape[1:])
            for row, (cached, length) in enumerate(zip(rows, lengths)):
                if length:
                    kept = min(length, like.shape[-2])
                    found[row, ..., like.shape[-2] - kept :, :] = getattr(cached, name)[
                        0, ..., -kept:, :
                    ]
            setattr(layer, name, found)
        for name in ("conv_states", "recurrent_states"):
            for index, like in getattr(layer, name, {}).items():
                states = [
                    getattr(cached, name)[index] if length else torch.zeros_like(like)
                    for cached, length in zip(rows, lengths)
                ]
                getattr(layer, name)[index] = torch.cat(states)
    return batch


@torch.no_grad()
def forward(model, cache, ids, inputs):
    return model(ids, use_cache=True, **{argument_of(model): cache}, **inputs).logits


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_prompts_padded_on_the_left_in_chunks(family):
    model, ids, padding = model_of(family), prompt(3), (4, 14, 28)  # 1st, 2nd and 3rd chunk
    ours = cache_of(model, 3, padding)
    filled_with_nan(ours.pool)
    assert_same_run(model, ours, ids, padding)
    assert [request.num_tokens for request in ours.requests] == [33, 23, 9]


@pytest.mark.parametrize("family", ["deepseek_v32", "qwen3_next"])
def test_what_others_write_to_reserved_items_is_not_read(family):
    model, ids, padding = model_of(family), prompt(2), (0, 14)
    ours = cache_of(model, 2, padding)
    pool = ours.pool
    for buffer in pool.layout.buffers:
        pool.item_bytes_view(buffer)[:] = 0xFF
    expected = run(model, own_cache(model), ids, padding)
    for a, b in zip(run(model, ours, ids, padding)[1:], expected[1:], strict=True):
        since = 3 if a.shape[1] > 1 else 0  # the second chunk begins at column 11
        assert torch.equal(a[:, since:], b[:, since:])
    assert all((pool.item_bytes_view(b)[0] == 0xFF).all() for b in pool.layout.buffers)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        *((name, (28, 1, 1, 1)) for name in ("bamba", "falcon_h1", "mamba", "lfm2", "zamba2")),
        *((name, (17, 11, 1, 1, 1)) for name in ("mamba", "mamba2", "falcon_mamba")),
    ],
)
def test_padding_does_not_enter_a_linear_state(name, chunks):
    model, ids = model_of(name), prompt(2)
    theirs, ours = own_cache(model), cache_of(model, 2, (0, 13))
    filled_with_nan(ours.pool)
    for size in chunks:
        since = min(max(13 - ours.get_seq_length(), 0), size)
        inputs, mine = ours.inputs(size), ids[:, :size]
        a, b = (forward(model, cache, mine, inputs) for cache in (ours, theirs))
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1, since:], b[1, since:])
        ids = ids[:, size:] if ids.shape[1] > size else b[:, -1:].argmax(-1)
    assert [request.num_tokens for request in ours.requests] == [31, 18]


@pytest.mark.parametrize(
    ("family", "placement"),
    [
        *((family, "layer") for family in (*FAMILIES, *OTHERS)),
        *((family, "block") for family in ("gemma3_text", "qwen3_next")),
    ],
)
def test_requests_of_any_lengths_go_on_together(family, placement):
    model, lengths = model_of(family), [21, 6, 0]
    pool = filled_with_nan(pool_of(model, num_pages=80, placement=placement))
    allocator = Allocator(pool)
    requests, alone = [], []
    for row, length in enumerate(lengths):
        ids = prompt(3)[row : row + 1, :length]
        cache = PoolCache.new(pool, allocator)
        requests += cache.requests
        alone.append(own_cache(model))
        for each in (cache, alone[-1]) if length else ():
            run(model, each, ids, chunks=(length,), steps=0)
    theirs = joined(alone, lengths)
    ours = PoolCache(pool, allocator, requests, padding=[0, 15, 22])
    ids, logits, expected = prompt(3)[:, :5], [], []
    for _ in range(STEPS):
        inputs = ours.inputs(ids.shape[1])
        logits.append(forward(model, ours, ids, inputs))
        expected.append(forward(model, theirs, ids, inputs))
        ids = expected[-1][:, -1:].argmax(-1)
    assert [request.num_tokens for request in requests] == [28, 13, 6]
    assert_same(model, ours, theirs, logits, expected)


@pytest.mark.parametrize(
    ("family", "padding"),
    [*((family, (7, 0, 20)) for family in (*FAMILIES, *OTHERS)), ("deepseek_v4", (0, 0, 0))],
)
def test_generate_takes_a_batch_that_is_padded_on_the_left(family, padding):
    model, ids = model_of(family), prompt(3)
    mask = (torch.arange(PROMPT) >= torch.tensor(padding)[:, None]).long()
    kwargs = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    ours = cache_of(model, 3, padding)
    given = model.generate(ids, past_key_values=ours, **kwargs)
    assert torch.equal(given, model.generate(ids, **kwargs))
    assert [request.num_tokens for request in ours.requests] == [34 - each for each in padding]


def test_drafts_of_rows_of_different_lengths_are_taken_back():
    model = model_of("llama")
    ours = cache_of(model, 2, [0, 14])
    expected = run(model, own_cache(model), prompt(2), (0, 14))
    run(model, ours, prompt(2), (0, 14), steps=0)
    before = ours.pool._slab.clone()
    forward(model, ours, prompt(2)[:, :4], ours.inputs(4))
    ours.crop(-4)
    assert [request.num_tokens for request in ours.requests] == [PROMPT, PROMPT - 14]
    assert not torch.equal(ours.pool._slab, before)
    ids = expected[len(CHUNKS) - 1][:, -1:].argmax(-1)
    for step in expected[len(CHUNKS) :]:
        logits = forward(model, ours, ids, ours.inputs(1))
        assert torch.equal(logits, step)
        ids = step.argmax(-1)


def test_a_draft_shares_the_padding_of_its_target():
    model, small = model_of("llama"), model_of("olmo")
    target, draft = pool_of(model, page_size=8), pool_of(small, page_size=8, owner="draft")
    allocator = Allocator(target, draft)
    requests = [allocator.new_request() for _ in range(2)]
    ours = [PoolCache(pool, allocator, requests, padding=[0, 13]) for pool in (target, draft)]
    logits = []
    for chunk in prompt(2).split(11, dim=1):
        for cache, each in zip(ours, (model, small)):
            logits.append(forward(each, cache, chunk, cache.inputs(chunk.shape[1])))
    theirs = own_cache(small)
    expected = run(small, theirs, prompt(2), (0, 13), chunks=(11, 11, 7), steps=0)
    assert_same(small, ours[1], theirs, logits[1::2], expected)
    assert [request.num_tokens for request in requests] == [29, 16]


def test_a_padded_batch_that_does_not_fit_changes_nothing():
    model = model_of("qwen3_next")
    ours = cache_of(model, 2, [0, 14], num_pages=8)  # 7 of 5 tokens, 9 are needed
    with pytest.raises(OutOfPages):
        run(model, ours, prompt(2), (0, 14), chunks=(PROMPT,), steps=0)
    assert [request.num_tokens for request in ours.requests] == [0, 0]
    assert ours.get_seq_length() == 0
    assert not ours.pool._slab.any()
    ours.allocator.check_integrity()


@pytest.mark.parametrize(
    ("lengths", "padding", "sentence"),
    [
        ([3, 5], 0, r"\[3, 5\] tokens with padding \[0, 0\] .* Give padding=\[2, 0\]"),
        ([3, 0], 0, r"\[3, 0\] tokens .* padding=\[0, 3\]"),
        ([3, 3], [1, 0], r"padding=\[0, 0\]"),
        ([0, 0], [1.5, 0], r"padding: a whole number, or one for each of 2 rows, got \[1.5, 0\]"),
        ([0, 0], [1, 2, 3], r"one for each of 2 rows, got \[1, 2, 3\]"),
        ([0, 0], [-1, 0], r"padding: 0 or more, got \[-1, 0\]"),
    ],
)
def test_padding_after_which_rows_do_not_end_together_is_refused(lengths, padding, sentence):
    pool = pool_of(model_of("llama"))
    allocator = Allocator(pool)
    requests = [allocator.new_request() for _ in lengths]
    for request, length in zip(requests, lengths):
        allocator.extend(request, length)
    with pytest.raises(ValueError, match=sentence):
        PoolCache(pool, allocator, requests, padding)


def test_windows_that_a_model_compresses_by_columns_are_not_padded():
    with pytest.raises(ValueError, match=r"compresses windows of .* a batch of each length"):
        cache_of(model_of("deepseek_v4"), 2, [0, 4])


def test_blocks_that_a_model_selects_by_columns_are_not_padded():
    """transformers' own cache gives a row other logits there than alone."""
    pool = pool_for(tiny("minimax_m3_vl_text").config, dtype="f32", page_size=4, num_pages=9)
    allocator = Allocator(pool)
    PoolCache.new(pool, allocator, 2)
    with pytest.raises(ValueError, match=r"layer 1 index_key: padding \[0, 4\], .* of each length"):
        PoolCache.new(pool, allocator, 2, padding=[0, 4])
