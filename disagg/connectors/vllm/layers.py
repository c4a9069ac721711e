"""What vLLM's layers keep: the table of its backends, and how its modules and specs are read.

vLLM registers a layer of attention as a view `[block, head, state, content]` in any physical order,
and a layer of linear attention as bytes `[block, 1, 1, content]`. What a kernel writes there is in
no attribute of vLLM's: `ATTENTION` says it, as read in the kernels of vLLM 0.32 and 0.33.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

import torch

from disagg.connectors.linear_states import LinearKind, LinearShard, states
from disagg.connectors.tensors import (
    LayerTensor,
    TensorPart,
    UnknownFormat,
    dense_items,
    head_items,
    head_rows,
    items,
    naming,
    rows,
)
from disagg.connectors.vllm.registered import OPEN_WINDOWS, V4, V4_KEYS, V4_LATENTS, RegisteredLayer
from kvpool.item import Cell, Repeat, Seq, Template, item_bytes
from kvpool.layout.dtypes import dtype_name
from kvpool.layout.formats import (
    FP4,
    TILE,
    V4_PAGES,
    Order,
    fp8_latent_row,
    index_key_page,
    latent_row,
    nvfp4_latent_row,
    nvfp4_pages,
    scaled,
    v_scale_tiles,
)

Parts = list[TensorPart]
View = tuple[torch.Tensor, Parts, int]
"""A view of a layer's tensor, its parts, and tokens an entry (`LayerTensor.tile`)."""
HERE = "add it to disagg/connectors/vllm/layers.py"
LINEAR: dict[str, LinearKind] = {
    "MAMBA1": "mamba1",
    "MAMBA2": "mamba2",
    "GDN_ATTN": "delta_net",
    "SHORT_CONV": "short_conv",
}
"""What a slot holds, by the name of the kind of linear attention."""
OPAQUE = "INT4_PER_TOKEN_HEAD"
"""The quantisation mode whose pages move whole. Its kernel reads nothing but pages and constants:
the device decides how TurboQuant packs.
"""
MODES = {
    "NONE": "",
    "FP8_PER_TENSOR": "",
    "INT8_PER_TOKEN_HEAD": "TRITON_ATTN",
    "FP8_PER_TOKEN_HEAD": "TRITON_ATTN",
    OPAQUE: "TRITON_ATTN",
    "NVFP4": "FLASHINFER",
    "NVFP4_DS_MLA": "FLASHMLA_SPARSE",
}
"""Known quantisation modes (`KVQuantMode`), each with its backend, if not every backend has it."""


def read_layer(layer: RegisteredLayer) -> list[LayerTensor]:
    """Raises UnknownFormat, which names the layer and its backend."""
    number, owner, prefix = layer.number, layer.owner, layer.prefix
    name = f"{layer.name} ({owner} layer {number}), {layer.backend}"
    with naming(name):
        views = read_linear(layer) if layer.is_linear else read_attention(layer)
    return [
        LayerTensor(
            name=name, number=number, view=view, parts=parts, owner=owner, prefix=prefix, tile=tile
        )
        for view, parts, tile in views
    ]


def read_linear(layer: RegisteredLayer) -> list[View]:
    """The slots of a layer of linear attention (`MambaBase.bind_kv_cache`)."""
    spec, parallel = layer.spec, layer.config.parallel_config
    kind = LINEAR.get(layer.backend)
    if kind is None or len(spec.shapes) != (1 if kind == "short_conv" else 2):
        raise UnknownFormat(
            f"{len(spec.shapes)} states are not known (known: the conv state and, but of "
            f"SHORT_CONV, the temporal state of {', '.join(LINEAR)}). Turn off what adds states "
            f"(--use-replayssm, which vLLM takes with no connector), or {HERE}."
        )
    ranks = 1 if getattr(spec, "tp_replicated", False) else parallel.tensor_parallel_size
    shard = LinearShard(
        rank=parallel.rank % ranks,
        ranks=ranks,
        groups=getattr(getattr(layer.module, "norm", None), "n_groups", 0),
        spare=0 if kind == "mamba1" else layer.config.num_speculative_tokens,
        dim_first=layer.platform.dim_first,
        key_first=layer.platform.key_first,
    )
    conv, *temporal = spec.shapes
    slot = states(kind, conv, [*chain(*temporal)], spec.dtypes, shard)
    return [(layer.view, [items(Seq(*slot))], 1)]


def read_attention(layer: RegisteredLayer) -> list[View]:
    """What a layer of attention keeps (`do_kv_cache_update` of its backend), and in which view."""
    backend, mode = layer.backend, layer.spec.kv_quant_mode.name
    if backend not in ATTENTION:
        raise UnknownFormat(
            f"what it keeps is not known (known: {', '.join(sorted(ATTENTION))}). Choose one of "
            f"those by --attention-backend, or {HERE}."
        )
    # the width of an entry says how DeepSeek-V4's are packed
    if backend not in V4 and MODES.get(mode, "none") not in ("", backend):
        names = (f"{mode} of {owner}" if owner else mode for mode, owner in MODES.items())
        raise UnknownFormat(
            f"pages of {mode} are not known (known: {', '.join(names)}). Use --kv-cache-dtype auto."
        )
    if mode in ("NVFP4", OPAQUE):
        return block_scaled(layer) if mode == "NVFP4" else whole_items(layer)
    return [(layer.view, ATTENTION[backend](layer), 1)]


def block_scaled(layer: RegisteredLayer) -> list[View]:
    """Pages of `[K | its scales | V | its scales]` (`_nvfp4_kv_views`); V's scales are in tiles
    on some devices.
    """
    pages, (outer, *_) = dense_items(layer.view)
    order: Order = "hnd" if outer == 1 else "nhd"
    tokens, dim = layer.view.shape[2], layer.spec.head_size
    page = pages.flatten(1)[:, None, None]
    *planes, v_scales = nvfp4_pages(layer.heads, tokens, dim, order)
    if not layer.platform.scale_tiles:
        return [(page, [items(Seq(*planes, v_scales))], 1)]
    start = page.shape[3] - item_bytes(v_scales)
    tiles = v_scale_tiles(layer.heads, tokens, dim, order)
    return [
        (page[..., :start], [items(Seq(*planes))], 1),
        (page[..., start:], [items(tiles)], TILE),
    ]


def whole_items(layer: RegisteredLayer) -> list[View]:
    """Items known by name only, and contiguous in some order of dims. That
    order, the heads and the tokens become part of the name.
    """
    view = layer.view
    ordered, inner = dense_items(view)
    names = {1: "heads", 2: "tokens", 3: "elements"}
    shape = " x ".join(f"{view.shape[dim]} {names[dim]}" for dim in inner)
    item = Cell("kv", ordered[0].nbytes, "uint8")
    heads = f"head {layer.heads.start} of {layer.heads.total}"
    return [(ordered, [items(item, f"{layer.packing(OPAQUE)}, {shape}, {heads}")], 1)]


def index_keys(layer: RegisteredLayer) -> Parts:
    """Index keys of sparse attention, then their scales."""
    if getattr(layer.module, "uses_shuffled_layout", False):
        raise UnknownFormat("shuffled index keys are not known. Use a platform without them.")
    dim, platform = layer.model.hf_text_config.index_head_dim, layer.platform
    entries, width = layer.view.shape[2:]
    if width < dim and layer.backend not in V4:
        raise UnknownFormat("index keys in fp4 are known of DeepSeek-V4 only. Use those in fp8.")
    dtype = FP4 if width < dim else platform.fp8
    return [items(index_key_page(entries, dim, dtype=dtype, scale=platform.index_scale))]


def v4_latents(layer: RegisteredLayer) -> Parts:
    """Of DeepSeek-V4 and V4.1: all values of a page, then their scales, or plain rows, whose fp8
    has no scale (FlashInfer's is 1).
    """
    width, dtype = entry = layer.view.shape[3], dtype_name(layer.view.dtype)
    if entry not in V4_PAGES:
        raise UnknownFormat(
            f"latents of DeepSeek-V4 in {layer.spec.cache_dtype_str}, {width} elements of {dtype} "
            "each, are not known. Use --kv-cache-dtype fp8_ds_mla."
        )
    return [items(V4_PAGES[entry](layer.view.shape[2]))]


def open_windows(layer: RegisteredLayer) -> Parts:
    """Keys and scores of tokens that are not yet compressed, of the latents or the indexer's."""
    role = "index_state" if "indexer" in layer.name.split(".") else "state"
    return [rows(Cell(role, layer.view.shape[3], dtype_name(layer.view.dtype)))]


SPARSE_ROWS = {"fp8_ds_mla": fp8_latent_row, "nvfp4_ds_mla": nvfp4_latent_row}
"""Rows of FLASHMLA_SPARSE, by cache dtype."""


def latent_rows(layer: RegisteredLayer) -> Parts:
    cache = getattr(layer.module, "kv_cache_dtype", "auto")
    if cache in SPARSE_ROWS:
        return [rows(SPARSE_ROWS[cache]())]
    config = layer.model.hf_text_config
    return [rows(latent_row(config.kv_lora_rank, config.qk_rope_head_dim, layer.element))]


def planes(layer: RegisteredLayer) -> Parts:
    """A plane of K and one of V in the place of heads, each `[token, head, dim]`."""
    cells = (Cell(role, layer.spec.head_size, layer.element) for role in ("k", "v"))
    return [rows(layer.heads.of(cell), plane) for plane, cell in enumerate(cells)]


def keys_and_values(layer: RegisteredLayer) -> Parts:
    """`[K | V]` a token and head; in some modes each with a float32 scale behind it."""
    cells: list[Template] = []
    with_scales = layer.spec.kv_quant_mode.name.endswith("TOKEN_HEAD")
    for role, count in (("k", layer.spec.head_size), ("v", layer.spec.head_size_v)):
        cells += scaled(role, count, dtype=layer.element)[: 1 + with_scales]
    return [head_rows(Seq(*cells), layer.heads)]


def transposed_keys(layer: RegisteredLayer) -> Parts:
    """On a CPU: of a head K `[dim, token]`, V `[token, dim]`, or as its isa packs them."""
    key, value, tokens = layer.spec.head_size, layer.spec.head_size_v, layer.view.shape[2]
    dtype, isa = layer.element, getattr(layer.module, "isa", "")
    if isa in ("vec", "vec16"):  # csrc/cpu/cpu_attn_vec.hpp, which vec16 inherits from
        keys = Repeat("dim", key, Repeat("entry", tokens, Cell("k", 1, dtype)))
        values = Repeat("entry", tokens, Cell("v", value, dtype))
        return [head_items(Seq(keys, values), layer.heads)]
    if isa in ("", "rvv") or (isa, dtype) == ("neon", "bfloat16"):
        raise UnknownFormat(
            f"how isa {isa or 'unknown'} packs {dtype} is decided where vLLM is built. Use --dtype "
            "float32 (neon), or hosts of another architecture."
        )
    halves = Seq(Cell("k", key * tokens, dtype), Cell("v", value * tokens, dtype))
    return [head_items(halves, layer.heads, layer.packing(isa, dtype))]


ATTENTION: Mapping[str, Callable[[RegisteredLayer], Parts]] = {
    backend: form
    for form, backends in {
        keys_and_values: (
            *("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN"),
            *("TRITON_ATTN_DIFFKV", "TRITON_FLASH_ATTN", "TRITON_FLASHINFER", "HPC_ATTN"),
        ),
        latent_rows: (
            *("CPU_MLA", "AMX_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA", "CUTLASS_MLA"),
            *("FLASH_ATTN_MLA", "FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"),
            *("FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"),
        ),
        planes: ("B12X",),
        transposed_keys: ("CPU_ATTN",),
        index_keys: ("DEEPSEEK_V32_INDEXER", *V4_KEYS),
        v4_latents: V4_LATENTS,
        open_windows: (OPEN_WINDOWS,),
    }.items()
    for backend in backends
}
"""What a page holds, by the name of the attention backend."""
