"""What SGLang's pools of DeepSeek's models keep: latents, index keys, and V4's compressed state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from disagg.connectors import formats
from disagg.connectors.sglang.layer_set import LayerSet
from disagg.connectors.tensors import PlacedTensor, UnknownFormat
from kvpool.item import Cell, Template
from kvpool.layout import Space
from kvpool.layout.dtypes import dtype_name
from kvpool.layout.formats import fp8_latent_row

HERE = "add it to disagg/connectors/sglang/deepseek.py"
DSV4_UNUSED = ("unified_kv_pool", "request_window", "swa_req_ring_size")
"""What pools of DeepSeek-V4 that are known do without."""


def read_mla(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """Rows of latent and rope, the same on every rank."""
    sizes = {"latent": pool.kv_lora_rank, "rope": pool.qk_rope_head_dim}
    form = partial(formats.latent_rows, **sizes, dtype=dtype_name(pool.dtype))
    if pool.dsa_kv_cache_store_fp8:
        form = partial(formats.rows, row=fp8_latent_row())
    views = (formats.paged(tensor, pool.page_size) for tensor in pool.kv_buffer)
    yield from layers.tensors(views, form)


def read_index_keys(pool: Any, layers: LayerSet, page: int) -> Iterator[PlacedTensor]:
    """Pages of index keys in fp8, then of their scales; layers that reuse another's top-k have
    none.
    """
    form = partial(formats.index_keys, dim=pool.index_head_dim, dtype="e4m3", scale="float32")
    tensors = zip(layers.numbers, pool.index_k_with_scale_buffer)
    keys = {number: tensor for number, tensor in tensors if len(tensor)}
    views = (tensor.view(len(tensor), 1, page, -1) for tensor in keys.values())
    yield from replace(layers, numbers=[*keys]).tensors(views, form)


def read_dsa(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """Rows, and index keys."""
    yield from read_mla(pool, layers)
    if pool.index_kpool > 1 or torch.version.hip:
        raise UnknownFormat(
            f"index keys of {pool.index_kpool} tokens, and those of ROCm, are not known. Use a "
            f"model with a key a token on another device, or {HERE}."
        )
    yield from read_index_keys(pool, layers, pool.page_size)


def read_npu_mla(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """Latent, rope, index keys and their scales in tensors of their own, layers stacked."""
    if pool.k_buffer is None:
        raise UnknownFormat("its device cache is turned off (SGLANG_NPU_ENABLE_SPARSE_KV_OFFLOAD).")
    page = pool.page_size
    if pool.use_fia_nz or pool.index_page_size != page:
        raise UnknownFormat(
            f"use_fia_nz {pool.use_fia_nz} and index pages of {pool.index_page_size} beside pages "
            f"of {page} are not known. Unset SGLANG_USE_FIA_NZ, and use equal pages."
        )
    dtype, slots = dtype_name(pool.dtype), pool.indexer_layer_id_to_slot
    numbers = [layers.numbers[layer - pool.start_layer] for layer in slots]
    indexed = replace(layers, numbers=numbers)
    for role, holders, stacked, kind in (
        ("latent", layers, pool.k_buffer, dtype),
        ("rope", layers, pool.v_buffer, dtype),
        ("index_key", indexed, pool.index_k_buffer, dtype),
        ("index_key.scale", indexed, pool.index_k_scale_buffer, "float32"),
    ):
        if stacked is None or not stacked.numel():
            continue
        row: Template = fp8_latent_row()
        if role != "latent" or not pool.dsa_kv_cache_store_fp8:
            row = Cell(role, stacked.shape[-1], kind)
        views = (formats.paged(tensor, page) for tensor in stacked)
        yield from holders.tensors(views, partial(formats.rows, row=row))


def read_dsv4(pool: Any, layers: LayerSet) -> Iterator[PlacedTensor]:
    """Latents of the window; on layers that compress, latents of 4 or 128 tokens (of 4 with index
    keys), and the tokens that are not yet compressed: in a ring for each page of the window (4), or
    for each request (128).
    """
    fits = {
        "kv_layout": str(getattr(pool.kv_layout, "value", pool.kv_layout)) == "v4",
        "uniform_fp8": not pool.uniform_fp8,
        **{name: getattr(pool, name) is None for name in DSV4_UNUSED},
        "online": not any(ring and ring.online for ring in pool.compress_state_pools),
        "compression_ratios": set(pool.compression_ratios) <= {0, 4, 128},
        "index_pools": not any(keys.use_fp4_indexer for keys in pool.index_pools.values()),
        "c4_kv_pool": "HiSparse" not in type(pool.kv_pools.get(4)).__name__,
    }
    if not all(fits.values()):
        wrong = ", ".join(name for name, is_known in fits.items() if not is_known)
        raise UnknownFormat(
            f"{wrong}: known are paged latents of DeepSeek-V4 in fp8, compressed 4 and 128 to one, "
            f"their index keys in fp8, and rings of tokens. Use those, or {HERE}."
        )
    ratios = {n: layer.compress_ratio for n, layer in enumerate(pool.layer_mapping) if layer}
    page, window = pool.swa_kv_pool.page_size, pool.sliding_window - 1
    space = Space("swa", entries_per_item=page, window=window)
    sliding = replace(layers, numbers=[*ratios], space=space, prefix="swa.")
    latents = partial(formats.v4_latents, entries=page)
    yield from sliding.tensors(pool.swa_kv_pool.kv_buffer, latents)
    for ratio in sorted({*ratios.values()} - {0}):
        numbers = [n for n in ratios if ratios[n] == ratio]
        yield from read_compressed(pool, replace(layers, numbers=numbers), ratio)


def read_compressed(pool: Any, layers: LayerSet, ratio: int) -> Iterator[PlacedTensor]:
    """Latents, index keys and rings of layers that keep one latent for `ratio` tokens."""
    entries = pool.page_size // ratio
    space = Space(f"c{ratio}", entries_per_item=entries, tokens_per_entry=ratio, ids="kv")
    layers = replace(layers, space=space, prefix=f"c{ratio}.")
    latents = partial(formats.v4_latents, entries=entries)
    yield from layers.tensors(pool.kv_pools[ratio].kv_buffer, latents)
    if ratio in pool.index_pools:
        yield from read_index_keys(pool.index_pools[ratio], layers, entries)
    for role, rings in (
        ("state", pool.compress_state_pools),
        ("index_state", pool.indexer_compress_state_pools),
    ):
        for number in layers.numbers:
            if rings[number] is not None:
                layer = replace(layers, numbers=[number])
                yield from read_ring(rings[number], layer, role, ratio)


def read_ring(ring: Any, layer: LayerSet, role: str, ratio: int) -> Iterator[PlacedTensor]:
    """A layer's tokens that are not yet compressed. To 4: those of the open window and the one
    before it, in a ring of each page of the sliding window. To 128: those of the open window, in a
    ring of each request.
    """
    rows, size = ring.kv_score_buffer.kv_score, ring.ring_size
    space = Space("c128.ring", "ring", size, window=0, window_step=ratio)
    if ratio == 4:
        page = ring.swa_page_size
        space = Space("c4.ring", entries_per_item=page, window=4, window_step=4, ring=size)
    row = Cell(role, rows.shape[-1], dtype_name(rows.dtype))
    views = [formats.paged(rows, size)]
    yield from replace(layer, space=space).tensors(views, partial(formats.rows, row=row))
