"""The table of layers finds every element where vLLM's kernels put it (`kernels.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from disagg.connectors.vllm.layers import (
    Attention,
    Linear,
    UnknownFormat,
    describe_layer,
    join_nested,
)
from disagg.plan import IncompatibleLayouts, plan
from kvpool import HybridLinearPool, MHAPool, MLAPool, NSAPool
from kvpool.layout import PoolLayout, RequestAddress, Space, Span
from kvpool.pools.kinds import MHA, gated_delta_net, mamba2
from tests import oracle
from tests.disagg.connectors.vllm import kernels

D, LATENT, ROPE = 16, 32, 8
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Format:
    """A backend's pages: its kernel, elements a state, and what its module says."""

    backend: str
    kernel: type
    content: int
    said: dict
    dtype: torch.dtype = BF16
    model: dict | None = None
    slots: int | None = None


def heads(backend, kernel=kernels.KeysAndValues, content=2 * D, dtype=BF16, value=D, **said):
    model = {"key": D} if kernel is kernels.KeysAndValues else {}
    return Format(backend, kernel, content, {"key": D, "value": value, **said}, dtype, model)


def rows(backend, kernel=kernels.LatentRows, content=LATENT + ROPE, dtype=BF16, **said):
    model = {"latent": LATENT} if kernel is kernels.LatentRows else {}
    sizes = {"key": LATENT, "value": ROPE, "heads": (0, 0)}
    return Format(backend, kernel, content, {**sizes, **said}, dtype, model)


FORMATS = {
    "flash_attn": heads("FLASH_ATTN"),
    "flash_attn_fp8": heads("FLASH_ATTN", dtype=torch.uint8, dtype_said="fp8"),
    "flashinfer": heads("FLASHINFER"),
    "flashinfer_e5m2": heads("FLASHINFER", dtype=torch.uint8, dtype_said="fp8_e5m2"),
    "triton": heads("TRITON_ATTN", dtype=torch.float32),
    "triton_int8_scales": heads(
        "TRITON_ATTN",
        kernels.TokenHeadScales,
        2 * D + 8,
        torch.int8,
        dtype_said="int8_per_token_head",
    ),
    "triton_fp8_scales": heads(
        "TRITON_ATTN",
        kernels.TokenHeadScales,
        2 * D + 8,
        torch.uint8,
        dtype_said="fp8_per_token_head",
    ),
    "diffkv": heads("FLASH_ATTN_DIFFKV", content=D + 24, value=24),
    "flex": heads("FLEX_ATTENTION"),
    "cpu_vec": heads("CPU_ATTN", kernels.TransposedKeys, isa="vec"),
    "cpu_vec16": heads("CPU_ATTN", kernels.TransposedKeys, dtype=torch.float32, isa="vec16"),
    "cpu_fp8": heads(
        "CPU_ATTN", kernels.TransposedKeys, dtype=torch.uint8, isa="vec", dtype_said="fp8"
    ),
    "cpu_mla": rows("CPU_MLA"),
    "flashmla_fp8": rows("FLASHMLA", dtype=torch.uint8, dtype_said="fp8"),
    "flashmla_sparse_656": rows(
        "FLASHMLA_SPARSE",
        kernels.SparseRows,
        656,
        torch.uint8,
        dtype_said="fp8_ds_mla",
        key=512,
        value=64,
    ),
    "indexer": rows("DEEPSEEK_V32_INDEXER", kernels.IndexKeys, 132, torch.uint8, key=128, value=0),
}
COMPACT = {"CPU_ATTN", "DEEPSEEK_V32_INDEXER"}
"""Backends whose kernels take the inside of a block for contiguous, heads outermost."""


def attention(form: Format, layer: int, view, ids, shard=range(2), total=2, **more):
    """A layer as the connector describes it, and as the kernel writes it."""
    said = {**form.said}
    page = Attention(
        f"model.layers.{layer}.attn",
        layer,
        "target",
        "kv",
        view,
        form.backend,
        said.pop("key"),
        said.pop("value"),
        said.pop("dtype_said", "auto"),
        **{"heads": (shard.start, total), **said, **more},
    )
    return page, form.kernel(view, layer, ids, shard, **form.model)


@dataclass
class Engine:
    """One rank's layers: layout, memory, and the kernels over it."""

    state: oracle.State
    ranks: list
    ids: list[int]
    tokens: int

    @property
    def layout(self):
        return self.state.layout

    def table(self, tokens: int) -> RequestAddress:
        return RequestAddress(tokens, {"kv": Span(self.ids[: -(-tokens // self.tokens)])})

    def write(self, tokens: int) -> None:
        for rank in self.ranks:
            rank.write(range(tokens))

    def assert_holds(self, tokens: int) -> None:
        for rank in self.ranks:
            rank.assert_holds(range(tokens))


def engine(form: Format, order="LBHNC", tokens=16, shard=range(2), total=2, layers=2, seed=0):
    count = 1 if form.kernel in (kernels.LatentRows, kernels.SparseRows, kernels.IndexKeys) else 0
    shape = (7, count or len(shard), tokens, form.content)
    physical, views = kernels.views(order, layers, shape, form.dtype)
    ids = np.random.default_rng(seed).permutation(np.arange(1, 7)).tolist()
    pairs = [attention(form, n, view, ids, shard, total) for n, view in enumerate(views)]
    seen = join_nested(describe_layer(page) for page, _ in pairs)
    spaces = (Space("kv", "paged", tokens),)
    layout = PoolLayout(seen.buffers, seen.regions, spaces, layers)
    slab = physical.view(-1).view(torch.uint8).numpy()
    return Engine(oracle.over(layout, slab), [kernel for _, kernel in pairs], ids, tokens)


def orders(form: Format):
    return ["LBHNC", "BLHNC"] if form.backend in COMPACT else list(kernels.ORDERS)


CASES = [(name, order) for name, form in FORMATS.items() for order in orders(form)]


@pytest.mark.parametrize(("name", "order"), CASES)
def test_what_a_kernel_writes_is_found_in_the_regions(name, order):
    made = engine(FORMATS[name], order)
    made.write(40)
    table = made.table(40)
    actual = {key: view.copy() for key, view in made.state.views.items()}
    oracle.blank(made.state, 0)
    oracle.write(made.state, table, range(40))
    for key, view in made.state.views.items():
        assert np.array_equal(actual[key], view), key


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_of_one_size_are_handed_to_blocks_of_another(name):
    form = FORMATS[name]
    first, *_, last = orders(form)
    source, dest = engine(form, first, 16), engine(form, last, 8, seed=1)
    oracle.blank(source.state, oracle.SOURCE)
    oracle.blank(dest.state)
    source.write(43)
    oracle.move([source.state], dest.state, [source.table(43)], dest.table(43))
    dest.assert_holds(43)
    oracle.assert_holds(dest.state, dest.table(43))


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if "heads" not in f.said])
def test_two_ranks_heads_are_handed_to_one(name):
    form = FORMATS[name]
    parts = [engine(form, "LBHNC", 16, shard, 4) for shard in (range(2), range(2, 4))]
    dest = engine(form, "LBHNC", 8, range(4), 4, seed=1)
    oracle.blank(dest.state)
    for part in parts:
        part.write(20)
    oracle.move([p.state for p in parts], dest.state, [p.table(20) for p in parts], dest.table(20))
    dest.assert_holds(20)
    oracle.assert_holds(dest.state, dest.table(20))


def test_the_planes_of_b12x_are_found():
    view = torch.zeros(5, 2, 8, 2 * D, dtype=BF16)
    page = Attention("a", 0, "target", "kv", view, "B12X", D, D, heads=(0, 2))
    seen = describe_layer(page)
    layout = PoolLayout(seen.buffers, seen.regions, (Space("kv", "paged", 8),), 1)
    held = oracle.over(layout, view.view(-1).view(torch.uint8).numpy())
    kernels.PlanesOfHeads(view, 0, [3, 1], range(2)).write(range(11))
    actual = view.clone()
    oracle.blank(held, 0)
    oracle.write(held, RequestAddress(11, {"kv": Span([3, 1])}), range(11))
    assert actual.view(torch.uint8).equal(view.view(torch.uint8))


Q, V, HEAD = 2, 4, 8  # heads of the model and their dim
LINEAR = {
    "GDN_ATTN": (("conv.q", Q, HEAD), ("conv.k", Q, HEAD), ("conv.v", V, HEAD)),
    "MAMBA2": (("conv.x", V, HEAD), ("conv.b", 1, 2 * HEAD), ("conv.c", 1, 2 * HEAD)),
    "MAMBA1": (("conv.x", 16, 1),),
}


def slots(kind, rank=0, size=1, dim_first=False, spare=0):
    """One rank's layer 0 of a linear model, 5 blocks with a tail that is not the layer's."""
    held = [
        (role, max(1, count // size), rank * count // size, dim)
        for role, count, dim in LINEAR[kind]
    ]
    channels, taps = sum(count * dim for _, count, _, dim in held), 3 + spare
    conv = (channels, taps) if dim_first else (taps, channels)
    first = held[-1] if kind == "GDN_ATTN" else held[0]
    temporal = {
        "GDN_ATTN": (V // size, HEAD, 2 * HEAD // 2),
        "MAMBA2": (V // size, HEAD, 2 * HEAD),
        "MAMBA1": (16 // size, 2 * HEAD),
    }[kind]
    nbytes = channels * taps * 2 + int(np.prod(temporal)) * 4
    pages = torch.zeros(5, 1, 1, nbytes + 64, dtype=torch.int8)
    view = pages[..., :nbytes]
    heads = range(first[2], first[2] + first[1])
    kernel = kernels.Slots(
        view, 0, [2 + rank], heads, conv=conv, temporal=temporal, dim_first=dim_first,
        sections=held, cell_dims=1 if kind in ("GDN_ATTN", "MAMBA1") else 2,
    )  # fmt: skip
    page = Linear(
        "model.layers.0.linear_attn", 0, "target", "state", view, kind, (conv, temporal),
        (BF16, torch.float32), rank, size, 1, spare, dim_first,
    )  # fmt: skip
    seen = describe_layer(page)
    layout = PoolLayout(seen.buffers, seen.regions, (Space("state", "slot"),), 1)
    held_state = oracle.over(layout, pages.view(-1).view(torch.uint8).numpy())
    return held_state, kernel, RequestAddress(1, {"state": Span([2 + rank])})


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("dim_first", [False, True])
@pytest.mark.parametrize("kind", LINEAR)
def test_linear_state_is_found(kind, dim_first, spare):
    held, kernel, table = slots(kind, dim_first=dim_first, spare=spare)
    oracle.write(held, table, range(1))
    kernel.assert_holds(range(1))


@pytest.mark.parametrize("kind", LINEAR)
def test_linear_state_of_two_ranks_is_handed_to_one_that_keeps_its_taps_otherwise(kind):
    parts = [slots(kind, rank, 2, dim_first=True) for rank in range(2)]
    held, kernel, table = slots(kind, dim_first=False, spare=1)
    oracle.blank(held)
    for _, source, _ in parts:
        source.write(range(1))
    oracle.move([p[0] for p in parts], held, [p[2] for p in parts], table)
    kernel.assert_holds(range(1))
    oracle.assert_holds(held, table)


def shape_of(layout: PoolLayout):
    """All of a layout's regions that two sides must have in common."""
    return {
        region.key: (
            region.dtype,
            region.width,
            [(axis.name, axis.start, axis.total) for axis in region.inner_axes],
        )
        for region in layout.regions
    }


def pool_for(name):
    common = {"layers": range(2), "num_pages": 8, "page_size": 8, "dtype": "bf16"}
    return {
        "flash_attn": lambda: MHAPool(num_kv_heads=2, head_dim=D, **common),
        "diffkv": lambda: MHAPool(num_kv_heads=2, head_dim=D, v_head_dim=24, **common),
        "triton_fp8_scales": lambda: MHAPool(num_kv_heads=2, head_dim=D, packing="fp8", **common),
        "cpu_mla": lambda: MLAPool(kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, **common),
        "flashmla_sparse_656": lambda: MLAPool(packing="fp8", **common),
        "indexer": lambda: NSAPool(**common),
    }[name]()


@pytest.mark.parametrize(
    "name", ["flash_attn", "diffkv", "triton_fp8_scales", "cpu_mla", "flashmla_sparse_656"]
)
def test_state_of_vllm_is_the_state_of_a_pool(name):
    source, pool = engine(FORMATS[name], orders(FORMATS[name])[-1]), pool_for(name)
    assert shape_of(source.layout) == shape_of(pool.layout)
    source.write(43)
    table = oracle.place(pool, 43)
    oracle.blank(pool)
    oracle.move([source.state], pool, [source.table(43)], table)
    oracle.assert_holds(pool, table)


def test_index_keys_of_vllm_are_those_of_a_pool():
    seen = shape_of(engine(FORMATS["indexer"]).layout)
    held = shape_of(pool_for("indexer").layout)
    assert seen == {key: held[key] for key in seen}


@pytest.mark.parametrize("kind", ["MAMBA2", "GDN_ATTN"])
def test_linear_state_of_vllm_is_that_of_a_pool_but_for_transposed_states(kind):
    linear = gated_delta_net(Q, V, HEAD, HEAD, 4)
    if kind == "MAMBA2":
        linear = mamba2(V, HEAD, 1, 2 * HEAD, 4)
    pool = HybridLinearPool(
        full=MHA(2, D), linear=linear, linear_layers=[0], layers=[0], num_pages=4, num_slots=4,
        page_size=8, dtype="bf16",
    )  # fmt: skip
    seen, held = shape_of(slots(kind)[0].layout), shape_of(pool.layout)
    if kind == "MAMBA2":
        assert seen == held
        return
    temporal = "target", 0, "temporal"
    assert {k: v for k, v in seen.items() if k != temporal} == {
        k: v for k, v in held.items() if k != temporal
    }
    with pytest.raises(IncompatibleLayouts, match="target layer 0 temporal"):
        plan([slots(kind)[0].layout], pool.layout)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "ROCM_ATTN"}, ["model.layers.3.attn", "ROCM_ATTN", "FLASH_ATTN"]),
        ({"backend": "CPU_ATTN", "isa": "amx"}, ["isa amx", "vec, vec16", "float32"]),
        ({"backend": "CPU_ATTN"}, ["vec, vec16"]),
        ({"dtype": "nvfp4"}, ["nvfp4", "fp8_e4m3", "--kv-cache-dtype auto"]),
        ({"dtype": "fp8"}, ["torch.bfloat16", "cache dtype fp8"]),
        ({"value": 24}, ["64 bytes, 80 are known"]),
        ({"dtype": "int8_per_token_head"}, ["cache dtype int8_per_token_head"]),
    ],
)
def test_a_page_that_is_not_known_is_refused_by_name(changes, words):
    said = {"backend": "FLASH_ATTN", "key": D, "value": D, "heads": (0, 2), **changes}
    view = torch.zeros(3, 2, 8, 2 * D, dtype=BF16)
    with pytest.raises(UnknownFormat) as refused:
        describe_layer(Attention("model.layers.3.attn", 3, "target", "kv", view, **said))
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("kind", "shapes", "words"),
    [
        ("SHORT_CONV", ((3, 8),), ["SHORT_CONV", "MAMBA2"]),
        ("MAMBA2", ((3, 64), (4, 8, 16), (4, 5, 8)), ["3 states", "ReplaySSM"]),
        ("GDN_ATTN", ((3, 63), (4, 8, 8)), ["63 channels", "4 heads of 8"]),
    ],
)
def test_a_linear_state_that_is_not_known_is_refused_by_name(kind, shapes, words):
    dtypes = [torch.float32] * len(shapes)
    nbytes = sum(4 * int(np.prod(shape)) for shape in shapes)
    view = torch.zeros(3, 1, 1, nbytes, dtype=torch.int8)
    page = Linear("model.layers.3.mixer", 3, "target", "state", view, kind, shapes, dtypes)
    with pytest.raises(UnknownFormat, match=r"model\.layers\.3\.mixer") as refused:
        describe_layer(page)
    assert all(word in str(refused.value) for word in words), refused.value
