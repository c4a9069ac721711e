"""The table of layers against vLLM's own backend classes, specs, views and CPU kernels.

Run in an environment with vLLM (0.32 or 0.33) and kvpool:
`VLLM_CPU_OMP_THREADS_BIND=nobind python -m pytest tests/engines`.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateShapeCalculator,
    is_conv_state_dim_first,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from disagg.connectors.blocks import BlockGroup
from disagg.connectors.tensors import UnknownFormat
from disagg.connectors.vllm.layers import ATTENTION
from disagg.connectors.vllm.layout import engine_layout
from disagg.connectors.vllm.registered import V4
from kvpool.layout import RequestAddress, Span
from tests import oracle
from tests.disagg.connectors.vllm import engines, kernels
from tests.disagg.connectors.vllm.engines import Module

current_platform.import_kernels()
BLOCKS, TOKENS, D, LATENT, ROPE = 6, 32, 32, 512, 64
BF16, U8 = torch.bfloat16, torch.uint8
IDS = [3, 1, 4, 2, 5]


def backend(name):
    """vLLM's own class; None where it needs a package or a device that is not here."""
    if name == "DEEPSEEK_V32_INDEXER":
        return DeepseekV32IndexerBackend
    try:
        return AttentionBackendEnum[name].get_class()
    except (ImportError, AssertionError):
        return None


# the others in test_deepseek_v4.py
CLASSES = {name: backend(name) for name in ATTENTION if name not in V4}
HERE = [name for name, held in CLASSES.items() if held is not None]
MLA = [name for name in HERE if name.endswith("MLA") or "MLA_SPARSE" in name]


HEADS = {"block_size": TOKENS, "num_kv_heads": 2, "head_size": D, "dtype": BF16}
ROWS = {"block_size": TOKENS, "num_kv_heads": 1, "head_size": LATENT + ROPE, "dtype": BF16}


def heads_spec(**more):
    return FullAttentionSpec(**HEADS | more)


def mla_spec(**more):
    return MLAAttentionSpec(**ROWS | more)


def spec_of(name):
    """The spec that vLLM's layer makes for a backend (its `get_kv_cache_spec`), customised."""
    if name == "DEEPSEEK_V32_INDEXER":
        return mla_spec(head_size=132, dtype=U8)
    made = mla_spec() if name in MLA else heads_spec()
    if name.endswith("DIFFKV"):
        made = heads_spec(head_size_v=48)
    return CLASSES[name].customize_spec(made)


config_for = partial(engines.config, latent=LATENT, rope=ROPE)


def allocate(groups, layout="LBHNC", blocks=BLOCKS):
    """Groups of (layer names, spec) over one another, as `allocate_kv_cache` lays them: the
    KVCacheConfig, the raw tensor, and vLLM's view of every layer.
    """
    order, placed = KVCacheLayout[layout], []
    for names, spec in groups:
        layer, block, *_ = compute_layout_strides(spec, blocks, len(names), order)
        placed.append((spec, KVCacheTensor(0, list(names), layer, block)))
    size = max(spec.page_size_bytes * blocks * len(t.layers) for spec, t in placed)
    raw, views = torch.zeros(size, dtype=torch.int8), {}
    for spec, tensor in placed:
        views |= dict(
            zip(tensor.layers, create_kv_cache_views(raw, spec, blocks, order, tensor, None))
        )
    held = [KVCacheGroupSpec(list(names), spec) for names, spec in groups]
    return KVCacheConfig(blocks, [tensor for _, tensor in placed], held), raw, views


def names(*layers):
    return [engines.name(n) for n in layers]


def found(layout, raw):
    return oracle.over(layout, raw.view(U8).numpy())


def assert_found(seen, raw, tokens, items):
    """What kernels wrote of a request in these items of the only space is in its regions, and
    nothing else.
    """
    state, actual = found(seen.layout, raw), raw.clone()
    (space,) = seen.layout.spaces
    oracle.blank(state, 0)
    oracle.write(state, RequestAddress(tokens, {space.name: Span(items)}), range(tokens))
    assert actual.equal(raw)


def kernel_for(name, view, layer, ids=IDS):
    if name == "DEEPSEEK_V32_INDEXER":
        return kernels.IndexKeys(view, layer, ids)
    if name in MLA:
        return kernels.LatentRows(view, layer, ids, latent=LATENT)
    if name == "B12X":
        return kernels.PlanesOfHeads(view, layer, ids, range(2))
    if name == "CPU_ATTN":
        return kernels.TransposedKeys(view, layer, ids, range(2))
    return kernels.KeysAndValues(view, layer, ids, range(2), key=D)


def layouts_of(name):
    """Layouts that a backend takes, without LHBNC, which no pool of blocks' items can be."""
    known = CLASSES[name].supported_kv_cache_layouts() or tuple(KVCacheLayout)
    dense = name == "DEEPSEEK_V32_INDEXER"
    skip = ("LHBNC", "BHLNC") if dense else ("LHBNC",)
    return [each.name for each in known if each.name not in skip]


def test_vllm_knows_every_backend_of_the_table_by_this_name():
    others = set(CLASSES) - {"DEEPSEEK_V32_INDEXER"}
    assert others <= {member.name for member in AttentionBackendEnum}
    assert {name: held.get_name() for name, held in CLASSES.items() if held} == dict(
        zip(HERE, HERE)
    )
    assert {"FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN", "CPU_MLA", "FLASHMLA_SPARSE"} <= set(HERE)


@pytest.mark.parametrize(("name", "order"), [(n, o) for n in HERE for o in layouts_of(n)])
def test_views_that_vllm_makes_for_a_backend_are_found(name, order):
    layers = names(0, 1, 2)
    config, raw, views = allocate([(layers, spec_of(name))], order)
    modules = {n: Module(backend=CLASSES[name], isa="vec") for n in layers}
    seen = engine_layout(config_for(modules), config, views)
    assert seen.groups == (BlockGroup("kv0", 1, TOKENS),)
    for number, layer in enumerate(layers):
        kernel_for(name, views[layer], number).write(range(70))
    assert_found(seen, raw, 70, IDS[:3])


@pytest.mark.parametrize("mode", ["INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD"])
def test_scales_per_token_and_head_are_found_in_tritons_content(mode):
    triton, dtype = CLASSES["TRITON_ATTN"], torch.int8 if mode.startswith("INT8") else U8
    spec = triton.customize_spec(heads_spec(dtype=dtype, kv_quant_mode=KVQuantMode[mode]))
    config, raw, views = allocate([(names(0), spec)], "LBNHC")
    (layer,), modules = names(0), {names(0)[0]: Module(backend=triton, kv_cache_dtype=mode.lower())}
    seen = engine_layout(config_for(modules), config, views)
    kernels.TokenHeadScales(views[layer], 0, IDS, range(2)).write(range(40))
    assert_found(seen, raw, 40, IDS[:2])


def test_blocks_of_int4_are_one_whole_each():
    triton, mode = CLASSES["TRITON_ATTN"], KVQuantMode.INT4_PER_TOKEN_HEAD
    spec = triton.customize_spec(heads_spec(dtype=U8, kv_quant_mode=mode))
    config, _, views = allocate([(names(0, 1), spec)], "LBNHC")
    modules = dict.fromkeys(
        names(0, 1), Module(backend=triton, kv_cache_dtype="int4_per_token_head")
    )
    layout = engine_layout(config_for(modules), config, views).layout
    assert {(r.role, r.width) for r in layout.regions} == {("kv", spec.page_size_bytes)}
    assert all("INT4_PER_TOKEN_HEAD 32+32" in region.packing for region in layout.regions)


def test_rows_of_656_bytes_and_their_index_keys_are_one_group():
    rows = mla_spec(dtype=U8, cache_dtype_str="fp8_ds_mla", state_content_bytes=656)
    layers = [*names(0), "model.layers.0.self_attn.indexer.k_cache"]
    config, _, views = allocate([(layers[:1], rows)])
    _, _, keys = allocate([(layers[1:], spec_of("DEEPSEEK_V32_INDEXER"))])
    each = dict(zip(layers, (rows, spec_of("DEEPSEEK_V32_INDEXER"))))
    config.kv_cache_groups[0] = KVCacheGroupSpec(layers, UniformTypeKVCacheSpecs(TOKENS, each))
    modules = {
        layers[0]: Module(backend=CLASSES["FLASHMLA_SPARSE"], kv_cache_dtype="fp8_ds_mla"),
        layers[1]: Module(backend=DeepseekV32IndexerBackend),
    }
    seen = engine_layout(config_for(modules), config, views | keys).layout
    widths = {region.role: (region.dtype, region.width) for region in seen.regions}
    assert widths == {
        "latent": ("float8_e4m3fn", 512),
        "latent.scale": ("float32", 16),
        "rope": ("bfloat16", 128),
        "index_key": ("float8_e4m3fn", 128),
        "index_key.scale": ("float32", 4),
    }


@pytest.mark.parametrize(
    ("isa", "tokens", "dim", "dtype"), [("vec", 64, 128, BF16), ("vec16", 16, 80, torch.float32)]
)
def test_the_cpu_kernel_writes_where_the_regions_say(isa, tokens, dim, dtype):
    (layer,) = names(0)
    spec = FullAttentionSpec(block_size=tokens, num_kv_heads=3, head_size=dim, dtype=dtype)
    config, raw, views = allocate([([layer], spec)])
    module = Module(backend=CPUAttentionBackend, isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
    seen = engine_layout(config_for({layer: module}), config, views)
    count = 2 * tokens + 5
    key, value = (torch.randn(count, 3, dim).to(dtype) for _ in "kv")
    slots = torch.tensor([IDS[t // tokens] * tokens + t % tokens for t in range(count)])
    impl = object.__new__(CPUAttentionBackendImpl)
    impl.attn_type, impl.kv_cache_dtype = "decoder", "auto"
    impl.do_kv_cache_update(module, key, value, views[layer], slots)
    held, order = found(seen.layout, raw), np.arange(count)
    block, entry = np.array(IDS)[order // tokens], order % tokens
    k = held.views["target", 0, "k"][block, entry]  # [token, head, dim, byte]
    v = held.views["target", 0, "v"][block, entry]  # [token, head, byte]
    assert np.array_equal(k.reshape(count, 3, -1), key.view(U8).numpy())
    assert np.array_equal(v, value.view(U8).numpy())


def test_the_cpu_mla_kernel_writes_where_the_regions_say():
    (layer,) = names(0)
    config, raw, views = allocate([([layer], mla_spec(block_size=16))])
    module = Module(backend=CLASSES["CPU_MLA"])
    seen = engine_layout(config_for({layer: module}), config, views)
    latent, rope = torch.randn(40, LATENT).to(BF16), torch.randn(40, 1, ROPE).to(BF16)
    slots = torch.tensor([IDS[t // 16] * 16 + t % 16 for t in range(40)])
    cache = views[layer].squeeze(1)
    object.__new__(CPUMLAImpl).do_kv_cache_update(latent, rope, cache, slots, "auto", None)
    held, order = found(seen.layout, raw), np.arange(40)
    at = np.array(IDS)[order // 16], order % 16
    assert np.array_equal(held.views["target", 0, "latent"][at], latent.view(U8).numpy())
    assert np.array_equal(held.views["target", 0, "rope"][at], rope[:, 0].view(U8).numpy())


class LinearLayer(MambaBase):
    """A layer whose states vLLM's own `bind_kv_cache` cuts out of its pages."""

    def __init__(self, kind, shapes):
        self.kind, self.shapes = kind, shapes

    def get_state_shape(self):
        return self.shapes

    def get_state_dtype(self):
        return (BF16, torch.float32)[: len(self.shapes)]

    @property
    def mamba_type(self):
        return MambaAttentionBackendEnum[self.kind]


SHAPES = {
    "GDN_ATTN": lambda tp: MambaStateShapeCalculator.gated_delta_net_state_shape(
        tp, 4, 8, 16, 16, 4
    ),
    "MAMBA2": lambda tp: MambaStateShapeCalculator.mamba2_state_shape(tp, 128, 1, 8, 16, 32, 4),
    "MAMBA1": lambda tp: MambaStateShapeCalculator.mamba1_state_shape(tp, 64, 16, 4),
    "SHORT_CONV": lambda tp: MambaStateShapeCalculator.short_conv_state_shape(tp, 64, 4),
}
SECTIONS = {
    "GDN_ATTN": [("q", 4, 16), ("k", 4, 16), ("v", 8, 16)],
    "MAMBA2": [("x", 8, 16), ("b", 1, 32), ("c", 1, 32)],
    "MAMBA1": [("x", 64, 1)],
    "SHORT_CONV": [("x", 64, 1)],
}


@pytest.mark.parametrize(("dim_first", "tp"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("kind", SHAPES)
def test_states_that_vllm_cuts_out_are_those_of_the_regions(kind, tp, dim_first, monkeypatch):
    from vllm.model_executor.layers.mamba import mamba_utils

    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS" if dim_first else "SD")
    mamba_utils.get_conv_state_layout.cache_clear()
    assert is_conv_state_dim_first() is dim_first
    rank = tp - 1
    layer = LinearLayer(kind, tuple(SHAPES[kind](tp)))
    layer.norm = SimpleNamespace(n_groups=1)
    spec = MambaSpec(
        block_size=TOKENS, shapes=layer.shapes, dtypes=layer.get_state_dtype(),
        mamba_type=layer.mamba_type, page_size_padded=32768,
    )  # fmt: skip
    config, raw, views = allocate([(names(0), spec)])
    layer.bind_kv_cache(views[names(0)[0]])
    conv, *temporal = layer.kv_cache
    for state in layer.kv_cache:
        state.copy_(torch.randn(state.shape))
    seen = engine_layout(config_for({names(0)[0]: layer}, tp=tp, rank=rank), config, views)
    assert seen.groups == (BlockGroup("state0", 1, TOKENS, "first"),)
    held = found(seen.layout, raw)
    channels, at = (conv if dim_first else conv.transpose(1, 2)), 0
    for role, total, dim in SECTIONS[kind]:
        count = max(1, total // tp)
        head = seen.layout.region_by_key["target", 0, f"conv.{role}"].axis("head")
        assert (head.start, head.total) == (rank * total // tp, total)
        part = channels[:, at : at + count * dim].contiguous().view(U8)
        view = held.views["target", 0, f"conv.{role}"]
        assert np.array_equal(view.reshape(BLOCKS, count * dim, -1), part.numpy())
        at += count * dim
    assert at == channels.shape[1]
    for state in temporal:
        view = held.views["target", 0, "temporal"]
        assert np.array_equal(view.reshape(BLOCKS, -1), state.flatten(1).view(U8).numpy())
    mamba_utils.get_conv_state_layout.cache_clear()


def flash(*layers, **said):
    return {n: Module(backend=CLASSES["FLASH_ATTN"], **said) for n in names(*layers)}


def test_groups_lie_over_one_another_and_share_one_pool_of_blocks():
    window = SlidingWindowSpec(**HEADS, sliding_window=100)
    chunk = ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=64)
    parts = [(names(0, 1), heads_spec()), (names(2, 3), window), (names(4, 5), chunk)]
    config, _, views = allocate(parts)
    seen = engine_layout(config_for(flash(*range(6))), config, views)
    assert [group.space for group in seen.groups] == ["kv0", "swa1", "chunk2"]
    windows = [(s.window, s.window_step, s.block_pool) for s in seen.layout.spaces]
    assert windows == [(None, 1, "blocks"), (99, 1, "blocks"), (0, 64, "blocks")]
    roles = {region.layer: region.role for region in seen.layout.regions if "v" in region.role}
    assert roles == {0: "v", 1: "v", 2: "swa.v", 3: "swa.v", 4: "v", 5: "v"}
    bases = {b.space: b.base for b in reversed(seen.layout.buffers)}
    assert len(set(bases.values())) == 1


def test_a_windowed_layer_whose_blocks_are_all_kept_is_paged():
    """vLLM makes one group of all layers, whose spec has the window of those that have any."""
    config, _, views = allocate([(names(0, 1), heads_spec(sliding_window=100))])
    modules = flash(0, sliding_window=100) | flash(1, sliding_window=None)
    layout = engine_layout(config_for(modules), config, views).layout
    (space,) = layout.spaces
    assert (space.kind, space.window) == ("paged", None)
    assert {(r.layer, r.role) for r in layout.regions} == {
        (0, "swa.k"), (0, "swa.v"), (1, "k"), (1, "v"),
    }  # fmt: skip


def test_a_group_without_layers_on_this_stage_has_no_space():
    config, _, views = allocate([(names(0), heads_spec()), (names(1), heads_spec())])
    config.kv_cache_groups[0].layer_names = []
    seen = engine_layout(config_for(flash(1)), config, views)
    assert [group.space for group in seen.groups] == ["", "kv1"]
    assert {region.layer for region in seen.layout.regions} == {1}


@pytest.mark.parametrize(
    ("total", "tp", "rank", "shard"),
    [(8, 4, 3, (6, 8)), (2, 4, 3, (1, 2)), (2, 4, 1, (0, 2)), (1, 4, 2, (0, 1)), (4, 4, 2, (2, 4))],
)
def test_ranks_hold_their_share_of_the_heads(total, tp, rank, shard):
    held = max(1, total // tp)
    config, _, views = allocate([(names(0), heads_spec(num_kv_heads=held))])
    made = config_for(flash(0), tp=tp, rank=tp + rank, kv_heads=total)
    axis = engine_layout(made, config, views).layout.regions[0].axis("head")
    assert (axis.start, axis.total, axis.size) == (*shard, held)


def test_layers_behind_the_targets_and_marked_ones_are_a_drafts():
    config, _, views = allocate([(names(3, 4, 2), heads_spec())])
    config.kv_cache_groups[0].is_eagle_group = True
    modules = flash(3, 4) | flash(2, is_draft_layer=True)
    regions = engine_layout(config_for(modules, layers=4), config, views).layout.regions
    assert {(r.owner, r.layer) for r in regions} == {("target", 3), ("draft", 0), ("draft", 2)}


def test_layers_that_are_named_otherwise_than_the_targets_are_a_drafts():
    """`mtp.layers.0` of Qwen3-Next, and a draft model's."""
    others = [f"{stem}.0.self_attn.attn" for stem in ("mtp.layers", "draft_model.model.layers")]
    for other in others:
        config, _, views = allocate([([*names(0, 1), other], heads_spec())])
        modules = flash(0, 1) | {other: Module(backend=CLASSES["FLASH_ATTN"])}
        regions = engine_layout(config_for(modules), config, views).layout.regions
        assert {(r.owner, r.layer) for r in regions} == {
            ("target", 0),
            ("target", 1),
            ("draft", 0),
        }


def test_a_layer_that_shares_anothers_cache_has_no_state():
    config, _, views = allocate([(names(0), heads_spec())])
    config.kv_cache_groups[0].layer_names.append(names(1)[0])
    views[names(1)[0]] = views[names(0)[0]]
    modules = flash(0) | flash(1, kv_sharing_target_layer_name=names(0)[0])
    seen = engine_layout(config_for(modules), config, views)
    assert {region.layer for region in seen.layout.regions} == {0}


class Other(CLASSES["FLASH_ATTN"]):
    @staticmethod
    def get_name():
        return "CUSTOM"


@pytest.mark.parametrize(
    ("spec", "said", "words"),
    [
        (heads_spec(), {"backend": Other}, ["FLASH_ATTN", "CUSTOM", "--attention-backend"]),
        (CrossAttentionSpec(**HEADS), {}, ["CrossAttentionSpec", "FullAttentionSpec"]),
        (
            mla_spec(model_version="deepseek_v4"),
            {},
            ["MLAAttentionSpec of deepseek_v4", "SPARSE_SWA"],
        ),
        (mla_spec(tokens_per_state=4), {}, ["4 tokens a state"]),
        (
            heads_spec(dtype=U8, kv_quant_mode=KVQuantMode.TURBOQUANT_K8V4),
            {},
            ["TURBOQUANT_K8V4", "FP8_PER_TENSOR"],
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name_before_any_request(spec, said, words):
    config, _, views = allocate([(names(3), spec)])
    module = Module(**{"backend": CLASSES["FLASH_ATTN"], **said})
    with pytest.raises(UnknownFormat) as refused:
        engine_layout(config_for({names(3)[0]: module}), config, views)
    assert all(word in str(refused.value) for word in ["model.layers.3", *words]), refused.value
