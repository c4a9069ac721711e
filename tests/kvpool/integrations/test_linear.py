"""Every kind of linear-attention state over PoolCache: the logits and the cached tensors are those
of transformers' own cache.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from kvpool import Allocator, LinearState, OutOfPages, RequestPinned  # noqa: E402
from kvpool.integrations.transformers import PoolCache  # noqa: E402
from tests.kvpool.integrations.caches import (  # noqa: E402
    argument_of,
    assert_same,
    assert_same_run,
    cache_of,
    model_of,
    offered,
    pool_of,
    prompt,
    run,
)
from tests.kvpool.models.tiny import changes, made, own_cache  # noqa: E402
from tests.oracle import move  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = (
    *("bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2", "mamba2", "mamba"),
    *("falcon_mamba", "jamba", "lfm2", "lfm2_moe", "olmo_hybrid", "minimax", "inkling_text"),
    *("zaya", "gemma3n_text", "gemma4_text", "llama4_text"),
)
PROMPT, STEPS = 23, 5
WHOLE, CHUNKS = (PROMPT,), (11, 1, 9, 2)


def linear_layers(pool: Any) -> list[int]:
    return [n for kind, at in pool.kinds if isinstance(kind, LinearState) for n in at.layers]


@pytest.mark.parametrize(
    ("chunks", "dtype"),
    [
        pytest.param(WHOLE, torch.float32, id="whole fp32"),
        pytest.param(CHUNKS, torch.bfloat16, id="chunks bf16"),
        pytest.param(WHOLE, torch.bfloat16, id="whole bf16", marks=pytest.mark.long),
        pytest.param(CHUNKS, torch.float32, id="chunks fp32", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_cached_tensors_equal_transformers_own(family, chunks, dtype):
    model = model_of(family, dtype)
    assert_same_run(model, cache_of(model, 2), prompt(2, PROMPT), chunks=chunks, steps=STEPS)


# one of each kind of state; all with --long
FEW = ("bamba", "falcon_h1", "inkling_text", "lfm2", "mamba", "minimax", "zaya")
TRIED = [pytest.param(name, marks=() if name in FEW else pytest.mark.long) for name in FAMILIES]


def cached(family: str, tokens: int = 20, **more: Any) -> tuple[Any, PoolCache, Any]:
    """A model, the pool's cache after a prompt, and transformers' own."""
    model = model_of(family)
    ours, theirs = cache_of(model, **more), own_cache(model)
    for cache in (ours, theirs):
        run(model, cache, torch.arange(tokens)[None], chunks=(tokens,), steps=0)
    return model, ours, theirs


def assert_same_step(model: Any, ours: PoolCache, theirs: Any, token: int) -> None:
    ids = torch.tensor([[token]])
    logits, expected = (run(model, cache, ids, chunks=(1,), steps=0) for cache in (ours, theirs))
    assert_same(model, ours, theirs, logits, expected)


@pytest.mark.parametrize("family", ["mamba", "lfm2", "falcon_h1", "minimax"])
def test_a_state_that_is_only_looked_at_does_not_change(family):
    model, ours, theirs = cached(family)
    before = ours.pool._slab.clone()
    for layer in linear_layers(ours.pool):
        conv, temporal = ours.get_conv_state(layer), ours.get_recurrent_state(layer)
        del conv
        del temporal
    kept = [ours.get_recurrent_state(layer) for layer in linear_layers(ours.pool)]
    assert torch.equal(ours.pool._slab, before) and ours.get_seq_length() == 20
    for step in (3, 4):
        assert_same_step(model, ours, theirs, step)
    del kept
    assert_same_step(model, ours, theirs, 5)


def test_a_token_like_the_one_before_is_noticed():
    """The first layer's taps are equal, so that a shift leaves them as they were."""
    model, ours, theirs = cached("lfm2")
    for _ in range(5):
        assert_same_step(model, ours, theirs, 9)


@pytest.mark.parametrize("family", ["bamba", "lfm2", "falcon_h1", "jamba"])
def test_a_token_that_has_no_page_changes_nothing(family):
    model, ours, theirs = cached(family, num_pages=7)
    other = ours.allocator.new_request()
    ours.allocator.extend(other, 10)
    before = ours.pool._slab.clone()
    with pytest.raises(OutOfPages):
        run(model, ours, torch.tensor([[3]]), chunks=(1,), steps=0)
    assert torch.equal(ours.pool._slab, before)
    assert ours.requests[0].num_tokens == ours.get_seq_length() == 20
    ours.allocator.free(other)
    assert_same_step(model, ours, theirs, 3)


def test_a_token_that_was_lost_is_told_of_from_then_on():
    """In a model of one state, no other is left to refuse the forward."""
    model = made("mamba", changes("mamba") | {"num_hidden_layers": 1})
    cache = cache_of(model)
    run(model, cache, torch.arange(20)[None], chunks=(20,), steps=0)
    open_rooms = offered(cache)
    run(model, cache, torch.tensor([[3]]), chunks=(1,), steps=0)
    open_rooms.clear()
    for _ in range(2):
        with pytest.raises(RequestPinned):
            run(model, cache, torch.tensor([[3]]), chunks=(1,), steps=0)
    with pytest.raises(ValueError, match=r"did not finish. Free it"):
        PoolCache(cache.pool, cache.allocator, cache.requests)


def test_a_tensor_that_is_not_let_go_of_is_noticed(monkeypatch):
    model, ours, _ = cached("bamba")
    kept = []

    def keep(*args: Any, **kwargs: Any) -> Any:
        kept.append(PoolCache.get_conv_state(ours, *args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(ours, "get_conv_state", keep)
    run(model, ours, torch.tensor([[3]]), chunks=(1,), steps=0)
    with pytest.raises(RuntimeError, match=r"layer 0 linear: .* something still holds its tensor"):
        run(model, ours, torch.tensor([[3]]), chunks=(1,), steps=0)


def test_a_tensor_that_outlives_its_request_is_not_written():
    model, ours, _ = cached("mamba")
    states = ours.pool_layers[3].linear_states(0)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.backbone.layers[3].mixer.out_proj.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt) as failed:
        run(model, ours, torch.tensor([[3]]), chunks=(1,), steps=0)
    hook.remove()
    ours.allocator.free(ours.requests[0])
    before = ours.pool._slab.clone()
    del failed  # and with it the frames of the forward
    gc.collect()
    assert not states._lent and torch.equal(ours.pool._slab, before)


def test_gradients_are_refused():
    ours = cache_of(model := model_of("mamba"))
    with pytest.raises(ValueError, match=r"layer 0 conv: gradients are not supported"):
        model(torch.arange(4)[None], cache_params=ours)
    assert not ours.pool._slab.any()


@pytest.mark.parametrize("family", TRIED)
def test_generate_gives_the_logits_of_transformers_own(family):
    model = model_of(family)
    ids = torch.randint(1, 128, (2, 13), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0  # padded on the left
    kwargs = {
        "attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0,
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    expected = model.generate(ids, **kwargs)
    seen = model.generate(ids, **{argument_of(model): cache_of(model, 2)}, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(seen.logits, expected.logits, strict=True))


@pytest.mark.parametrize("family", TRIED)
def test_a_model_continues_on_states_that_were_moved(family):
    model, ours, theirs = cached(family)
    more = {"page_size": 8, "placement": "page", "conv_layout": "taps_first"}
    dest = pool_of(model, **more)
    allocator = Allocator(dest)
    allocator.extend(allocator.new_request(), 3)  # so that ids differ
    request = allocator.new_request()
    allocator.extend(request, 20, received=True)
    move([ours.pool], dest, [ours.requests[0].address()], request.address())
    again = PoolCache(dest, allocator, [request])
    for token in (3, 4, 5, 6):
        assert_same_step(model, again, theirs, token)
