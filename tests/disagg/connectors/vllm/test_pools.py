"""What vLLM's CPU tensors are described as, and what the pool of the same model declares, are the
same regions: owner, layer, role, dtype, axes and shard.
"""

from __future__ import annotations

from functools import partial
from math import prod

import pytest
import torch

from disagg.connectors import formats
from disagg.connectors.linear_states import LinearShard, slots, states
from disagg.connectors.tensors import LayerTensor
from disagg.plan import plan
from kvpool import Shard
from kvpool.item import Seq
from kvpool.layout import PoolLayout, RequestAddress, Space, Span
from kvpool.layout.dtypes import ITEMSIZE
from kvpool.models import declare
from tests import oracle
from tests.verified import verify

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
FAMILIES = {
    "llama": LLAMA,
    "gpt_oss": {**LLAMA, "model_type": "gpt_oss", **WINDOWS},
    "gemma3_text": {**LLAMA, "model_type": "gemma3_text", **WINDOWS},
    "deepseek_v3": {
        **LLAMA,
        "model_type": "deepseek_v3",
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
    },
    "qwen3_next": {**LLAMA, "model_type": "qwen3_next", **DELTA},
}
SPACES = Space("kv", "paged", 8), Space("swa", "paged", 8, window=7), Space("state", "slot")
ONE_SIDED = {"k": {"dim"}, "swa.k": {"dim"}}
"""Axes that only vLLM's tensor has. The pool has them in its cells."""


def attention(config, layer, rank, ranks):
    """As `read_layer` makes it of a float32 engine on a CPU."""
    name = f"model.layers.{layer}.self_attn.attn"
    if "kv_lora_rank" in config:
        sizes = {"latent": config["kv_lora_rank"], "rope": config["qk_rope_head_dim"]}
        view = torch.zeros(5, 1, 8, sum(sizes.values()))
        rows = partial(formats.latent_rows, **sizes, dtype="float32")
        return "kv", LayerTensor(name=name, number=layer, view=view, format=rows)
    total, dim = config["num_key_value_heads"], config["head_dim"]
    view = torch.zeros(5, total // ranks, 8, 2 * dim)
    heads = Shard(rank, ranks).heads(total)
    keys = partial(formats.transposed_keys, key=dim, value=dim, dtype="float32", heads=heads)
    windowed = config.get("layer_types", [""] * 4)[layer] == "sliding_attention"
    prefix = "swa." if windowed else ""
    tensor = LayerTensor(name=name, number=layer, view=view, format=keys, prefix=prefix)
    return "swa" if windowed else "kv", tensor


def shapes_of(config, ranks):
    """Shapes of a rank's conv state, `(tap, dim)`, and temporal state, `(head, value, key)`."""
    heads = [config[f"linear_num_{which}_heads"] // ranks for which in ("key", "value")]
    dims = [config[f"linear_{which}_head_dim"] for which in ("key", "value")]
    conv = 3, 2 * heads[0] * dims[0] + heads[1] * dims[1]
    return conv, (heads[1], dims[1], dims[0])


def linear(config, layer, rank, ranks, key_first=True):
    """As `read_layer` makes it on a CPU, or on a GPU."""
    shapes = shapes_of(config, ranks)
    view = torch.zeros(5, 1, 1, 4 * sum(map(prod, shapes)), dtype=torch.int8)
    shard = LinearShard(rank=rank, ranks=ranks, key_first=key_first)
    parts = states("delta_net", *shapes, ("float32", "float32"), shard)
    name = f"model.layers.{layer}.linear_attn"
    form = partial(slots, item=Seq(*parts))
    return "state", LayerTensor(name=name, number=layer, view=view, format=form)


@pytest.fixture
def described():
    """Makes the layout of one rank of vLLM's; its tensors stay until the test has ended."""
    layers = []
    return lambda *args: layout_of(layers, *args)


def layout_of(layers, config, rank, ranks):
    """Describes the layers of a rank, and keeps them in `layers`."""
    seen = []
    for n, kind in enumerate(config.get("layer_types", [""] * 4)):
        make = linear if kind == "linear_attention" else attention
        space, layer = make(config, n, rank, ranks)
        layers.append(layer)
        seen.append(layer.describe(space))
    used = {buffer.space for each in seen for buffer in each.buffers}
    spaces = [space for space in SPACES if space.name in used]
    return PoolLayout.of(*seen, spaces=spaces, total_kv_layers=4)


def pool(config, rank, ranks):
    """The pool of one rank."""
    counts = {"num_pages": 5, "num_window_pages": 5, "num_slots": 5, "page_size": 4}
    return declare(config).build(dtype="float32", shard=Shard(rank, ranks), **counts)


def statements(layout):
    """What each region says, but for where its bytes lie."""
    return {
        region.key: (
            region.dtype,
            prod(axis.total for axis in region.inner_axes) * region.width // ITEMSIZE[region.dtype],
            {axis.name: (axis.start, axis.size, axis.total) for axis in region.inner_axes},
        )
        for region in layout.regions
    }


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_and_a_pool_say_the_same_of_a_model(family, rank, ranks, described):
    config = FAMILIES[family]
    held, theirs = pool(config, rank, ranks), described(config, rank, ranks)
    ours = held.layout
    declared, found = statements(ours), statements(theirs)
    assert found.keys() == declared.keys()
    for key, (dtype, elements, axes) in found.items():
        assert (dtype, elements) == declared[key][:2], key
        other = declared[key][2]
        assert other.keys() <= axes.keys(), key
        assert axes.keys() - other.keys() == ONE_SIDED.get(key[2], set()), key
        assert all(axes[name] == other[name] for name in axes.keys() & other.keys()), key
    windows = {space.name: space.window for space in ours.spaces if space.window}
    assert windows == {space.name: space.window for space in theirs.spaces if space.window}


@pytest.mark.parametrize("family", FAMILIES)
def test_both_are_planned_either_way_and_between_two_ranks_and_one(family, described):
    config = FAMILIES[family]
    engines = [described(config, rank, 2) for rank in range(2)]
    pools = [pool(config, rank, 2) for rank in range(2)]
    whole = pool(config, 0, 1)
    verify(plan(engines, whole.layout))
    verify(plan([each.layout for each in pools], described(config, 0, 1)))


@pytest.mark.parametrize("key_first", [True, False])
def test_a_state_of_a_delta_net_is_transposed_where_it_must_be(key_first):
    """vLLM says `[head, value, key]`, which is what GPUs have. On a CPU it is `[head, key, value]`,
    as in the pool.
    """
    config = FAMILIES["qwen3_next"]
    space, layer = linear(config, 0, 0, 1, key_first)
    seen, shapes = layer.describe(space), shapes_of(config, 1)
    source = PoolLayout(seen.buffers, seen.regions, SPACES[2:], 4)
    dest = declare({**config, "layer_types": ["linear_attention"] * 4}).build(
        dtype="float32", layers=[0], num_pages=5, num_slots=5, page_size=4
    )
    flat = layer.view.view(torch.float32).flatten(1)
    flat.copy_(torch.arange(flat.numel()).reshape(flat.shape))
    made = plan([source], dest.layout)
    ids = [RequestAddress(9, {"state": Span([slot]), "kv": Span([1, 2, 3])}) for slot in (3, 2)]
    held = oracle.over(source, flat.view(-1).view(torch.uint8).numpy())
    oracle.apply(made.bind(0, *ids), [held], dest)
    conv, temporal = dest.get_linear_state(0, [2])
    sizes = [prod(shape) for shape in shapes]
    theirs = [part.reshape(shape) for part, shape in zip(flat[3].split(sizes), shapes)]
    assert conv[0].equal(theirs[0].T)
    heads, value, key = shapes[1]
    there = theirs[1].reshape(heads, key, value) if key_first else theirs[1].transpose(1, 2)
    assert temporal[0].equal(there)
