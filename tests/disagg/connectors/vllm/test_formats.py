"""The formats of vLLM's layers find every element where its kernels put it (`kernels.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np
import pytest
import torch

from disagg.connectors.linear_states import LinearShard, states
from disagg.connectors.tensors import (
    LayerTensor,
    UnknownFormat,
    fold_blocks,
    items,
    layout_of,
    rows,
)
from disagg.plan import plan
from kvpool.item import Seq
from kvpool.layout import PoolLayout, RequestAddress, Space, Span
from kvpool.layout.formats import latent_row
from kvpool.models import declare
from tests import oracle
from tests.disagg.connectors.vllm import engines, kernels
from tests.disagg.connectors.vllm.engines import LATENT, ROPE, D

BF16, F32, I8, U8 = torch.bfloat16, torch.float32, torch.int8, torch.uint8


@dataclass(frozen=True)
class Format:
    """What a backend keeps, and the kernel that writes it. `said`: of the engine, `model`: what the
    kernel knows. `dense`: it takes the inside of a block for contiguous, heads outermost.
    """

    backend: str
    kernel: type
    content: int
    said: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)
    dense: bool = False

    @property
    def orders(self):
        return ["LBHNC", "BLHNC"] if self.dense else list(kernels.ORDERS)


def key_values(dtype, cache="auto", value=D):
    said = {"dtype": dtype, "kv_cache_dtype": cache, "value": value}
    return Format("FLASH_ATTN", kernels.KeysAndValues, D + value, said, {"key": D})


def scaled(mode, dtype):
    said = {"dtype": dtype, "mode": mode, "kv_cache_dtype": mode.lower()}
    return Format("TRITON_ATTN", kernels.TokenHeadScales, 2 * D + 8, said)


def transposed(dtype, cache="auto"):
    said = {"dtype": dtype, "kv_cache_dtype": cache, "isa": "vec"}
    return Format("CPU_ATTN", kernels.TransposedKeys, 2 * D, said, dense=True)


def latents(dtype, cache="auto"):
    said = {"dtype": dtype, "kv_cache_dtype": cache, "heads": 1}
    return Format("TRITON_MLA", kernels.LatentRows, LATENT + ROPE, said, {"latent": LATENT})


BYTES = {"dtype": U8, "heads": 1}
FORMATS = {
    "keys_and_values": key_values(BF16),
    "keys_and_values_e4m3": key_values(U8, "fp8"),
    "keys_and_values_e5m2": key_values(U8, "fp8_e5m2"),
    "keys_and_values_f32": key_values(F32),
    "two_sizes": key_values(BF16, value=24),
    "planes": Format("B12X", kernels.PlanesOfHeads, 2 * D),
    "int8_scales": scaled("INT8_PER_TOKEN_HEAD", I8),
    "fp8_scales": scaled("FP8_PER_TOKEN_HEAD", U8),
    "transposed": transposed(BF16),
    "transposed_fp8": transposed(U8, "fp8"),
    "latent_rows": latents(BF16),
    "latent_rows_fp8": latents(U8, "fp8"),
    "rows_of_656": Format(
        "FLASHMLA_SPARSE", kernels.SparseRows, 656, {**BYTES, "kv_cache_dtype": "fp8_ds_mla"}
    ),
    "index_keys": Format("DEEPSEEK_V32_INDEXER", kernels.IndexKeys, 132, BYTES, dense=True),
}


class Engine(engines.Layers):
    """One rank's layers, and the kernels over them. `heads`: those of the model."""

    def __init__(self, form: Format, *, seed=0, **more):
        super().__init__(form.backend, form.content, **{"layers": 2, **form.said, **more})
        count = more.get("heads", 2) // more.get("tp", 1)
        first = more.get("rank", 0) * count
        self.ids = np.random.default_rng(seed).permutation(np.arange(1, engines.BLOCKS)).tolist()
        self.kernels = [
            form.kernel(view, n, self.ids, range(first, first + count), **form.model)
            for n, view in enumerate(self.views)
        ]

    def table(self, tokens: int) -> RequestAddress:
        return RequestAddress(tokens, {"kv0": Span(self.ids[: -(-tokens // self.tokens)])})


def hand_over(sources, dest, tokens):
    """What kernels of the sources write is where those of `dest` read, and its layout says."""
    for source in sources:
        oracle.blank(source.state, oracle.SOURCE)
        for kernel in source.kernels:
            kernel.write(range(tokens))
    oracle.blank(dest.state)
    tables = [source.table(tokens) for source in sources]
    oracle.move([source.state for source in sources], dest.state, tables, dest.table(tokens))
    for kernel in dest.kernels:
        kernel.assert_holds(range(tokens))
    oracle.assert_holds(dest.state, dest.table(tokens))


EVERY_ORDER = ("keys_and_values", "latent_rows", "transposed")


@pytest.mark.parametrize(
    ("name", "order"),
    [(n, o) for n, f in FORMATS.items() for o in (f.orders if n in EVERY_ORDER else f.orders[:1])],
)
def test_what_a_kernel_writes_is_handed_to_blocks_of_another_size_and_order(name, order):
    form = FORMATS[name]
    hand_over([Engine(form, order=order)], Engine(form, order=form.orders[-1], block=8, seed=1), 43)


@pytest.mark.parametrize("name", ["keys_and_values", "int8_scales", "transposed"])
def test_two_ranks_heads_are_handed_to_one(name):
    form = FORMATS[name]
    parts = [Engine(form, heads=4, tp=2, rank=rank) for rank in range(2)]
    hand_over(parts, Engine(form, heads=4, block=8, seed=1), 20)


Q, V, HEAD = 2, 4, 8  # heads of the model and their dim
LINEAR = {
    "delta_net": (("conv.q", Q, HEAD), ("conv.k", Q, HEAD), ("conv.v", V, HEAD)),
    "mamba2": (("conv.x", V, HEAD), ("conv.b", 1, 2 * HEAD), ("conv.c", 1, 2 * HEAD)),
    "mamba1": (("conv.x", 16, 1),),
}


def slot_of(kind, rank=0, size=1, dim_first=False, spare=0):
    """One rank's layer 0 of a linear model, 5 blocks with a tail that is not the layer's."""
    sections = [
        (role, max(1, count // size), rank * count // size, dim)
        for role, count, dim in LINEAR[kind]
    ]
    channels, taps = sum(count * dim for _, count, _, dim in sections), 3 + spare
    conv = (channels, taps) if dim_first else (taps, channels)
    _, count, start, _ = sections[-1] if kind == "delta_net" else sections[0]
    temporal = {
        "delta_net": (V // size, HEAD, HEAD),
        "mamba2": (V // size, HEAD, 2 * HEAD),
        "mamba1": (16 // size, 2 * HEAD),
    }[kind]
    nbytes = channels * taps * 2 + prod(temporal) * 4
    pages = torch.zeros(5, 1, 1, nbytes + 64, dtype=I8)
    view = pages[..., :nbytes]
    kernel = kernels.Slots(
        view, 0, [2 + rank], range(start, start + count), conv=conv, temporal=temporal,
        dim_first=dim_first, sections=sections, cell_dims=2 if kind == "mamba2" else 1,
    )  # fmt: skip
    shard = LinearShard(rank=rank, ranks=size, groups=1, spare=spare, dim_first=dim_first)
    parts = [items(Seq(*states(kind, conv, temporal, (BF16, F32), shard)))]
    layer = LayerTensor(name="linear", number=0, view=view, parts=parts)
    layout = layout_of([(Space("state", "slot"), layer)], 1, "linear")
    state = oracle.over(layout, pages.view(-1).view(U8).numpy())
    return state, kernel, RequestAddress(1, {"state": Span([2 + rank])})


@pytest.mark.parametrize("dim_first", [False, True])
@pytest.mark.parametrize("kind", LINEAR)
def test_linear_state_of_two_ranks_is_handed_to_one_that_keeps_its_taps_otherwise(kind, dim_first):
    parts = [slot_of(kind, rank, 2, dim_first=not dim_first) for rank in range(2)]
    state, kernel, table = slot_of(kind, dim_first=dim_first, spare=1)
    oracle.blank(state)
    for _, source, _ in parts:
        source.write(range(1))
    oracle.move([part[0] for part in parts], state, [part[2] for part in parts], table)
    kernel.assert_holds(range(1))
    oracle.assert_holds(state, table)


DELTA_NET = {
    "model_type": "qwen3_next", "num_hidden_layers": 4, "hidden_size": 64, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["linear_attention"] * 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
}  # fmt: skip


@pytest.mark.parametrize("key_first", [True, False])
def test_a_state_of_a_delta_net_is_transposed_where_it_must_be(key_first):
    """vLLM says `[head, value, key]`, which is what GPUs have. On a CPU it is `[head, key, value]`,
    as in the pool.
    """
    heads, value, key = temporal = 4, 12, 8
    conv = 3, 2 * 2 * key + heads * value
    sizes = prod(conv), prod(temporal)
    flat = torch.arange(5 * sum(sizes), dtype=F32).view(5, -1)
    parts = states("delta_net", conv, temporal, (F32, F32), LinearShard(key_first=key_first))
    view = flat.view(I8)[:, None, None]
    seen = LayerTensor(name="linear", number=0, view=view, parts=[items(Seq(*parts))])
    described = seen.describe("state")
    source = PoolLayout(described.buffers, described.regions, (Space("state", "slot"),), 4)
    counts = {"num_pages": 5, "num_slots": 5, "page_size": 4}
    dest = declare(DELTA_NET).build(dtype="float32", layers=[0], **counts)
    tables = [RequestAddress(9, {"state": Span([n]), "kv": Span([1, 2, 3])}) for n in (3, 2)]
    memory = oracle.over(source, flat.view(-1).view(U8).numpy())
    oracle.apply(plan([source], dest.layout).bind(0, *tables), [memory], dest)
    pooled_conv, pooled = dest.get_linear_state(0, [2])
    own_conv, own = flat[3].split(sizes)
    assert pooled_conv[0].equal(own_conv.view(conv).T)
    own = own.view(heads, key, value) if key_first else own.view(temporal).transpose(1, 2)
    assert pooled[0].equal(own)


@pytest.mark.parametrize(
    ("kind", "conv", "temporal", "groups", "words"),
    [
        ("delta_net", (3, 63), (4, 8, 8), 0, ["63 channels", "4 heads of 8"]),
        ("mamba2", (3, 64), (4, 8, 16), 3, ["1 of 3 groups on each of 2 ranks"]),
    ],
)
def test_a_linear_state_that_is_not_known_is_refused(kind, conv, temporal, groups, words):
    with pytest.raises(UnknownFormat) as refused:
        states(kind, conv, temporal, (F32, F32), LinearShard(ranks=2, groups=groups))
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("name", "order", "content", "words"),
    [
        ("keys_and_values", "LBHNC", 40, ["80 bytes", "64 are known"]),
        ("transposed", "LBNHC", 2 * D, ["are not contiguous"]),
        ("index_keys", "LBHNC", 136, ["2176 bytes", "2112 are known"]),
    ],
)
def test_a_page_of_another_size_or_order_is_refused_by_name(name, order, content, words):
    form = FORMATS[name]
    with pytest.raises(UnknownFormat) as refused:
        engines.Layers(form.backend, content, order=order, **form.said)
    text = str(refused.value)
    assert text.startswith("model.layers.0.self_attn.attn") and "its format is not known." in text
    assert all(word in text for word in [*words, "Use a cache layout"]), text


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("name", ["keys_and_values", "latent_rows", "index_keys"])
def test_kernel_blocks_are_one_where_tokens_are_known_and_one_stride_apart(name, order):
    form = FORMATS[name]
    folds = not form.dense and (order == "LBNHC" or name == "latent_rows")
    engine = engines.Layers(
        form.backend, form.content, order=order, block=64, kernel_block=16, **form.said
    )
    assert engine.seen.groups[0].blocks == (1 if folds else 4)


def layer(name, number, *shape):
    return LayerTensor(
        name=name,
        number=number,
        view=torch.zeros(shape, dtype=BF16),
        parts=[rows(latent_row(LATENT, ROPE, "bf16"))],
    )


def test_unequal_kernel_blocks_are_refused_by_name():
    layers = [layer(f"layer {count}", 0, count, 1, 16, 40) for count in (6, 12)]
    with pytest.raises(UnknownFormat, match=r"layer 12 \(12, 1, 16, 40\)"):
        fold_blocks(layers, 6)


def test_layers_of_one_space_with_other_pages_are_refused_by_name():
    layers = [layer(name, n, 3, 1, 16 // (n + 1), 40) for n, name in enumerate("ab")]
    spaces = [Space("kv", entries_per_item=tokens) for tokens in (16, 8)]
    layout = layout_of(zip(spaces[:1], layers), 2, "org/model/", Space("swa", window=4))
    assert ([s.name for s in layout.spaces], layout.model) == (["swa", "kv"], "model")
    with pytest.raises(UnknownFormat, match=r"^b: .*entries_per_item=8.*entries_per_item=16"):
        layout_of(zip(spaces, layers), 2, "org/model")
