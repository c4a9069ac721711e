"""Every kind of linear-attention state over PoolCache: the logits and the cached tensors are those
of transformers' own cache.
"""

from __future__ import annotations

import gc
import inspect
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from kvpool import Allocator, HybridLinearPool, OutOfPages, RequestPinned, SWAPool  # noqa: E402
from kvpool.integrations.transformers import PoolCache  # noqa: E402
from kvpool.layout import Pin  # noqa: E402
from kvpool.layout.formats import MHA, cca, gated_delta_net, lightning, mamba1, mamba2, short_conv  # noqa: E402
from kvpool.pools.states import LayeredPool, State  # noqa: E402
from tests.kvpool.integrations.test_transformers import COMMON  # noqa: E402
from tests.kvpool.models.tiny import MAMBA1, MAMBA2  # noqa: E402
from tests.oracle import move  # noqa: E402
from tests.verified import verify  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
FOUR = {"num_hidden_layers": 4, "num_key_value_heads": 2, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {
    "num_kv_shared_layers": 2,
    "head_dim": 16,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA2, "attn_layer_indices": [2]},
    "granitemoehybrid": {
        **MAMBA2,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 128, "head_dim": 16},
    "nemotron_h": {
        "layers_block_type": ["mlp", "mamba", "attention", "mamba", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "head_dim": 16,
        "chunk_size": 8,
    },
    "zamba2": {
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "num_key_value_heads": 4,
        "num_mem_blocks": 1,
        "chunk_size": 8,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "hybrid_layer_ids": [1, 3],
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 16,
        "conv_kernel": 4,
        "chunk_size": 8,
    },
    "mamba": {"state_size": 8, "conv_kernel": 4},
    "falcon_mamba": {"state_size": 8, "conv_kernel": 4},
    "jamba": {**MAMBA1, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 1},
    "lfm2": {"conv_L_cache": 3, "full_attn_idxs": [2]},
    "lfm2_moe": {
        "conv_L_cache": 3,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        **EXPERTS,
    },
    "olmo_hybrid": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "num_key_value_heads": 4,
    },
    "minimax": {
        "head_dim": 16,
        "block_size": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention", "linear_attention"] * 2,
    },
    "inkling_text": {
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "sliding_window_size": 9,
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 16,
        "rel_extent": 64,
        "mlp_layer_types": ["dense"] * 4,
    },
    "zaya": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "router_hidden_size": 16,
    },
    "gemma3n_text": {
        **SHARED,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {**SHARED, "global_head_dim": 32},
    "llama4_text": {
        "head_dim": 16,
        "attention_chunk_size": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 1, 1, 0],
    },
}
BAMBA = {"full": MHA(2, 16), "linear": mamba2(8, 16, 1, 16, 4), "linear_layers": [0, 1, 3]}
SHORT = {"full": MHA(2, 16), "linear": short_conv(64, 3), "linear_layers": [0, 1, 3]}
SLOTS = {"linear": mamba1(96, 8, 4), "linear_layers": range(4)}
WINDOW = {
    "pool": SWAPool,
    "layers": [0, 1],
    "full": MHA(2, 16),
    "swa": MHA(2, 16),
    "window_layers": [0],
    "window": 8,
}


# convolutions of keys, of values, after attention and after the MLP
WIDE = (State(MHA(2, 16)), *[State(short_conv(channels, 4)) for channels in (32, 32, 64, 64)])
NARROW = (State(MHA(1, 16), 8), *[State(short_conv(channels, 4)) for channels in (16, 16, 64, 64)])
POOLS: dict[str, dict[str, Any]] = {
    "bamba": BAMBA,
    "granitemoehybrid": BAMBA,
    "falcon_h1": {**BAMBA, "linear_layers": range(4), "full_layers": range(4)},
    "nemotron_h": {
        "layers": [1, 2, 3],
        "full": MHA(2, 16),
        "linear": mamba2(8, 16, 2, 16, 4),
        "linear_layers": [1, 3],
    },
    "zamba2": {
        "full": MHA(4, 32),
        "full_layers": [1, 3],
        "linear": mamba2(8, 16, 1, 8, 4),
        "linear_layers": range(4),
    },
    "mamba2": {"linear": mamba2(8, 16, 2, 16, 4), "linear_layers": range(4)},
    "mamba": SLOTS,
    "falcon_mamba": SLOTS,
    "jamba": {"full": MHA(2, 16), "linear": mamba1(128, 8, 4), "linear_layers": [0, 1, 3]},
    "lfm2": SHORT,
    "lfm2_moe": SHORT,
    "olmo_hybrid": {
        "full": MHA(4, 16),
        "linear": gated_delta_net(2, 2, 8, 12, 4),
        "linear_layers": [0, 1, 2],
    },
    "inkling_text": {
        "pool": LayeredPool,
        "states": dict(enumerate((WIDE, NARROW) * 2)),
        "conv_dtype": "f32",
    },
    "zaya": {
        "full": MHA(2, 16),
        "full_layers": range(4),
        "linear": cca(4, 2, 16, (2, 2)),
        "linear_layers": range(4),
    },
    "gemma3n_text": {**WINDOW, "full": MHA(2, 16)},
    "gemma4_text": {**WINDOW, "full": MHA(2, 32)},
    "llama4_text": {**WINDOW, "layers": range(4), "window_layers": [0, 1, 2], "window": 7},
    "minimax": {"full": MHA(2, 16), "linear": lightning(4, 16), "linear_layers": [1, 3]},
}
SIZES = {"num_pages": 40, "num_window_pages": 40, "num_slots": 6, "page_size": 5}
PROMPT, STEPS = 23, 5
WHOLE, CHUNKS = (PROMPT,), (11, 1, 9, 2)


@lru_cache
def model_of(family: str, dtype: torch.dtype) -> Any:
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **FOUR, **CONFIGS[family]})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.to(dtype).eval()


def pool_of(family: str, dtype: torch.dtype, **more: Any) -> Any:
    given = dict(POOLS[family])
    kind = given.pop("pool", HybridLinearPool)
    return kind(
        **{"layers": range(4), "total_kv_layers": 4, "dtype": dtype, **SIZES, **given, **more}
    )


@torch.no_grad()
def run(
    model: Any, cache: Any, ids: torch.Tensor, chunks: tuple[int, ...], steps: int = STEPS
) -> list[torch.Tensor]:
    """Logits of each chunk and of each greedy step."""
    logits, start = [], 0
    name = argument_of(model)
    for size in (*chunks, *[1] * steps):
        new = ids[:, start : start + size]
        if not new.shape[1]:
            new = logits[-1][:, -1:].argmax(-1)
        logits.append(model(new, use_cache=True, **{name: cache}).logits)
        start += size
    return logits


def argument_of(model: Any) -> str:
    names = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in names else "past_key_values"


def theirs_for(model: Any) -> Any:
    """transformers' own cache."""
    if model.config.model_type == "minimax":
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        return MiniMaxCache()
    return transformers.DynamicCache(config=model.config)


def tensors(cache: Any, layer: int) -> dict[str, torch.Tensor]:
    """What transformers' own cache holds of a layer, each with the batch first."""
    held, found = cache.layers[layer] if layer < len(cache.layers) else None, {}
    if getattr(held, "keys", None) is not None:
        found |= {"k": held.keys.transpose(1, 2), "v": held.values.transpose(1, 2)}
    for name in ("conv_states", "recurrent_states"):
        for n, state in getattr(held, name, {}).items():
            if state is not None:
                found[f"{name} {n}"] = state
    lightning_states = getattr(cache, "linear_cache", [])
    if layer < len(lightning_states) and len(lightning_states[layer]):
        found["recurrent_states 0"] = lightning_states[layer]
    return found


@pytest.mark.parametrize(
    ("chunks", "dtype"),
    [
        pytest.param(WHOLE, torch.float32, id="whole fp32"),
        pytest.param(CHUNKS, torch.bfloat16, id="chunks bf16"),
        pytest.param(WHOLE, torch.bfloat16, id="whole bf16", marks=pytest.mark.long),
        pytest.param(CHUNKS, torch.float32, id="chunks fp32", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_and_cached_tensors_equal_transformers_own(family, chunks, dtype):
    model, pool = model_of(family, dtype), pool_of(family, dtype)
    ids = torch.randint(0, 128, (2, PROMPT), generator=torch.Generator().manual_seed(3))
    theirs, ours = theirs_for(model), PoolCache.new(pool, Allocator(pool), 2)
    expected = run(model, theirs, ids, chunks)
    for step, (a, b) in enumerate(zip(run(model, ours, ids, chunks), expected, strict=True)):
        assert torch.equal(a, b), f"step {step}"
    for layer in pool.layers:
        assert_same_tensors(ours, theirs, layer)
    assert not any(pool.item_bytes_view(b)[0].any() for b in pool.layout.buffers)
    ours.allocator.check_integrity()


def assert_same_tensors(ours: PoolCache, theirs: Any, layer: int) -> None:
    expected = tensors(theirs, layer)
    seen = held_of(ours, layer)
    assert seen.keys() == expected.keys()
    for name, tensor in expected.items():
        if name.startswith("conv") and tensor.shape != seen[name].shape:
            tensor = tensor[..., 1:]  # no output depends on the first tap
        assert tensor.dtype == seen[name].dtype, name
        assert torch.equal(seen[name].reshape(tensor.shape), tensor), (layer, name)


def held_of(cache: PoolCache, layer: int) -> dict[str, torch.Tensor]:
    """What the pool holds of a layer, from its typed views and the requests' block tables alone."""
    pool, found = cache.pool, {}
    convs: dict[str, list[torch.Tensor]] = {}  # by prefix
    for region in (r for r in pool.layout.regions if r.layer == layer):
        view, rows = pool.view(region.role, layer), []
        space = pool.layout.space_by_name[pool.layout.buffer_of(region).space]
        for request in cache.requests:
            span = request.address().spans[space.id_list]
            row = view[torch.tensor(span.ids)]
            if not space.per_request:
                row = row.flatten(0, 1)
                start = span.first_item * space.entries_per_item
                end = request.num_tokens
                first = 0 if space.window is None else max(0, end - space.window)
                row = row[first - start : end - start]
            rows.append(row)
        prefix, conv, _ = region.role.partition("conv.")
        if conv:
            convs.setdefault(prefix, []).append(torch.cat(rows).flatten(1, 2).squeeze(-1))
        elif space.per_request:
            found["recurrent_states 0"] = torch.cat(rows)
        else:
            found[region.role.removeprefix("swa.")] = torch.stack(rows)
    for n, sections in enumerate(convs.values()):
        found[f"conv_states {n}"] = torch.cat(sections, 1)
    return found


# one of each kind of state; all with --long
FEW = ("bamba", "falcon_h1", "inkling_text", "lfm2", "mamba", "minimax", "zaya")
TRIED = [pytest.param(name, marks=() if name in FEW else pytest.mark.long) for name in CONFIGS]


def cached(family: str, tokens: int = 20, **more: Any) -> tuple[Any, PoolCache, Any]:
    """A model, the pool's cache after a prompt, and transformers' own."""
    model, pool = model_of(family, torch.float32), pool_of(family, torch.float32, **more)
    ours, theirs = PoolCache.new(pool, Allocator(pool)), theirs_for(model)
    for cache in (ours, theirs):
        run(model, cache, torch.arange(tokens)[None], (tokens,), steps=0)
    return model, ours, theirs


def assert_same_step(model: Any, ours: PoolCache, theirs: Any, token: int) -> None:
    ids = torch.tensor([[token]])
    seen, expected = (run(model, cache, ids, (1,), steps=0)[0] for cache in (ours, theirs))
    assert torch.equal(seen, expected)
    for layer in ours.pool.layers:
        assert_same_tensors(ours, theirs, layer)


@pytest.mark.parametrize("family", ["mamba", "lfm2", "falcon_h1", "minimax"])
def test_a_state_that_is_only_looked_at_does_not_change(family):
    model, ours, theirs = cached(family)
    before = ours.pool._slab.clone()
    for layer in POOLS[family]["linear_layers"]:
        conv, temporal = ours.get_conv_state(layer), ours.get_recurrent_state(layer)
        del conv
        del temporal
    kept = [ours.get_recurrent_state(layer) for layer in POOLS[family]["linear_layers"]]
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
        run(model, ours, torch.tensor([[3]]), (1,), steps=0)
    assert torch.equal(ours.pool._slab, before)
    assert ours.requests[0].num_tokens == ours.get_seq_length() == 20
    ours.allocator.free(other)
    assert_same_step(model, ours, theirs, 3)


def test_a_token_over_a_state_that_a_room_offers_changes_nothing():
    model, ours, theirs = cached("mamba")
    (request,), open_rooms, pool = ours.requests, {"r"}, ours.pool
    pin = Pin("r", "offered", request.address(), pool.layout, True, lambda: bool(open_rooms))
    request.pin(pin)
    before = pool._slab.clone()
    with pytest.raises(RequestPinned, match="it would lose the state in slot 1 of space state"):
        run(model, ours, torch.tensor([[3]]), (1,), steps=0)
    assert torch.equal(pool._slab, before) and request.num_tokens == 20
    open_rooms.clear()
    assert_same_step(model, ours, theirs, 3)


def test_a_token_that_was_lost_is_told_of_from_then_on():
    """In a model of one state, no other is left to refuse the forward."""
    config = transformers.AutoConfig.for_model("mamba", **COMMON, num_hidden_layers=1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    pool = HybridLinearPool(
        linear=mamba1(96, 16, 4), linear_layers=[0], layers=[0], dtype="f32", **SIZES
    )
    cache = PoolCache.new(pool, Allocator(pool))
    run(model, cache, torch.arange(20)[None], (20,), steps=0)
    (request,), open_rooms = cache.requests, {"r"}
    address = request.address()
    request.pin(Pin("r", "offered", address, pool.layout, True, lambda: bool(open_rooms)))
    run(model, cache, torch.tensor([[3]]), (1,), steps=0)
    open_rooms.clear()
    for _ in range(2):
        with pytest.raises(RequestPinned):
            run(model, cache, torch.tensor([[3]]), (1,), steps=0)
    with pytest.raises(ValueError, match=r"did not finish. Free it"):
        PoolCache(pool, cache.allocator, [request])


def test_a_tensor_that_is_not_let_go_of_is_noticed(monkeypatch):
    model, ours, _ = cached("bamba")
    kept = []

    def keep(*args: Any, **kwargs: Any) -> Any:
        kept.append(PoolCache.get_conv_state(ours, *args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(ours, "get_conv_state", keep)
    run(model, ours, torch.tensor([[3]]), (1,), steps=0)
    with pytest.raises(RuntimeError, match=r"layer 0 linear: .* something still holds its tensor"):
        run(model, ours, torch.tensor([[3]]), (1,), steps=0)


def test_a_tensor_that_outlives_its_request_is_not_written():
    model, ours, _ = cached("mamba")
    states = ours.pool_layers[3].linear_states(0)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.backbone.layers[3].mixer.out_proj.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt) as failed:
        run(model, ours, torch.tensor([[3]]), (1,), steps=0)
    hook.remove()
    ours.allocator.free(ours.requests[0])
    before = ours.pool._slab.clone()
    del failed  # and with it the frames of the forward
    gc.collect()
    assert not states._lent and torch.equal(ours.pool._slab, before)


def test_gradients_are_refused():
    model, pool = model_of("mamba", torch.float32), pool_of("mamba", torch.float32)
    with pytest.raises(ValueError, match=r"layer 0 conv: gradients are not supported"):
        model(torch.arange(4)[None], cache_params=PoolCache.new(pool, Allocator(pool)))
    assert not pool._slab.any()


@pytest.mark.parametrize("family", TRIED)
def test_generate_gives_the_logits_of_transformers_own(family):
    model, pool = model_of(family, torch.float32), pool_of(family, torch.float32)
    ids = torch.randint(1, 128, (2, 13), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0  # padded on the left
    kwargs = {
        "attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0,
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    expected = model.generate(ids, **kwargs)
    cache = {argument_of(model): PoolCache.new(pool, Allocator(pool), 2)}
    seen = model.generate(ids, **cache, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(seen.logits, expected.logits, strict=True))


@pytest.mark.parametrize("family", TRIED)
def test_a_model_continues_on_states_that_were_moved(family):
    model, ours, theirs = cached(family)
    more = {"page_size": 8, "placement": "page"}
    if linear := POOLS[family].get("linear"):
        more["linear"] = replace(linear, conv_layout="taps_first")
    dest = pool_of(family, torch.float32, **more)
    allocator = Allocator(dest)
    allocator.extend(allocator.new_request(), 3)  # so that ids differ
    request = allocator.new_request()
    allocator.extend(request, 20, received=True)
    verify(move([ours.pool], dest, [ours.requests[0].address()], request.address()))
    again = PoolCache(dest, allocator, [request])
    for token in (3, 4, 5, 6):
        assert_same_step(model, again, theirs, token)
