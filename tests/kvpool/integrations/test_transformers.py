"""PoolCache against transformers' own DynamicCache: the same logits and the same bytes, or a
refusal.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from kvpool import (  # noqa: E402
    Allocator,
    KVPool,
    MHAPool,
    MLAPool,
    OutOfPages,
    RequestPinned,
    Shard,
    SWAPool,
)
from kvpool.integrations.transformers import PoolCache  # noqa: E402
from kvpool.layout.formats import MHA  # noqa: E402
from tests.kvpool.integrations.caches import (  # noqa: E402
    CHUNKS,
    PROMPT,
    STEPS,
    assert_same,
    assert_same_run,
    cache_of,
    filled_with_nan,
    model_of,
    offered,
    pool_of,
    prompt,
    run,
)
from tests.kvpool.models.tiny import own_cache, smooth  # noqa: E402
from tests.oracle import move  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIGS = (
    "llama",
    "deepseek_v3",
    "deepseek_v32",
    "gpt_oss",
    "qwen3_next",
    "kimi_linear",
    "deepseek_v4",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("padding", [None, (0, 6)], ids=["one row", "padded rows"])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_and_bytes_equal_dynamic_cache(family, padding, dtype):
    if padding and family == "deepseek_v4":
        padding = (0, 0)  # a compressed entry of padding and tokens has no meaning
    model, ids = model_of(family, dtype), prompt(1 if padding is None else 2)
    assert_same_run(model, cache_of(model, len(ids), padding or 0), ids, padding)


@pytest.mark.parametrize("page_size", [1, 7, 64])
@pytest.mark.parametrize(
    ("family", "common"),
    [
        ("llama", {"order": "hnd"}),
        ("llama", {"order": "hnd", "placement": "page"}),
        ("deepseek_v3", {"placement": "page"}),
        *((family, {"placement": "page"}) for family in CONFIGS[2:]),
        *((family, {"placement": "block"}) for family in ("gpt_oss", "qwen3_next", "deepseek_v4")),
    ],
    ids=str,
)
def test_neither_page_size_nor_order_nor_placement_changes_a_bit(family, common, page_size):
    model, ids = model_of(family, torch.bfloat16), prompt(2)
    padding = None if family == "deepseek_v4" else (3, 0)
    ours = cache_of(model, 2, padding or 0, page_size=page_size, num_pages=250, **common)
    filled_with_nan(ours.pool)  # as from another kind of state, whose block it was
    assert_same_run(model, ours, ids, padding)


def test_rope_keys_lie_in_pairs_as_engines_have_them():
    """transformers has the halves of the rotated pairs apart."""
    model, ids = model_of("deepseek_v3"), prompt(1)
    ours, theirs = cache_of(model), own_cache(model)
    for cache in (ours, theirs):
        run(model, cache, ids, steps=0)
    for layer in ours.pool.layers:
        halves = theirs.layers[layer].values[0, 0].unflatten(-1, (2, -1))
        rope = ours.pool.gather("rope", layer, ours.allocator.locations(ours.requests[0])["kv"])
        assert rope[:, 0::2].equal(halves[:, 0]) and rope[:, 1::2].equal(halves[:, 1])


def test_a_pool_whose_window_is_larger_gives_the_same_logits():
    model, ids = model_of("gpt_oss"), prompt(1)
    assert pool_of(model).layout.space_by_name["swa"].window == model.config.sliding_window - 1
    pool = SWAPool(
        full=MHA(2, 24), window_layers=[0, 2], window=13, layers=range(4), num_pages=40,
        num_window_pages=40, page_size=5, dtype="f32",
    )  # fmt: skip
    expected = run(model, own_cache(model), ids)
    for a, b in zip(run(model, PoolCache.new(pool, Allocator(pool)), ids), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_batch_and_single_rows_share_a_pool():
    model, ids = model_of("llama"), prompt(2)
    pool = pool_of(model)
    allocator = Allocator(pool)
    caches = [PoolCache.new(pool, allocator, 1) for _ in range(2)]
    alone = [own_cache(model) for _ in range(2)]
    for chunk in (slice(0, 13), slice(13, 29)):  # interleaved: pages of the rows alternate
        for row, (ours, theirs) in enumerate(zip(caches, alone)):
            part = ids[row : row + 1, chunk]
            chunks = (part.shape[1],)
            got = run(model, ours, part, chunks=chunks, steps=0)
            expected = run(model, theirs, part, chunks=chunks, steps=0)
            assert_same(model, ours, theirs, got, expected)


def test_inference_mode_and_no_grad_can_alternate():
    model, ids = model_of("llama"), prompt(1)
    ours, theirs = cache_of(model), own_cache(model)
    for guard in (torch.inference_mode, torch.no_grad):
        with guard():
            a = model(ids, past_key_values=ours).logits
            assert torch.equal(a, model(ids, past_key_values=theirs).logits)


def test_update_returns_what_a_dynamic_layer_returns():
    pool = MHAPool(
        num_kv_heads=2, head_dim=4, v_head_dim=6, layers=range(2), num_pages=9, page_size=3,
        dtype="bf16", order="hnd",
    )  # fmt: skip
    ours, theirs = PoolCache.new(pool, Allocator(pool), 2), transformers.DynamicCache()
    for tokens in (4, 1, 2):
        for layer in (1, 0):  # whichever layer comes first extends
            k = torch.randn(2, tokens, 2, 4).bfloat16().transpose(1, 2)
            v = torch.randn(2, tokens, 2, 6).bfloat16().transpose(1, 2)
            for a, b in zip(ours.update(k, v, layer), theirs.update(k, v, layer), strict=True):
                assert torch.equal(a, b)
                assert (a.dtype, a.stride()) == (b.dtype, b.stride())
        assert {request.num_tokens for request in ours.requests} == {theirs.get_seq_length()}
    assert ours.get_max_length() == theirs.get_max_length() == -1
    assert ours.batch_size == 2
    assert ours.is_sliding == [False, False]
    assert not ours.is_compileable
    assert not ours.is_croppable


CUT = {  # of each family with a state that can be taken back: drafts that are rejected
    **{family: (1, 3) for family in CONFIGS if family not in ("kimi_linear", "qwen3_next")},
    "deepseek_v4": (1, 2),
}


@torch.no_grad()
def verify(model: Any, cache: Any, drafts: int) -> None:
    """A forward over drafts, of which none is accepted."""
    start = cache.get_seq_length()
    ids = torch.arange(5, 5 + drafts).expand(len(cache.requests), -1)
    positions = torch.arange(start, start + drafts).expand(len(cache.requests), -1)
    model(ids, position_ids=positions, past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("family", CUT)
@pytest.mark.parametrize("how", ["crop", "truncate"])
def test_a_request_that_drafts_were_taken_back_of_is_one_that_never_had_them(family, how):
    model, ids = model_of(family, torch.bfloat16), prompt(2)
    theirs = own_cache(model)
    # a compressor takes back what ends with a window, or in the one that is open
    v4 = family == "deepseek_v4"
    chunks = (12, 16, 1) if v4 else CHUNKS
    expected = run(model, theirs, ids, chunks=chunks)
    ours = cache_of(model, 2, **({"speculation": True} if v4 else {}))
    logits = []
    for size in chunks:
        logits += run(model, ours, ids[:, :size], chunks=(size,), steps=0)
        ids = ids[:, size:]
        for drafts in CUT[family]:
            verify(model, ours, drafts)
            if how == "crop":
                ours.crop(-drafts)
            else:
                tokens = ours.get_seq_length() - drafts
                ours.allocator.truncate_batch(ours.requests, tokens)
                ours = PoolCache(ours.pool, ours.allocator, ours.requests)
    logits += run(model, ours, logits[-1][:, -1:].argmax(-1), chunks=(1,), steps=STEPS - 1)
    assert_same(model, ours, theirs, logits, expected)


def test_what_cannot_be_taken_back_is_refused_and_the_cache_goes_on():
    ours = cache_of(model := model_of("qwen3_next"), 2)
    run(model, ours, prompt(2), steps=0)
    with pytest.raises(ValueError, match="space state: a slot holds the state after 29 tokens"):
        ours.crop(-1)
    with pytest.raises(ValueError, match="crop: -29 to 0"):
        ours.crop(1)
    theirs = own_cache(model)
    assert_same(model, ours, theirs, [], run(model, theirs, prompt(2), steps=0)[:0])

    ours = cache_of(model := model_of("deepseek_v4"), speculation=True)
    ratio = sorted({space.window_step for space in ours.pool.layout.spaces if space.window})[-1]
    run(model, ours, prompt(1, 4 * ratio), chunks=(4 * ratio,), steps=0)
    with pytest.raises(ValueError, match=f"end inside a window of {ratio} that was compressed"):
        ours.crop(-1)
    assert ours.get_seq_length() == ours.requests[0].num_tokens == 4 * ratio


def test_out_of_pages_leaves_all_rows_as_they_were():
    model, ids = model_of("llama"), prompt(2)
    ours = cache_of(model, 2, page_size=8, num_pages=8)  # 7 to give: 4 for row 0, 3 for row 1
    run(model, ours, ids[:, :20], chunks=(20,), steps=0)
    before = ours.pool._slab.clone()
    with pytest.raises(OutOfPages, match=r"kv: 2 more items of 8 tokens are needed, 1 of 7 are"):
        run(model, ours, ids[:, 20:], chunks=(9,), steps=0)
    assert [request.num_tokens for request in ours.requests] == [20, 20]
    assert (ours.get_seq_length(), ours.allocator.free_pages) == (20, 1)
    assert torch.equal(ours.pool._slab, before)
    ours.allocator.check_integrity()
    theirs = own_cache(model)
    expected = run(model, theirs, ids[:, :24], chunks=(20, 4), steps=0)
    logits = run(model, ours, ids[:, 20:24], chunks=(4,), steps=0)
    assert_same(model, ours, theirs, logits, expected[1:])


@pytest.mark.parametrize(("family", "tokens"), [("qwen3_next", 1), ("qwen3_next", 4), ("mamba", 1)])
def test_a_forward_over_a_state_that_a_room_offers_is_refused_and_changes_nothing(family, tokens):
    model, ids = model_of(family), prompt(1)
    ours = cache_of(model)
    (request,), pool = ours.requests, ours.pool
    run(model, ours, ids[:, :20], chunks=(20,), steps=0)
    before, open_rooms = pool._slab.clone(), offered(ours)
    with pytest.raises(RequestPinned, match="it would lose the state in slot 1 of space state"):
        run(model, ours, ids[:, 20:], chunks=(tokens,), steps=0)
    assert request.num_tokens == ours.get_seq_length() == 20
    assert torch.equal(pool._slab, before)
    open_rooms.clear()
    theirs = own_cache(model)
    expected = run(model, theirs, ids[:, : 20 + tokens], chunks=(20, tokens), steps=0)
    logits = run(model, ours, ids[:, 20 : 20 + tokens], chunks=(tokens,), steps=0)
    assert_same(model, ours, theirs, logits, expected[1:])


@pytest.mark.parametrize(
    ("common", "sentence"),
    [
        ({"dtype": "bf16"}, r"layer 0 k: .*torch.float32 on cpu, .*torch.bfloat16 on cpu"),
        ({"shard": Shard(1, 2)}, r"\[1, 2, 29, 24\].* \[1, 1, 29, 24\].*heads 1-1 of 2"),
        ({"layers": [0, 1]}, r"layer 2: .* the pool holds \(0, 1\)"),
        ({"layers": [1, 2]}, r"layer 0: .* the pool holds \(1, 2\)"),
        ({"device": "meta"}, r"on cpu, .* on meta"),
    ],
    ids=["dtype", "shard", "last layer", "first layer", "device"],
)
def test_a_pool_that_does_not_fit_the_model_is_refused(common, sentence):
    model = model_of("llama")
    with pytest.raises(ValueError, match=sentence):
        run(model, cache_of(model, **common), prompt(1), chunks=(PROMPT,), steps=0)


def test_other_dims_other_rows_and_gradients_are_refused():
    model, ids = model_of("deepseek_v3"), prompt(1)
    pool = MLAPool(
        kv_lora_rank=16, qk_rope_head_dim=8, layers=range(4), num_pages=9, page_size=4, dtype="f32"
    )
    with pytest.raises(ValueError, match=r"latent: .*\[1, 1, 29, 32\].*\[1, 1, 29, 16\]"):
        run(model, PoolCache.new(pool, Allocator(pool)), ids, chunks=(PROMPT,), steps=0)
    pool = MLAPool(
        kv_lora_rank=32, qk_rope_head_dim=0, layers=range(4), num_pages=9, page_size=4, dtype="f32"
    )
    with pytest.raises(ValueError, match=r"latent: .* gives a rope key \[1, 1, 29, 8\], .* none"):
        run(model, PoolCache.new(pool, Allocator(pool)), ids, chunks=(PROMPT,), steps=0)
    pool = pool_of(model)
    with pytest.raises(ValueError, match=r"\[1, 1, 29, 32\].*\[2, 1, 29, 32\]"):
        run(model, PoolCache.new(pool, Allocator(pool), 2), ids, chunks=(PROMPT,), steps=0)
    with pytest.raises(ValueError, match="gradients are not supported"):
        model(ids, past_key_values=PoolCache.new(pool, Allocator(pool)))
    assert not pool._slab.any()


def test_requests_that_make_no_batch_are_refused():
    pool = pool_of(model_of("llama"))
    allocator = Allocator(pool)
    first, second = allocator.new_request(), allocator.new_request()
    allocator.extend(second, 3)
    with pytest.raises(ValueError, match=r"requests: \[0, 3\] tokens"):
        PoolCache(pool, allocator, [first, second])
    with pytest.raises(ValueError, match="each once, got 2"):
        PoolCache(pool, allocator, [first, first])
    with pytest.raises(ValueError, match="one or more, each once, got 0"):
        PoolCache(pool, allocator, [])
    with pytest.raises(ValueError, match=r"another pool's items\. Use Allocator\(pool\)"):
        PoolCache(pool_of(model_of("llama")), allocator, [first])
    allocator.free(first)
    with pytest.raises(ValueError, match="freed"):
        PoolCache(pool, allocator, [first])


def test_requests_changed_behind_the_cache_are_noticed():
    pool = pool_of(model_of("llama"))
    allocator = Allocator(pool)
    ours = PoolCache.new(pool, allocator, 2)
    states = torch.zeros(2, 2, 4, 24)
    allocator.extend(ours.requests[1], 4)
    with pytest.raises(ValueError, match="row 1: the request has 4 tokens, this cache wrote 0"):
        ours.update(states, states, 0)
    assert ours.requests[0].num_tokens == 0
    ours = PoolCache.new(pool, allocator, 2)
    allocator.free(ours.requests[1])
    with pytest.raises(ValueError, match="freed"):
        ours.update(states, states, 0)
    assert ours.requests[0].num_tokens == 0


def test_layers_of_one_forward_that_disagree_are_noticed():
    ours, states = cache_of(model_of("llama")), torch.zeros(1, 2, 4, 24)
    ours.update(states, states, 0)
    with pytest.raises(ValueError, match="layer 1 attention: 3 new tokens, other states 4"):
        ours.update(states[:, :, :3], states[:, :, :3], 1)
    ours.update(states, states, 1)
    with pytest.raises(RuntimeError, match=r"layer 2 attention: 0 tokens, others 4"):
        ours.update(states, states, 0)
    for layer in (2, 3, 0):
        ours.update(states, states, layer)
    assert ours.requests[0].num_tokens == 8


def test_what_a_pool_cannot_do_is_refused_with_what_to_do_instead():
    ours = cache_of(model_of("llama"))
    calls = {
        "reset": (),
        "reorder_cache": (torch.tensor([0]),),
        "batch_repeat_interleave": (2,),
        "batch_select_indices": (torch.tensor([0]),),
        "offload": (0,),
        "prefetch": (0,),
        "activate_past_recording": (),
    }
    for name, args in calls.items():
        with pytest.raises(NotImplementedError, match=r"PoolCache: .* is not supported\. [A-Z]"):
            getattr(ours, name)(*args)
    with pytest.raises(NotImplementedError, match="deepcopy"):
        copy.deepcopy(ours)


NEEDS = {
    ("deepseek_v32", MLAPool): "layer 0: the model has index keys, the pool holds",
    ("qwen3_next", MHAPool): "layer 0: the model has linear-attention state 0, the pool holds",
    ("deepseek_v4", MHAPool): r"layer 0 k: the model gives",
}


@pytest.mark.parametrize(("family", "kind"), NEEDS)
def test_a_model_that_keeps_state_the_pool_does_not_hold_is_refused(family, kind):
    model = model_of(family)
    common = {"layers": range(4), "num_pages": 9, "page_size": 16, "dtype": "f32"}
    dims = {"kv_lora_rank": 32, "qk_rope_head_dim": 8}
    pool = kind(**common, **(dims if kind is MLAPool else {"num_kv_heads": 2, "head_dim": 16}))
    with pytest.raises(ValueError, match=NEEDS[family, kind]):
        run(model, PoolCache.new(pool, Allocator(pool)), prompt(1), chunks=(PROMPT,), steps=0)


def test_compressors_of_which_the_pool_holds_nothing_are_refused():
    model = model_of("deepseek_v4")
    ours = cache_of(model, compress_ratios=(0, 0, 0, 0))
    with pytest.raises(ValueError, match="layer 1: the model has compressor states"):
        run(model, ours, prompt(1), chunks=(PROMPT,), steps=0)


def test_states_that_the_model_does_not_write_are_noticed():
    model, ours = model_of("deepseek_v3"), cache_of(model_of("deepseek_v32"))
    run(model, ours, prompt(1)[:, :4], chunks=(4,), steps=0)
    with pytest.raises(RuntimeError, match=r"layer 0 indexer: 0 tokens, others 4.* no such state"):
        run(model, ours, prompt(1)[:, 4:], chunks=(1,), steps=0)


def test_a_draft_writes_the_tokens_of_its_target():
    model, small = model_of("llama"), model_of("gpt_oss")
    target, draft = pool_of(model, page_size=8), pool_of(small, page_size=8, owner="draft")
    allocator = Allocator(target, draft)
    request = allocator.new_request()
    ours = [PoolCache(pool, allocator, [request]) for pool in (target, draft)]
    ids = prompt(1)
    for chunk in (slice(0, 11), slice(11, 28), slice(28, 29)):
        for cache, each in zip(ours, (model, small)):  # the target's forward makes room for both
            run(each, cache, ids[:, chunk], chunks=(ids[:, chunk].shape[1],), steps=0)
    assert request.num_tokens == 29
    again = PoolCache(draft, allocator, [request])
    theirs = own_cache(small)
    expected = run(small, theirs, ids, steps=2)
    with pytest.raises(ValueError, match="row 0: the request has 29 tokens, this cache wrote 28"):
        ours[1].batch.columns = 28
        ours[1].batch.written = dict.fromkeys(ours[1].batch.written, 28)
        run(small, ours[1], ids[:, 11:13], chunks=(2,), steps=0)
    last = expected[-3][:, -1:].argmax(-1)
    for step in (-2, -1):
        (logits,) = run(small, again, last, chunks=(1,), steps=0)
        assert torch.equal(logits, expected[step])
        last = logits.argmax(-1)


def late_draft(name):
    """A draft of another model, whose cache joins a target's requests once these have tokens."""
    model, small = model_of("llama"), model_of(name)
    target, draft = pool_of(model, page_size=8), pool_of(small, page_size=8, owner="draft")
    allocator = Allocator(target, draft)
    ours = PoolCache.new(target, allocator)
    run(model, ours, prompt(1), steps=0)
    assert PoolCache(target, allocator, ours.requests).get_seq_length() == PROMPT
    return small, PoolCache(draft, allocator, ours.requests)


def test_tokens_that_a_draft_did_not_write_are_not_cached():
    small, late = late_draft("olmo")
    assert late.get_seq_length() == 0
    (logits,) = run(small, late, prompt(1), chunks=(PROMPT,), steps=0)
    assert torch.equal(
        logits, run(small, own_cache(small), prompt(1), chunks=(PROMPT,), steps=0)[0]
    )


def test_a_draft_that_comes_after_its_window_has_moved_is_refused():
    small, late = late_draft("gpt_oss")
    with pytest.raises(ValueError, match="space swa: tokens left the window before draft wrote"):
        run(small, late, prompt(1), chunks=(PROMPT,), steps=0)


def test_tokens_received_after_some_were_computed_count_as_cached():
    model, ids = model_of("llama"), prompt(1)
    pools = [pool_of(model) for _ in range(2)]
    allocators = [Allocator(pool) for pool in pools]
    whole, part = (PoolCache.new(pool, each) for pool, each in zip(pools, allocators))
    run(model, whole, ids, steps=0)
    run(model, part, ids[:, :11], chunks=(11,), steps=0)
    (request,) = part.requests
    allocators[1].extend(request, 18, received=True)
    move(pools[:1], pools[1], [whole.requests[0].address()], request.address(), range(11, PROMPT))
    ours = PoolCache(pools[1], allocators[1], [request])
    assert ours.get_seq_length() == PROMPT
    again = [run(model, cache, ids[:, :1], chunks=(1,), steps=0)[0] for cache in (whole, ours)]
    assert torch.equal(*again)


def test_a_forward_that_did_not_finish_cannot_be_continued():
    model, ids = model_of("qwen3_next"), prompt(1)
    ours = cache_of(model)

    def stop(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        run(model, ours, ids, chunks=(PROMPT,), steps=0)
    hook.remove()
    with pytest.raises(RuntimeError, match="a forward did not finish"):
        run(model, ours, ids, chunks=(PROMPT,), steps=0)
    with pytest.raises(ValueError, match=r"did not finish. Free it"):
        PoolCache(ours.pool, ours.allocator, ours.requests)
    with pytest.raises(ValueError, match=r"did not finish. Free it"):
        ours.allocator.fork(ours.requests[0], PROMPT)


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "deepseek_v4", "deepseek_v32"])
def test_what_is_refused_is_refused_before_the_request_has_grown(family):
    model, ids = model_of(family), prompt(2)
    ours = cache_of(model)
    for each, rows in ((model, 2), (model_of(family, torch.bfloat16), 1)):
        with pytest.raises(ValueError, match="with a request for every row"):
            run(each, ours, ids[:rows], chunks=(PROMPT,), steps=0)
        assert (ours.requests[0].num_tokens, ours.get_seq_length()) == (0, 0)
    assert not ours.pool._slab.any()


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_index_keys_are_not_rounded_unless_all_is(family):
    model = model_of(family)
    with pytest.raises(ValueError, match=r"index_key: stored as fp8.*index_packing='float32'"):
        cache_of(model, index_packing="fp8")


def test_a_pool_without_kinds_is_refused():
    class Keys(KVPool):
        def declare(self):
            yield from MHAPool.declare(pool)

    pool = MHAPool(num_kv_heads=2, head_dim=4, layers=[0], num_pages=4, page_size=2, dtype="f32")
    keys = Keys(layers=[0], num_pages=4, page_size=2, dtype="f32")
    with pytest.raises(ValueError, match="Keys: PoolCache needs a UnionPool"):
        PoolCache.new(keys, Allocator(keys))


@pytest.mark.parametrize(
    ("family", "packing"),
    [*((family, "fp8") for family in CONFIGS), ("llama", "mxfp8"), ("gpt_oss", "mxfp8")],
)
def test_what_a_quantised_pool_rounds_stays_small_in_the_logits(family, packing):
    model = smooth(family)
    expected = run(model, own_cache(model), prompt(1), steps=0)
    logits = run(model, cache_of(model, packing=packing), prompt(1), steps=0)
    for a, b in zip(logits[1:], expected[1:], strict=True):
        error = float((a - b).abs().max() / b.abs().max())
        assert 0 < error < 0.15, f"{error:.1%}"
